"""Upcoming: a histogram of when the scheduled messages fall due, on a table of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ...inspector.numbers import NONE, Capped, capped, total
from ...inspector.stats import overdue_cutoff
from ...inspector.waiting import may_be_more, read_due
from ...record import admission
from ...record.sql import statements
from ..console_tuning import tuning
from ..statements import console_statements
from .throughput import ORIGIN, WINDOWS, floor


@dataclass(slots=True)
class Bar:
    """The messages that fall due from ``start`` on and before ``end``; with ``start`` None the overdue ones."""

    start: datetime | None
    end: datetime
    number: Capped = NONE
    topics: Counter[str] = field(default_factory=Counter)
    # True when the topics are those of some messages, scaled up to all.
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class Upcoming:
    """The bars in the order of time. Overdue messages have a bar apart."""

    window: str
    overdue: Bar
    bars: list[Bar]

    @property
    def peak(self) -> Bar | None:
        """The highest bar; None when no message falls due."""
        highest = max(self.bars, key=lambda bar: bar.number.count, default=None)
        return highest if highest is not None and highest.number.count else None

    @property
    def sampled(self) -> bool:
        """True when the topics of any bar are estimated from a sample."""
        return any(bar.sampled for bar in (self.overdue, *self.bars))

    def topics(self, most: int) -> list[str]:
        """Return the ``most`` topics that have the most messages."""
        found: Counter[str] = Counter()
        for bar in (self.overdue, *self.bars):
            found.update(bar.topics)
        return [topic for topic, _number in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]]


def count_upcoming(using: str, window: str, now: datetime, overdue_known: Capped = NONE) -> Upcoming:
    """Count the messages that fall due in each bar of the window.

    ``overdue_known`` is the number of overdue messages if it is known already: a backlog has more of them than are
    counted for a bar.
    """
    size = timedelta(seconds=WINDOWS[window].seconds)
    late = overdue_cutoff(now)
    begin = floor(now, size)
    overdue = Bar(None, late)
    bars = [Bar(begin + place * size, begin + (place + 1) * size) for place in range(WINDOWS[window].steps)]
    # The first bar has also what is due, but not overdue yet. Most of what fell due before it has been delivered.
    bars[0].start = late
    counted = [overdue, *bars]
    if closed := admission.full_lately(using):
        # The overdue ones are told from those that wait for limits.
        _count_overdue(using, closed, now, overdue)
        counted = bars
    queues = max(1, len(statements(using).queues()))
    whole = tuning.bar_rows
    _count(using, counted, _share(whole, whole // 3, queues), queues)
    if full := [bar for bar in bars if bar.number.more]:
        _count(using, full, max(_share(whole, whole // 3, queues), tuning.recounted // len(full) // queues), queues)
    if overdue.number.more and overdue_known.count > overdue.number.count > 0:
        _scale(overdue, overdue_known)
    _estimate(using, [bar for bar in bars if bar.number.more])
    return Upcoming(window, overdue, bars)


def _count(using: str, bars: Sequence[Bar], cap: int, queues: int) -> None:
    """Count the messages of these bars anew, of each queue up to the cap."""
    for bar in bars:
        bar.number, bar.topics = NONE, Counter()
    # The rows whose topics are read are all over the table: each of them costs a read of a page.
    sample = _share(tuning.bar_rows // 10, tuning.bar_rows // 60, queues)
    spans = [(bar.start or ORIGIN, bar.end) for bar in bars]
    for found in console_statements(using).count_due(spans, cap, sample):
        _add(bars[found.place], capped(found.number, cap), found.topics)


def _count_overdue(using: str, closed: Collection[str], now: datetime, bar: Bar) -> None:
    due = [*read_due(using, closed, now=now, overdue_since=bar.end)]
    for each in due:
        if each.limit is None and each.overdue:
            bar.topics[each.topic] += each.overdue
    bar.number = Capped(bar.topics.total(), more=may_be_more(due))


def _share(whole: int, least: int, queues: int) -> int:
    """Return the part of ``whole`` that each queue gets: at least ``least``, however many queues share it."""
    return max(1, least, whole // max(1, queues))


def _add(bar: Bar, number: Capped, topics: Sequence[str]) -> None:
    bar.number = total([bar.number, number])
    if topics:
        scale = number.count / len(topics)
        bar.sampled = bar.sampled or number.more or scale > 1
        for topic, count in Counter(topics).items():
            bar.topics[topic] += round(count * scale)


def _estimate(using: str, bars: Sequence[Bar]) -> None:
    """Replace the numbers of bars that were not counted to their end by the planner's guess, where it is higher."""
    for place, guess in console_statements(using).estimate_due([(bar.start, bar.end) for bar in bars]).items():
        counted = bars[place].number.count
        _scale(bars[place], Capped(max(counted, guess), about=guess > counted, more=guess <= counted))


def _scale(bar: Bar, number: Capped) -> None:
    """Give a bar another number, in which its topics have the same shares."""
    scale = number.count / bar.number.count
    bar.number = number
    bar.topics = Counter({topic: round(count * scale) for topic, count in bar.topics.items()})
