"""Counts the messages that wait in each queue: one walk along the index of scheduled messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from ..core import bounds
from ..core.states import State
from ..models import Message
from ..record import admission, transitions
from ..record.sql import statements
from ..restore import reading
from .numbers import NONE, Capped, capped, total
from .waiting import Due, count_waiting, may_be_more, overdue_heads, read_due

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
    queues = dict.fromkeys(reading.queues(using), QueueSnapshot()) | _queues(using, now, cap)
    if closed := admission.full_lately(using):
        _take_limited_out(using, queues, closed, now)
    scheduled = _guess(using, "delayq_todo", total(queue.scheduled for queue in queues.values()))
    running = Message.objects.using(using).filter(state=State.RUNNING).order_by("leased_until")[: cap + 1].count()
    return Snapshot(now, queues, capped(running, cap), scheduled)


def overdue_cutoff(now: datetime) -> datetime:
    """Return the moment OVERDUE_AFTER ago: scheduled messages that were due by then are overdue."""
    return now - bounds.OVERDUE_AFTER


def _queues(using: str, now: datetime, cap: int) -> dict[str, QueueSnapshot]:
    rows = count_waiting(using, now=now, overdue_since=overdue_cutoff(now), limit=cap + 1)
    return {
        queue: QueueSnapshot(capped(scheduled, cap), capped(ready, cap), capped(overdue, cap), oldest, following)
        for queue, scheduled, ready, overdue, oldest, following in rows
    }


def _take_limited_out(using: str, queues: dict[str, QueueSnapshot], closed: Collection[str], now: datetime) -> None:
    """Count the messages that wait for limits by themselves. ``closed`` has the names of these limits."""
    due: defaultdict[str, list[Due]] = defaultdict(list)
    for each in read_due(using, closed, now=now, overdue_since=overdue_cutoff(now)):
        due[each.queue].append(each)
    oldest = {head.queue: head.due_at for head in overdue_heads(using, closed, overdue_cutoff(now))}
    for name, some in due.items():
        # A message may have come since the queues were counted. Limited ones may be behind those that were looked at.
        if name in queues and (may_be_more(some) or any(each.limit is not None for each in some)):
            queues[name] = _without_limited(queues[name], some, oldest.get(name))


def _without_limited(queue: QueueSnapshot, due: Sequence[Due], oldest: datetime | None) -> QueueSnapshot:
    """Return the numbers of a queue without the messages that wait for limits, which count by themselves.

    ``oldest`` is the due time of the other message that is overdue for the longest time.
    """
    limited = [each for each in due if each.limit is not None]
    others = [each for each in due if each.limit is None]
    late = sum(each.overdue for each in others)
    more = may_be_more(due)
    return queue._replace(
        ready=Capped(sum(each.number for each in others) - late, more),
        overdue=NONE if oldest is None else Capped(max(1, late), more),
        oldest_overdue=oldest,
        limited=Capped(sum(each.number for each in limited), more),
        oldest_limited=min((each.oldest for each in limited), default=None),
    )


def _guess(using: str, index: str, counted: Capped) -> Capped:
    """Return the estimate of the entries in a partial index for a number that was not counted to its end."""
    rows = (statements(using).estimated_rows(index) or 0) if counted.more else 0
    return Capped(rows, about=True) if rows > counted.count else counted
