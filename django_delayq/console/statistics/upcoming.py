"""When the scheduled messages fall due: a histogram of what comes next, on a table of any size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.utils import timezone

from ...inspector.numbers import NONE, Capped, capped, total
from ...inspector.snapshot import overdue_cutoff

# Rows that are counted in each bar, shared by the queues, but at least so many of each queue. Of a bar that has more
# PostgreSQL says about how many it has.
CAP = 300
CAP_OF_QUEUE = 100
# Rows whose topics are looked at, in the same way: they are all over the table, so each costs a page.
SAMPLE = 30
SAMPLE_OF_QUEUE = 5
# Ranges in one statement.
BATCH = 5000


@dataclass(frozen=True, slots=True)
class Window:
    """How far to look ahead: so many bars of so many seconds."""

    bars: int
    seconds: int


WINDOWS = {"hour": Window(60, 60), "day": Window(48, 1800), "week": Window(56, 10_800)}


@dataclass(slots=True)
class Bar:
    """What falls due from ``start`` on, before ``end``; ``start`` None: what is overdue."""

    start: datetime | None
    end: datetime
    number: Capped = NONE
    topics: Counter[str] = field(default_factory=Counter)
    # Whether the topics are those of some messages, taken for all.
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class Upcoming:
    """The bars in the order of time. What is overdue stands apart."""

    window: str
    overdue: Bar
    bars: list[Bar]

    @property
    def peak(self) -> Bar | None:
        """The highest bar; None when nothing comes."""
        highest = max(self.bars, key=lambda bar: bar.number.count, default=None)
        return highest if highest is not None and highest.number.count else None

    @property
    def sampled(self) -> bool:
        return any(bar.sampled for bar in (self.overdue, *self.bars))

    @property
    def total(self) -> Capped:
        return total(bar.number for bar in self.bars)

    def topics(self, most: int) -> list[str]:
        """Those with the most messages, at most so many."""
        found: Counter[str] = Counter()
        for bar in (self.overdue, *self.bars):
            found.update(bar.topics)
        return [topic for topic, _number in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]]


@dataclass(frozen=True, slots=True)
class _Range:
    bar: int
    queue: str
    start: datetime
    end: datetime


def look(using: str, window: str, queues: Sequence[str], now: datetime) -> Upcoming:
    """Count what falls due in each bar of the window."""
    size = timedelta(seconds=WINDOWS[window].seconds)
    late = overdue_cutoff(now)
    begin = _floor(now, size)
    overdue = Bar(None, late)
    bars = [Bar(begin + place * size, begin + (place + 1) * size) for place in range(WINDOWS[window].bars)]
    all_ = [overdue, *bars]
    ranges = [
        _Range(place, queue, _FIRST if bar.start is None else max(bar.start, late), bar.end)
        for place, bar in enumerate(all_)
        for queue in queues
    ]
    # What is due, but not overdue yet, may be older than the first bar.
    ranges += [_Range(1, queue, late, begin) for queue in queues if late < begin]
    cap = _share(CAP, CAP_OF_QUEUE, len(queues))
    for part, count, topics in _count(using, ranges, cap, _share(SAMPLE, SAMPLE_OF_QUEUE, len(queues))):
        _add(all_[part.bar], capped(count, cap), topics)
    _guess(using, [bar for bar in bars if bar.number.more])
    return Upcoming(window, overdue, bars)


_FIRST = datetime(2000, 1, 1, tzinfo=UTC)


def _floor(now: datetime, size: timedelta) -> datetime:
    """The last full step of the clock on the wall."""
    local = timezone.localtime(now)
    offset = local.utcoffset() or timedelta(0)
    steps = (now - _FIRST + offset) // size
    return _FIRST + steps * size - offset


def _share(whole: int, least: int, queues: int) -> int:
    return max(min(whole, least), whole // max(1, queues))


def _add(bar: Bar, number: Capped, topics: Sequence[str]) -> None:
    bar.number = total([bar.number, number])
    if topics:
        scale = number.count / len(topics)
        bar.sampled = bar.sampled or number.more or scale > 1
        for topic, count in Counter(topics).items():
            bar.topics[topic] += round(count * scale)


def _count(using: str, ranges: Sequence[_Range], cap: int, sample: int) -> Iterator[tuple[_Range, int, list[str]]]:
    """The ranges, each with how many rows it has (one more than the cap at most) and some topics."""
    connection = connections[using]
    adapt = connection.ops.adapt_datetimefield_value
    aggregate = "json_agg(x.topic)::text" if connection.vendor == "postgresql" else "json_group_array(x.topic)"
    where = "m.state = 'scheduled' AND m.queue = r.queue AND m.due_at >= r.start AND m.due_at < r.finish"
    for begin in range(0, len(ranges), BATCH):
        batch = ranges[begin : begin + BATCH]
        # In the order of the index, so that no plan but a walk along it is worth considering.
        sql = f"""
        WITH r(place, queue, start, finish) AS (VALUES {", ".join(["(%s, %s, %s, %s)"] * len(batch))})
        SELECT place,
            (SELECT count(*) FROM (SELECT 1 FROM delayq_message m WHERE {where}
                                   ORDER BY m.due_at, m.id LIMIT {cap + 1}) x),
            (SELECT {aggregate} FROM (SELECT m.topic FROM delayq_message m WHERE {where}
                                      ORDER BY m.due_at, m.id LIMIT {sample}) x)
        FROM r
        """  # noqa: S608
        values: list[Any] = []
        for place, part in enumerate(batch):
            values += [place, part.queue, adapt(part.start), adapt(part.end)]
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            for place, count, topics in cursor.fetchall():
                if count:
                    yield batch[place], count, json.loads(topics)


def _guess(using: str, bars: Sequence[Bar]) -> None:
    """Put the planner's guess in the place of what was not counted to its end.

    It takes state and due time for independent, and they are not: most finished rows were due in the past, most
    future ones are scheduled. So it is asked for the due time alone.
    """
    connection = connections[using]
    if not bars or connection.vendor != "postgresql":
        return
    part = "SELECT {} FROM delayq_message WHERE due_at >= %s AND due_at < %s"
    union = " UNION ALL ".join(part.format(place) for place in range(len(bars)))
    values = [moment for bar in bars for moment in (bar.start, bar.end)]
    with transaction.atomic(using=using), connection.cursor() as cursor:
        # A parallel plan would say how many rows each worker reads.
        cursor.execute("SELECT set_config('max_parallel_workers_per_gather', '0', true)")
        cursor.execute(f"EXPLAIN (VERBOSE, FORMAT JSON) {union}", values)
        plan = cursor.fetchone()[0]
    found = json.loads(plan) if isinstance(plan, str) else plan
    for node in _nodes(found[0]["Plan"]):
        if "Relation Name" in node:
            _grow(bars[int(node["Output"][0])], node["Plan Rows"])


def _grow(bar: Bar, guess: int) -> None:
    counted = bar.number.count
    bar.number = Capped(max(counted, guess), about=guess > counted, more=guess <= counted)
    scale = bar.number.count / counted
    bar.topics = Counter({topic: round(number * scale) for topic, number in bar.topics.items()})


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
