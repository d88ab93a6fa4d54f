"""What waits in each queue at this moment: one look along the index of what is still to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connections

from .. import conf, restore, transitions
from .numbers import NONE, Capped, capped, moment, total

# Rows that are counted in each queue.
CAP = 10_000
# Queues in one statement.
BATCH = 200


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One queue. ``ready`` are those that are due, but not for so long that they count as overdue."""

    scheduled: Capped = NONE
    ready: Capped = NONE
    overdue: Capped = NONE
    oldest_overdue: datetime | None = None
    next_due: datetime | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues, at one moment of the record's clock."""

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


def take_snapshot(using: str, cap: int = CAP) -> Snapshot:
    """Count what waits, in each queue up to the cap."""
    now = transitions.now(using)
    names = restore.queues(using)
    queues: dict[str, QueueSnapshot] = {}
    running = 0
    for start in range(0, len(names), BATCH):
        found, running = _queues(using, names[start : start + BATCH], now, cap)
        queues |= found
    scheduled = total(queue.scheduled for queue in queues.values())
    if scheduled.more:
        scheduled = _guess(using, scheduled)
    return Snapshot(now, queues, capped(running, cap), scheduled)


def late_from(now: datetime) -> datetime:
    """What was due until then should have started: OVERDUE_AFTER."""
    return now - timedelta(seconds=conf.get().OVERDUE_AFTER)


def _queues(using: str, names: Sequence[str], now: datetime, cap: int) -> tuple[dict[str, QueueSnapshot], int]:
    connection = connections[using]
    late = connection.ops.adapt_datetimefield_value(late_from(now))
    moment_ = connection.ops.adapt_datetimefield_value(now)
    rows = ", ".join(["(%s)"] * len(names))
    # In the order of the index, so that no plan but a walk along it is worth considering.
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
    """PostgreSQL knows about how many entries the index of scheduled messages has."""
    if connections[using].vendor != "postgresql":
        return scheduled
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'delayq_todo'::regclass")
        rows: int = cursor.fetchone()[0]
    return Capped(rows, about=True) if rows > scheduled.count else scheduled
