"""Counts the waiting messages of each queue and before each limit, along the index of scheduled messages.

Each function asks one statement for all queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import BigIntegerField
from django.db.models.expressions import RawSQL
from django.utils.dateparse import parse_datetime

from ..models import Message
from ..project import pulled
from ..record import admission
from ..record.sql import statements
from ..record.sql.expressions import ANY_KEY, QUEUES, is_open
from .numbers import CAPS, Caps

SCHEDULED = "SELECT 1 FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue"

# Each part asks for the order of the index, so that the planner walks along the index.
WAITING = f"""
    SELECT queue,
        (SELECT count(*) FROM ({SCHEDULED} ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({SCHEDULED} AND m.due_at > %s AND m.due_at <= %s
                               ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT count(*) FROM ({SCHEDULED} AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT %s) x),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at <= %s ORDER BY m.due_at, m.id LIMIT 1),
        (SELECT m.due_at FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue
          AND m.due_at > %s ORDER BY m.due_at, m.id LIMIT 1)
    FROM ({QUEUES}) q
    UNION ALL SELECT NULL, (SELECT count(*) FROM (SELECT 1 FROM delayq_message m WHERE m.state = 'running'
                                                  ORDER BY m.leased_until LIMIT %s) x), 0, 0, NULL, NULL
    """  # noqa: S608


class Due(NamedTuple):
    """Due messages of a queue that have a topic and a limit key in common. ``limit``: the limit for which they wait."""

    queue: str
    topic: str
    number: int
    # The number of those that are overdue.
    overdue: int
    oldest: datetime
    limit: str | None

    @property
    def is_late(self) -> bool:
        """Whether some of them are overdue, and wait for no limit."""
        return self.limit is None and self.overdue > 0


def count_waiting(
    using: str, *, now: datetime, overdue_since: datetime, limit: int
) -> tuple[list[tuple[str, int, int, int, datetime | None, datetime | None]], int]:
    """Count the messages of each queue that are scheduled, ready and overdue, and all running ones, ``limit`` of each.

    Returns for each queue its name, these numbers, and the due times of the oldest overdue message and of the next one.
    Ready are those that are due but not yet overdue; overdue ones were due by ``overdue_since``.
    """
    overdue, moment = _moment(using, overdue_since), _moment(using, now)
    values = [limit, overdue, moment, limit, overdue, limit, overdue, moment, limit]
    rows = _rows(using, WAITING, values)
    # The running ones have no queue.
    running = next(number for queue, number, *_others in rows if queue is None)
    return [(*row[:-2], _time(using, row[-2]), _time(using, row[-1])) for row in rows if row[0] is not None], running


def first_ids(using: str) -> RawSQL:
    """Return a subquery for the id of the message of each queue that is due next."""
    return RawSQL(f"SELECT m.id FROM {_first(using, 'true', 1)}", (), BigIntegerField())  # noqa: S608, S611


def heads(using: str) -> list[Message]:
    """Return the message of each queue that is due next: its id, topic, queue, due time and time of creation."""
    sql = f"SELECT m.id, m.topic, m.queue, m.due_at, m.created_at FROM {_first(using, 'true', 1)}"  # noqa: S608
    return list(Message.objects.using(using).raw(sql))


def overdue_heads(using: str, closed: Collection[str], overdue_since: datetime) -> list[Message]:
    """Return of each queue what ``heads`` does, among the messages that were due by ``overdue_since``.

    ``closed`` has the names of the limits for which messages wait: those messages are passed over, and so are queues
    that programs pull.
    """
    # No limit has an empty name.
    names = ["", *closed]
    names_closed = "SELECT name FROM closed"
    chosen = f"m.due_at <= %s AND {is_open(names_closed)} AND {ANY_KEY} NOT IN ({names_closed})"
    first = _first(using, chosen, 1)
    sql = f"""
        WITH closed(name) AS (VALUES {", ".join(["(%s)"] * len(names))})
        SELECT m.id, m.topic, m.queue, m.due_at, m.created_at FROM {first}
        """  # noqa: S608
    found = Message.objects.using(using).raw(sql, [*names, _moment(using, overdue_since)])
    return [head for head in found if pulled.terms(head.queue) is None]


def topics_of_next(using: str, limit: int) -> set[str]:
    """Return the topics of the messages that are due next, up to ``limit`` in each queue that workers serve."""
    sql = f"SELECT DISTINCT m.queue, m.topic FROM {_first(using, 'true', limit)}"  # noqa: S608
    return {topic for queue, topic in _rows(using, sql) if pulled.terms(queue) is None}


def read_due(
    using: str, closed: Collection[str], *, now: datetime, overdue_since: datetime, caps: Caps = CAPS
) -> Iterator[Due]:
    """Yield the messages that are due, ``caps.rows`` of each queue at most.

    ``closed`` has the names of the limits for which messages wait.
    """
    sql = f"""
        SELECT m.queue, m.topic, m.limit_key, count(*), count(CASE WHEN m.due_at <= %s THEN 1 END), min(m.due_at)
          FROM {_first(using, "m.due_at <= %s", caps.rows)} GROUP BY m.queue, m.topic, m.limit_key
        """  # noqa: S608
    for queue, topic, key, number, late, oldest in _rows(
        using, sql, [_moment(using, overdue_since), _moment(using, now)]
    ):
        first = _time(using, oldest)
        assert first is not None
        # Programs take what they pull whenever they want to.
        overdue = late if pulled.terms(queue) is None else 0
        yield Due(queue, topic, number, overdue, first, admission.refusing(closed, topic, queue, key, using))


def read_coming(using: str, now: datetime, ends: Sequence[datetime], rows: int) -> Iterator[tuple[str, str, list[int]]]:
    """Yield how many messages fall due from ``now`` until each of these times, by queue and topic.

    Looks at the next ``rows`` of each queue.
    """
    counted = ", ".join(["count(CASE WHEN m.due_at <= %s THEN 1 END)"] * len(ends))
    sql = f"""
        SELECT m.queue, m.topic, {counted}
          FROM {_first(using, "m.due_at > %s AND m.due_at <= %s", rows)} GROUP BY m.queue, m.topic
        """  # noqa: S608
    moments = [_moment(using, moment) for moment in (*ends, now, max(ends))]
    for queue, topic, *numbers in _rows(using, sql, moments):
        yield queue, topic, numbers


def may_be_more(due: Iterable[Due], caps: Caps = CAPS) -> bool:
    """Return whether a queue may have more messages that are due than ``read_due`` has read."""
    numbers: Counter[str] = Counter()
    for each in due:
        numbers[each.queue] += each.number
    return any(number >= caps.rows for number in numbers.values())


def _first(using: str, chosen: str, limit: int) -> str:
    return statements(using).FIRST_OF_EACH.format(chosen=chosen, limit=limit)


def _rows(using: str, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(sql, [*values])
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _moment(using: str, moment: datetime) -> Any:
    return connections[using].ops.adapt_datetimefield_value(moment)


def _time(using: str, value: datetime | str | None) -> datetime | None:
    """Return a time that came out of raw SQL: some drivers give text, some a time without its zone."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is None:
        return None
    aware = value if value.tzinfo is not None else value.replace(tzinfo=connections[using].timezone or UTC)
    return aware.astimezone(UTC)
