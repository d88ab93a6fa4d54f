"""What was delivered, and how late: sums of the rollups that the workers write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.utils import timezone

from ..models import Rollup

OUTCOMES = ("consumed", "retried", "dead", "expired")
CLASSES = (*(f"late_{bound}" for bound in Rollup.BOUNDS), "late_more")
_COLUMNS = (*OUTCOMES, *CLASSES)


@dataclass(frozen=True, slots=True)
class Window:
    """How far to look back: so many steps of so many seconds, the last of which is not over."""

    steps: int
    seconds: int


WINDOWS = {"hour": Window(61, 60), "day": Window(48, 1800), "week": Window(56, 10_800)}


@dataclass(slots=True)
class Tally:
    """Sums of some rollups."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_COLUMNS))

    def add(self, counts: Sequence[int]) -> None:
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    @property
    def consumed(self) -> int:
        return self.counts[0]

    @property
    def retried(self) -> int:
        return self.counts[1]

    @property
    def dead(self) -> int:
        return self.counts[2]

    @property
    def expired(self) -> int:
        return self.counts[3]

    @property
    def started(self) -> int:
        """First deliveries: those with a lateness."""
        return sum(self.counts[len(OUTCOMES) :])

    def lateness(self, percent: int) -> float | None:
        """So many percent of the first deliveries were at most this late, in seconds: the bound of a class.

        ``inf`` when that is the last class, None when there was no delivery.
        """
        wanted = -(-self.started * percent // 100)
        if not wanted:
            return None
        seen = 0
        for bound, count in zip(Rollup.BOUNDS, self.counts[len(OUTCOMES) :], strict=False):
            seen += count
            if seen >= wanted:
                return bound / 1000
        return float("inf")


@dataclass(slots=True)
class Series:
    """A window, step by step, and each queue in all of it."""

    window: str
    start: datetime
    step: timedelta
    steps: list[Tally]
    queues: dict[str, Tally] = field(default_factory=dict)

    @property
    def sum(self) -> Tally:
        return total(self.steps)

    def last(self, steps: int) -> Tally:
        """The last full steps."""
        return total(self.steps[-1 - steps : -1])


def total(tallies: Iterable[Tally]) -> Tally:
    found = Tally()
    for tally in tallies:
        found.add(tally.counts)
    return found


def series(using: str, now: datetime, windows: Iterable[str]) -> dict[str, Series]:
    """Read the rollups of these windows, in one statement."""
    found = {name: _empty(name, now) for name in dict.fromkeys(windows)}
    connection = connections[using]
    sums = ", ".join(f"sum({name})" for name in _COLUMNS)
    parts: list[str] = []
    values: list[Any] = []
    for name, one in found.items():
        at = connection.ops.adapt_datetimefield_value(one.start)
        parts.append(f"""
            SELECT %s, ({_epoch(connection.vendor)} - %s) / %s AS step, queue, {sums}
              FROM delayq_rollup WHERE seconds IN (60, 3600) AND at >= %s GROUP BY 2, queue
        """)  # noqa: S608
        values += [name, int(one.start.timestamp()), WINDOWS[name].seconds, at]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(parts), values)
        for name, step, queue, *counts in cursor.fetchall():
            _fill(found, str(name), int(step), queue, [int(count) for count in counts])
    return found


def _empty(name: str, now: datetime) -> Series:
    window = WINDOWS[name]
    step = timedelta(seconds=window.seconds)
    offset = timezone.localtime(now).utcoffset() or timedelta(0)
    newest = _FIRST + (now - _FIRST + offset) // step * step - offset
    return Series(name, newest - (window.steps - 1) * step, step, [Tally() for _ in range(window.steps)])


_FIRST = datetime(2000, 1, 1, tzinfo=UTC)


def _epoch(vendor: str) -> str:
    return "extract(epoch FROM at)::bigint" if vendor == "postgresql" else "CAST(strftime('%%s', at) AS integer)"


def _fill(found: Mapping[str, Series], name: str, step: int, queue: str, counts: list[Any]) -> None:
    one = found[name]
    # The clock of a worker may be ahead.
    one.steps[min(step, len(one.steps) - 1)].add(counts)
    one.queues.setdefault(queue, Tally()).add(counts)
