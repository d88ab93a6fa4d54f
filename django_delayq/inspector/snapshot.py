"""Counts the messages that wait in each queue: one walk along the indexes of waiting messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from .. import restore
from ..core import bounds
from ..record import transitions
from ..record.sql import statements
from .numbers import NONE, Capped, capped, total
from .waiting import count_waiting, queues_of_limited

# Rows of each queue that are counted.
ROWS_PER_QUEUE = 10_000
# Queues in one statement.
QUEUES_PER_STATEMENT = 200


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One queue in the record. ``ready`` messages are due, but not yet overdue."""

    scheduled: Capped = NONE
    ready: Capped = NONE
    overdue: Capped = NONE
    oldest_overdue: datetime | None = None
    next_due: datetime | None = None
    limited: Capped = NONE
    # The earliest due time of its limited messages.
    oldest_limited: datetime | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues in the record, at one moment of its clock."""

    at: datetime
    queues: dict[str, QueueSnapshot]
    running: Capped
    scheduled: Capped
    limited: Capped

    @property
    def ready(self) -> Capped:
        return total(queue.ready for queue in self.queues.values())

    @property
    def overdue(self) -> Capped:
        return total(queue.overdue for queue in self.queues.values())

    @property
    def oldest_overdue(self) -> datetime | None:
        return min((q.oldest_overdue for q in self.queues.values() if q.oldest_overdue is not None), default=None)

    @property
    def next_due(self) -> datetime | None:
        return min((q.next_due for q in self.queues.values() if q.next_due is not None), default=None)


def take_snapshot(using: str, cap: int = ROWS_PER_QUEUE) -> Snapshot:
    """Count the waiting messages of each queue, up to ``cap`` of each kind."""
    now = transitions.now(using)
    names = sorted({*restore.queues(using), *queues_of_limited(using)})
    queues: dict[str, QueueSnapshot] = {}
    running = 0
    for start in range(0, len(names), QUEUES_PER_STATEMENT):
        found, running = _queues(using, names[start : start + QUEUES_PER_STATEMENT], now, cap)
        queues |= found
    scheduled = _guess(using, "delayq_todo", total(queue.scheduled for queue in queues.values()))
    limited = _guess(using, "delayq_limited", total(queue.limited for queue in queues.values()))
    return Snapshot(now, queues, capped(running, cap), scheduled, limited)


def overdue_cutoff(now: datetime) -> datetime:
    """Return the moment OVERDUE_AFTER ago: scheduled messages that were due by then are overdue."""
    return now - bounds.OVERDUE_AFTER


def _queues(using: str, names: Sequence[str], now: datetime, cap: int) -> tuple[dict[str, QueueSnapshot], int]:
    rows = count_waiting(using, names, now=now, overdue_since=overdue_cutoff(now), limit=cap + 1)
    queues = {
        row.queue: QueueSnapshot(
            capped(row.scheduled, cap),
            capped(row.ready, cap),
            capped(row.overdue, cap),
            row.oldest_overdue,
            row.next_due,
            capped(row.limited, cap),
            row.oldest_limited,
        )
        for row in rows
    }
    return queues, rows[0].running if rows else 0


def _guess(using: str, index: str, counted: Capped) -> Capped:
    """Return the estimate of the entries in a partial index for a number that was not counted to its end."""
    rows = (statements(using).estimated_rows(index) or 0) if counted.more else 0
    return Capped(rows, about=True) if rows > counted.count else counted
