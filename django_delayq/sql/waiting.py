"""Counts the waiting messages of each queue, with one statement along the index of scheduled messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import connections
from django.utils.dateparse import parse_datetime

SCHEDULED = "SELECT 1 FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue"

# Each part asks for the order of the index, so that the planner walks along the index.
WAITING = f"""
    WITH q(queue) AS (VALUES {{rows}})
    SELECT queue,
        (SELECT count(*) FROM ({SCHEDULED} ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({SCHEDULED} AND m.due_at > %s AND m.due_at <= %s
                               ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({SCHEDULED} AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT 1),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at > %s ORDER BY m.due_at, m.id LIMIT 1),
        (SELECT count(*) FROM (SELECT 1 FROM delayq_message m WHERE m.state = 'running'
                               ORDER BY m.leased_until LIMIT %s) x)
    FROM q
    """  # noqa: S608


class Waiting(NamedTuple):
    """The numbers of one queue. ``ready`` messages are due, but not yet overdue; ``running`` counts all queues."""

    queue: str
    scheduled: int
    ready: int
    overdue: int
    oldest_overdue: datetime | None
    next_due: datetime | None
    running: int


def count_waiting(
    using: str, queues: Sequence[str], *, now: datetime, overdue_since: datetime, limit: int
) -> list[Waiting]:
    """Count the messages of these queues, up to ``limit`` of each kind. Overdue ones were due by ``overdue_since``."""
    connection = connections[using]
    overdue = connection.ops.adapt_datetimefield_value(overdue_since)
    moment = connection.ops.adapt_datetimefield_value(now)
    sql = WAITING.format(rows=", ".join(["(%s)"] * len(queues)))
    with connection.cursor() as cursor:
        cursor.execute(sql, [*queues, limit, overdue, moment, limit, overdue, limit, overdue, moment, limit])
        rows = cursor.fetchall()
    return [Waiting._make((*row[:4], _time(using, row[4]), _time(using, row[5]), row[6])) for row in rows]


def _time(using: str, value: datetime | str | None) -> datetime | None:
    """Return a time that came out of raw SQL: some drivers give text, some a time without its zone."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is None:
        return None
    aware = value if value.tzinfo is not None else value.replace(tzinfo=connections[using].timezone or UTC)
    return aware.astimezone(UTC)
