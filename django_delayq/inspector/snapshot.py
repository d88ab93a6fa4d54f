"""Counts the messages that wait in each queue: one walk along the index of scheduled messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from django.db.models import Q

from .. import restore
from ..core import bounds
from ..core.states import State
from ..models import Message
from ..record import admission, transitions
from ..record.sql import statements
from ..record.sql.expressions import UnderLimits
from .numbers import NONE, Capped, capped, total
from .waiting import DUE_READ, QUEUES_PER_STATEMENT, Due, count_waiting, read_due

# Rows of each queue that are counted.
ROWS_PER_QUEUE = 10_000


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
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


@dataclass(frozen=True, slots=True)
class Snapshot:
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
    for start in range(0, len(names), QUEUES_PER_STATEMENT):
        found, running = _queues(using, names[start : start + QUEUES_PER_STATEMENT], now, cap)
        queues |= found
    closed = admission.full_lately(using)
    due = [*read_due(using, names, closed, now=now, overdue_since=overdue_cutoff(now))] if closed else []
    for name in {each.queue for each in due if each.limit is not None}:
        queues[name] = _without_limited(using, name, queues[name], [d for d in due if d.queue == name], closed, now)
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


def _without_limited(
    using: str, name: str, queue: QueueSnapshot, due: Sequence[Due], closed: Collection[str], now: datetime
) -> QueueSnapshot:
    """Return the numbers of a queue without the messages that wait for limits, which count by themselves."""
    limited = [each for each in due if each.limit is not None]
    number, late = sum(each.number for each in limited), sum(each.overdue for each in limited)
    # Others may be behind those that were looked at.
    more = sum(each.number for each in due) >= DUE_READ
    rows = Message.objects.using(using).filter(~Q(UnderLimits(closed)), state=State.SCHEDULED, queue=name)
    rows = rows.filter(due_at__lte=overdue_cutoff(now)).order_by("due_at", "id")
    oldest = rows.values_list("due_at", flat=True).first()
    overdue = max(0 if oldest is None else 1, queue.overdue.count - late)
    return replace(
        queue,
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
