"""Counts the messages that wait in each queue: one walk along the index of scheduled messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from .. import restore
from ..core import bounds
from ..record import admission, transitions
from ..record.sql import statements
from .numbers import NONE, Capped, capped, total
from .waiting import Due, batched, count_waiting, may_be_more, overdue_heads, read_due

# Rows of each queue that are counted.
ROWS_PER_QUEUE = 10_000


class QueueSnapshot(NamedTuple):
    """One queue in the record. ``ready`` messages are due, but not yet overdue, and wait for no limit."""

    # All of them.
    scheduled: Capped = NONE
    ready: Capped = NONE
    overdue: Capped = NONE
    oldest_overdue: datetime | None = None
    next_due: datetime | None = None
    limited: Capped = NONE
    # The earliest due time of its limited messages, which are neither ready nor overdue.
    oldest_limited: datetime | None = None


class Snapshot(NamedTuple):
    """All queues in the record, at one moment of its clock."""

    at: datetime
    queues: dict[str, QueueSnapshot]
    running: Capped
    # Those that wait for limits are among them.
    scheduled: Capped

    @property
    def limited(self) -> Capped:
        return total(queue.limited for queue in self.queues.values())

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
    for batch in batched(names):
        found, running = _queues(using, batch, now, cap)
        queues |= found
    closed = admission.full_lately(using)
    due = [*read_due(using, names, closed, now=now, overdue_since=overdue_cutoff(now))] if closed else []
    limited = sorted({each.queue for each in due if each.limit is not None})
    oldest = {head.queue: head.due_at for head in overdue_heads(using, limited, closed, overdue_cutoff(now))}
    for name in limited:
        queues[name] = _without_limited(queues[name], [each for each in due if each.queue == name], oldest.get(name))
    scheduled = _guess(using, "delayq_todo", total(queue.scheduled for queue in queues.values()))
    return Snapshot(now, queues, capped(running, cap), scheduled)


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
        )
        for row in rows
    }
    return queues, rows[0].running if rows else 0


def _without_limited(queue: QueueSnapshot, due: Sequence[Due], oldest: datetime | None) -> QueueSnapshot:
    """Return the numbers of a queue without the messages that wait for limits, which count by themselves.

    ``oldest`` is the due time of the other message that is overdue for the longest time.
    """
    limited = [each for each in due if each.limit is not None]
    number, late = sum(each.number for each in limited), sum(each.overdue for each in limited)
    # Others may be behind those that were looked at.
    more = may_be_more(due)
    overdue = max(0 if oldest is None else 1, queue.overdue.count - late)
    return queue._replace(
        ready=Capped(max(0, queue.ready.count - (number - late)), queue.ready.more),
        overdue=NONE if oldest is None else Capped(overdue, more or queue.overdue.more),
        oldest_overdue=oldest,
        limited=Capped(number, more),
        oldest_limited=min(each.oldest for each in limited),
    )


def _guess(using: str, index: str, counted: Capped) -> Capped:
    """Return the estimate of the entries in a partial index for a number that was not counted to its end."""
    rows = (statements(using).estimated_rows(index) or 0) if counted.more else 0
    return Capped(rows, about=True) if rows > counted.count else counted
