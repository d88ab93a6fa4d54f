"""Counts the waiting messages of each queue and before each limit, along the index of scheduled messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import connections
from django.utils.dateparse import parse_datetime

from ..models import Message
from ..record import admission
from ..record.sql.expressions import is_open

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

# The messages of one queue that have been due for the longest time, by what limits count.
DUE = """
    SELECT CAST(%s AS text), topic, limit_key, count(*), count(CASE WHEN due_at <= %s THEN 1 END), min(due_at) FROM (
        SELECT topic, limit_key, due_at FROM delayq_message WHERE state = 'scheduled' AND queue = %s AND due_at <= %s
         ORDER BY due_at, id LIMIT %s
    ) x GROUP BY topic, limit_key
    """

# The messages of one queue that are due next.
NEXT = """(SELECT id, topic, queue, due_at, created_at FROM delayq_message
            WHERE state = 'scheduled' AND queue = %s ORDER BY due_at, id LIMIT %s) x"""

# The message of one queue that is overdue for the longest time and waits for no limit.
OVERDUE = f"""
    SELECT * FROM (
        SELECT id, topic, queue, due_at, created_at FROM delayq_message m
         WHERE state = 'scheduled' AND queue = %s AND due_at <= %s AND {is_open("SELECT name FROM closed")}
         ORDER BY due_at, id LIMIT 1
    ) x
    """  # noqa: S608

# Messages of one queue that are looked at for the limits for which they wait.
DUE_READ = 10_000
# Queues in one statement.
QUEUES_PER_STATEMENT = 200


class Waiting(NamedTuple):
    """The numbers of one queue. ``ready`` messages are due, but not yet overdue; ``running`` counts all queues."""

    queue: str
    scheduled: int
    ready: int
    overdue: int
    oldest_overdue: datetime | None
    next_due: datetime | None
    running: int


class Due(NamedTuple):
    """Messages of a queue that are due, alike in what limits count. ``limit``: the limit for which they wait."""

    queue: str
    topic: str
    number: int
    # As many of them are overdue.
    overdue: int
    oldest: datetime
    limit: str | None


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


def heads(using: str, queues: Sequence[str]) -> Iterator[Message]:
    """Yield the message of each queue that is due next: its id, topic, queue, due time and time of creation."""
    for some in batched(queues):
        sql = " UNION ALL ".join([f"SELECT * FROM {NEXT}"] * len(some))  # noqa: S608
        yield from Message.objects.using(using).raw(sql, [value for queue in some for value in (queue, 1)])


def overdue_heads(
    using: str, queues: Sequence[str], closed: Collection[str], overdue_since: datetime
) -> Iterator[Message]:
    """Yield of each queue what ``heads`` does, among the messages that were due by ``overdue_since``.

    ``closed`` has the names of the limits for which messages wait: those messages are passed over.
    """
    late = connections[using].ops.adapt_datetimefield_value(overdue_since)
    # No limit has an empty name.
    names = ["", *closed]
    for some in batched(queues):
        sql = f"WITH closed(name) AS (VALUES {', '.join(['(%s)'] * len(names))})" + " UNION ALL ".join(
            [OVERDUE] * len(some)
        )
        parameters = [*names, *(value for queue in some for value in (queue, late))]
        yield from Message.objects.using(using).raw(sql, parameters)


def topics_of_next(using: str, queues: Sequence[str], limit: int) -> set[str]:
    """Return the topics of the messages that are due next, up to ``limit`` in each of these queues."""
    found: set[str] = set()
    for some in batched(queues):
        sql = " UNION ".join([f"SELECT topic FROM {NEXT}"] * len(some))  # noqa: S608
        with connections[using].cursor() as cursor:
            cursor.execute(sql, [value for queue in some for value in (queue, limit)])
            found.update(topic for (topic,) in cursor.fetchall())
    return found


def batched(queues: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the queues of one statement after the other."""
    for start in range(0, len(queues), QUEUES_PER_STATEMENT):
        yield queues[start : start + QUEUES_PER_STATEMENT]


def read_due(
    using: str, queues: Sequence[str], closed: Collection[str], *, now: datetime, overdue_since: datetime
) -> Iterator[Due]:
    """Yield the messages of these queues that are due, ``DUE_READ`` of each queue at most.

    ``closed`` has the names of the limits for which messages wait.
    """
    overdue = connections[using].ops.adapt_datetimefield_value(overdue_since)
    moment = connections[using].ops.adapt_datetimefield_value(now)
    for some in batched(queues):
        with connections[using].cursor() as cursor:
            parameters = [value for queue in some for value in (queue, overdue, queue, moment, DUE_READ)]
            cursor.execute(" UNION ALL ".join([DUE] * len(some)), parameters)
            rows = cursor.fetchall()
        for queue, topic, key, number, late, oldest in rows:
            first = _time(using, oldest)
            assert first is not None
            yield Due(queue, topic, number, late, first, admission.refusing(closed, topic, queue, key))


def may_be_more(due: Iterable[Due]) -> bool:
    """Return whether a queue may have more messages that are due than ``read_due`` has looked at."""
    numbers: Counter[str] = Counter()
    for each in due:
        numbers[each.queue] += each.number
    return any(number >= DUE_READ for number in numbers.values())


def _time(using: str, value: datetime | str | None) -> datetime | None:
    """Return a time that came out of raw SQL: some drivers give text, some a time without its zone."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is None:
        return None
    aware = value if value.tzinfo is not None else value.replace(tzinfo=connections[using].timezone or UTC)
    return aware.astimezone(UTC)
