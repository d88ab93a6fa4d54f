"""Counts the waiting messages of each queue and before each limit, along the indexes of waiting messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import connections
from django.utils.dateparse import parse_datetime

from ..record.sql import limit_statements

SCHEDULED = "SELECT 1 FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue"
LIMITED = "FROM delayq_message m WHERE m.state = 'limited' AND m.queue = q.queue ORDER BY m.due_at, m.id"

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
        (SELECT count(*) FROM (SELECT 1 {LIMITED} LIMIT %s) x),
        (SELECT m.due_at {LIMITED} LIMIT 1),
        (SELECT count(*) FROM (SELECT 1 FROM delayq_message m WHERE m.state = 'running'
                               ORDER BY m.leased_until LIMIT %s) x)
    FROM q
    """  # noqa: S608

# One search in the index for each queue.
QUEUES = """
    WITH RECURSIVE q(queue) AS (
        SELECT (SELECT queue FROM delayq_message WHERE state = 'limited' ORDER BY queue LIMIT 1)
        UNION ALL
        SELECT (SELECT m.queue FROM delayq_message m
                 WHERE m.state = 'limited' AND m.queue > q.queue ORDER BY m.queue LIMIT 1)
          FROM q WHERE q.queue IS NOT NULL
    )
    SELECT queue FROM q WHERE queue IS NOT NULL
    """

# The first messages of all lines together, and of one line.
LINES = """
    SELECT limited_by, count(*), min(due_at) FROM (
        SELECT limited_by, due_at FROM delayq_message WHERE limited_by IS NOT NULL
         ORDER BY limited_by, priority DESC, due_at, id LIMIT %s
    ) x GROUP BY limited_by ORDER BY limited_by
    """
LINE = """
    SELECT * FROM (SELECT CAST(%s AS text), count(*), min(due_at) FROM (
        SELECT due_at FROM delayq_message WHERE limited_by = %s
         ORDER BY priority DESC, due_at, id LIMIT %s
    ) x) y
    """

# Lines that are counted one by one.
LINES_COUNTED = 200
# The least number that each of them is counted to.
LEAST_COUNTED = 50


class Waiting(NamedTuple):
    """The numbers of one queue. ``ready`` messages are due, but not yet overdue; ``running`` counts all queues."""

    queue: str
    scheduled: int
    ready: int
    overdue: int
    oldest_overdue: datetime | None
    next_due: datetime | None
    limited: int
    oldest_limited: datetime | None
    running: int


class WaitingLine(NamedTuple):
    """The messages that wait for one limit. ``more``: they were not counted to the end."""

    name: str
    number: int
    oldest: datetime
    more: bool = False


def count_waiting(
    using: str, queues: Sequence[str], *, now: datetime, overdue_since: datetime, limit: int
) -> list[Waiting]:
    """Count the messages of these queues, up to ``limit`` of each kind. Overdue ones were due by ``overdue_since``."""
    connection = connections[using]
    overdue = connection.ops.adapt_datetimefield_value(overdue_since)
    moment = connection.ops.adapt_datetimefield_value(now)
    sql = WAITING.format(rows=", ".join(["(%s)"] * len(queues)))
    with connection.cursor() as cursor:
        cursor.execute(sql, [*queues, limit, overdue, moment, limit, overdue, limit, overdue, moment, limit, limit])
        rows = cursor.fetchall()
    return [
        Waiting._make((*row[:4], _time(using, row[4]), _time(using, row[5]), row[6], _time(using, row[7]), row[8]))
        for row in rows
    ]


def queues_of_limited(using: str) -> list[str]:
    """Return the queues that hold limited messages, by name."""
    with connections[using].cursor() as cursor:
        cursor.execute(QUEUES)
        return [row[0] for row in cursor.fetchall()]


def count_lines(using: str, limit: int) -> list[WaitingLine]:
    """Count the messages before each limit. All are counted as long as they are not more than ``limit``.

    Of more, the first lines are counted in full, and ``LINES_COUNTED`` lines after them up to a smaller number each.
    """
    rows = _lines(using, LINES, [limit + 1])
    if sum(row.number for row in rows) <= limit:
        return rows
    # The last line was cut.
    *whole, last = rows
    names = [last.name, *limit_statements(using).lines(last.name, LINES_COUNTED)]
    most = max(LEAST_COUNTED, limit // len(names))
    parameters: list[str | int] = [value for name in names for value in (name, name, most + 1)]
    found = _lines(using, " UNION ALL ".join([LINE] * len(names)), parameters)
    return [*whole, *(row._replace(number=min(row.number, most), more=row.number > most) for row in found)]


def _lines(using: str, sql: str, parameters: Sequence[str | int]) -> list[WaitingLine]:
    with connections[using].cursor() as cursor:
        cursor.execute(sql, parameters)
        rows = cursor.fetchall()
    found = ((name, number, _time(using, oldest)) for name, number, oldest in rows)
    # A line may have become empty meanwhile.
    return [WaitingLine(name, number, oldest) for name, number, oldest in found if oldest is not None]


def _time(using: str, value: datetime | str | None) -> datetime | None:
    """Return a time that came out of raw SQL: some drivers give text, some a time without its zone."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is None:
        return None
    aware = value if value.tzinfo is not None else value.replace(tzinfo=connections[using].timezone or UTC)
    return aware.astimezone(UTC)
