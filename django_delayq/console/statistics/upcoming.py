"""Upcoming: a histogram of when the scheduled messages fall due, on a table of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ...inspector.numbers import NONE, Capped, capped, total
from ...inspector.stats import overdue_cutoff
from ...record.sql import statements
from ..console_tuning import tuning
from ..statements import console_statements
from .throughput import WINDOWS, floor


@dataclass(slots=True)
class Bar:
    """The messages that fall due from ``start`` on and before ``end``."""

    start: datetime
    end: datetime
    number: Capped = NONE


def count_upcoming(using: str, window: str, now: datetime, queues: int | None = None) -> list[Bar]:
    """Count the messages that fall due in each bar of the window, in the order of time. Overdue ones are in none.

    ``queues``: about how many queues have messages; None: the database is asked.
    """
    size = timedelta(seconds=WINDOWS[window].seconds)
    begin = floor(now, size)
    bars = [Bar(begin + place * size, begin + (place + 1) * size) for place in range(WINDOWS[window].steps)]
    # The first bar also has messages that are due but not overdue yet. Most messages that fell due before it have been
    # delivered.
    bars[0].start = overdue_cutoff(now)
    queues = len(statements(using).queues()) if queues is None else queues
    whole = tuning.bar_rows
    _count(using, bars, _share(whole, whole // 3, queues))
    if full := [bar for bar in bars if bar.number.more]:
        _count(using, full, max(_share(whole, whole // 3, queues), tuning.recounted // len(full) // max(1, queues)))
    _estimate(using, [bar for bar in bars if bar.number.more])
    return bars


def _count(using: str, bars: Sequence[Bar], cap: int) -> None:
    """Count the messages of these bars anew, of each queue up to the cap."""
    for bar in bars:
        bar.number = NONE
    for place, number in console_statements(using).count_due([(bar.start, bar.end) for bar in bars], cap):
        bars[place].number = total([bars[place].number, capped(number, cap)])


def _share(whole: int, least: int, queues: int) -> int:
    """Return the part of ``whole`` that each queue gets: at least ``least``, however many queues share it."""
    return max(1, least, whole // max(1, queues))


def _estimate(using: str, bars: Sequence[Bar]) -> None:
    """Replace the numbers of bars that were not counted to their end by the planner's estimate, where it is higher."""
    for place, guess in console_statements(using).estimate_due([(bar.start, bar.end) for bar in bars]).items():
        counted = bars[place].number.count
        bars[place].number = Capped(max(counted, guess), about=guess > counted, more=guess <= counted)
