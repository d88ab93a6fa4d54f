"""Counts the messages that wait in each queue: one walk along the index of live messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from .. import conf, restore, transitions
from ..sql import statements
from ..sql.waiting import count_waiting
from .numbers import NONE, Capped, capped, total

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues in the record, at one moment of its clock."""

    at: datetime
    queues: dict[str, QueueSnapshot]
    running: Capped
    scheduled: Capped

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
    names = restore.queues(using)
    queues: dict[str, QueueSnapshot] = {}
    running = 0
    for start in range(0, len(names), QUEUES_PER_STATEMENT):
        found, running = _queues(using, names[start : start + QUEUES_PER_STATEMENT], now, cap)
        queues |= found
    scheduled = total(queue.scheduled for queue in queues.values())
    if scheduled.more:
        scheduled = _guess(using, scheduled)
    return Snapshot(now, queues, capped(running, cap), scheduled)


def overdue_cutoff(now: datetime) -> datetime:
    """Return the moment OVERDUE_AFTER ago: scheduled messages that were due by then are overdue."""
    return now - timedelta(seconds=conf.get().OVERDUE_AFTER)


def _queues(using: str, names: Sequence[str], now: datetime, cap: int) -> tuple[dict[str, QueueSnapshot], int]:
    rows = count_waiting(using, names, now=now, overdue_since=overdue_cutoff(now), limit=cap + 1)
    queues = {
        row.queue: QueueSnapshot(
            capped(row.scheduled, cap),
            capped(row.ready, cap),
            capped(row.overdue, cap),
            row.oldest_overdue,
            row.next_due,
        )
        for row in rows
    }
    return queues, rows[0].running if rows else 0


def _guess(using: str, scheduled: Capped) -> Capped:
    """Return the estimate of the entries in the index of scheduled messages, if it is higher than the count."""
    rows = statements(using).estimated_rows("delayq_todo") or 0
    return Capped(rows, about=True) if rows > scheduled.count else scheduled
