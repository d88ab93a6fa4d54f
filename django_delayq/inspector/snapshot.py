"""Counts the messages that wait in each queue: one walk along the index of live messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connections

from .. import conf, restore, transitions
from .numbers import NONE, Capped, capped, moment, total

# Rows of each queue that are counted.
ROWS_PER_QUEUE = 10_000
# Queues in one statement.
QUEUES_PER_STATEMENT = 200


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One queue in the record. ``ready`` messages are due, but not for so long that they count as overdue."""

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
    connection = connections[using]
    late = connection.ops.adapt_datetimefield_value(overdue_cutoff(now))
    moment_ = connection.ops.adapt_datetimefield_value(now)
    rows = ", ".join(["(%s)"] * len(names))
    # Each part asks for the order of the index, so that the planner walks along the index.
    sql = f"""
    WITH q(queue) AS (VALUES {rows})
    SELECT queue,
        (SELECT count(*) FROM ({_SCHEDULED} ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({_SCHEDULED} AND m.due_at > %s AND m.due_at <= %s
                               ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({_SCHEDULED} AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT 1),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at > %s ORDER BY m.due_at, m.id LIMIT 1),
        (SELECT count(*) FROM (SELECT 1 FROM delayq_message m WHERE m.state = 'running'
                               ORDER BY m.leased_until LIMIT %s) x)
    FROM q
    """  # noqa: S608
    limit = cap + 1
    with connection.cursor() as cursor:
        cursor.execute(sql, [*names, limit, late, moment_, limit, late, limit, late, moment_, limit])
        answers = cursor.fetchall()
    queues = {
        name: QueueSnapshot(
            capped(scheduled, cap),
            capped(ready, cap),
            capped(overdue, cap),
            moment(using, oldest),
            moment(using, following),
        )
        for name, scheduled, ready, overdue, oldest, following, _running in answers
    }
    return queues, answers[0][-1] if answers else 0


_SCHEDULED = "SELECT 1 FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue"


def _guess(using: str, scheduled: Capped) -> Capped:
    """Return PostgreSQL's estimate of the entries in the index of live messages, if it is higher than the count."""
    if connections[using].vendor != "postgresql":
        return scheduled
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'delayq_todo'::regclass")
        rows: int = cursor.fetchone()[0]
    return Capped(rows, about=True) if rows > scheduled.count else scheduled
