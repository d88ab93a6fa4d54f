"""The statements on PostgreSQL that look for what is due or over, behind the dead rows that a snapshot keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from .expressions import OF_TOPIC, QUEUES, is_open
from .postgresql_base import IS_SCHEDULED, NOT_EXPIRED, NOW, PAUSED, PostgreSQLSession, array, texts
from .rows import BEGINNING, ROWS_PASSED, Expired, Seen, Spot, Ticket

# In the gaps between the queues that are known, and behind the last one, are no dead rows.
OTHER_QUEUES = """
WITH RECURSIVE known AS (
    SELECT unnest(%(known)s::text[]) AS queue
), gap AS (
    SELECT lag(queue, 1, '') OVER (ORDER BY queue) AS low, queue AS high FROM known
), among(queue, high) AS (
    SELECT low, high FROM gap
     UNION ALL
    SELECT m.queue, q.high FROM among q CROSS JOIN LATERAL (
        SELECT queue FROM delayq_message
         WHERE state = 'scheduled' AND queue > q.queue AND queue < q.high ORDER BY queue LIMIT 1
    ) m
), behind(queue) AS (
    SELECT max(queue) FROM known
     UNION ALL
    SELECT m.queue FROM behind q CROSS JOIN LATERAL (
        SELECT queue FROM delayq_message WHERE state = 'scheduled' AND queue > q.queue ORDER BY queue LIMIT 1
    ) m
)
(SELECT queue FROM among UNION SELECT queue FROM behind) EXCEPT (SELECT queue FROM known UNION SELECT '')
"""

# The names of the limits that are full. The server looks up a name in a table of hashes, however many there are.
CLOSED = "SELECT unnest(%(closed)s::text[])"

# The first row, and from there on the first one that may begin: dead rows are passed once.
LOOK = f"""
SELECT q.queue, clock_timestamp(), f.due_at, f.id, s.due_at, s.id, s.is_open
  FROM unnest(%(queues)s::text[], %(dues)s::timestamptz[], %(ids)s::bigint[]) q(queue, due, id)
  LEFT JOIN LATERAL (
    SELECT due_at, id FROM delayq_message
     WHERE state = 'scheduled' AND queue = q.queue AND (due_at, id) > (q.due, q.id)
     ORDER BY due_at, id LIMIT 1
  ) f ON true
  LEFT JOIN LATERAL (
    SELECT * FROM (
        SELECT due_at, id, row_number() OVER (ORDER BY due_at, id) AS number,
               topic = ANY(%(topics)s::text[]) AND {OF_TOPIC} NOT IN ({CLOSED}) AND {NOT_EXPIRED} AS is_open
          FROM (SELECT * FROM delayq_message
                 WHERE state = 'scheduled' AND queue = q.queue AND (due_at, id) >= (f.due_at, f.id)
                   AND q.queue NOT IN ({PAUSED}) AND 'queue ' || q.queue NOT IN ({CLOSED})
                 ORDER BY due_at, id LIMIT {ROWS_PASSED}) m
    ) m WHERE is_open OR number = {ROWS_PASSED} ORDER BY due_at, id LIMIT 1
  ) s ON true
"""  # noqa: S608

# What may be claimed of the messages behind a spot.
MAY_BEGIN = f"""SELECT id, priority, due_at FROM (
        SELECT * FROM delayq_message
         WHERE state = 'scheduled' AND queue = %(queue)s AND due_at <= {NOW}
           AND (due_at, id) > (%(due)s::timestamptz, %(id)s::bigint) AND %(queue)s NOT IN ({PAUSED})
         ORDER BY due_at, id LIMIT {ROWS_PASSED}
    ) m WHERE topic = ANY(%(topics)s::text[]) AND {is_open(CLOSED)} AND {NOT_EXPIRED} ORDER BY due_at, id"""  # noqa: S608

LOCKED = f"""
    SELECT m.id FROM delayq_message m WHERE m.id = head.id AND {IS_SCHEDULED} FOR NO KEY UPDATE SKIP LOCKED
"""  # noqa: S608

# Priority counts among the thousand most overdue rows: sorting all due rows of a backlog could not use the index.
# Only the rows that are returned are locked, one by one until there are enough: another process would pass over the
# others, and take less urgent ones.
DUE = f"""
SELECT l.id FROM (
    SELECT * FROM ({MAY_BEGIN} LIMIT 1000) x ORDER BY priority DESC, due_at, id OFFSET 0
) head CROSS JOIN LATERAL ({LOCKED}) l LIMIT %(limit)s
"""  # noqa: S608

# For the case that others have locked the thousand most overdue rows: these are the first that are not locked.
DUE_UNLOCKED = f"""
SELECT id FROM (
    SELECT head.* FROM ({MAY_BEGIN} OFFSET 0) head CROSS JOIN LATERAL ({LOCKED}) l LIMIT 1000
) x ORDER BY priority DESC, due_at, id LIMIT %(limit)s
"""  # noqa: S608

# The first rows in the order of an index: EXISTS has no order, and the planner reads the table for it, since it
# believes that the time of every third row is over.
ANYTHING_EXPIRED = f"""
WITH leased AS MATERIALIZED (
    SELECT leased_until AS at FROM delayq_message
     WHERE state = 'running' AND leased_until >= %(leased)s::timestamptz ORDER BY leased_until LIMIT 1
), waiting AS MATERIALIZED (
    SELECT expires_at AS at FROM delayq_message
     WHERE state = 'scheduled' AND expires_at IS NOT NULL AND expires_at >= %(waiting)s::timestamptz
     ORDER BY expires_at LIMIT 1
)
SELECT coalesce((SELECT true FROM delayq_message m
                  WHERE state = 'running' AND leased_until >= (SELECT at FROM leased) AND leased_until < {NOW}
                    AND NOT EXISTS (SELECT FROM delayq_lease l
                                     WHERE l.message_id = m.id AND l.delivery = m.deliveries AND l.until >= {NOW})
                  ORDER BY leased_until LIMIT 1), false),
       coalesce((SELECT at <= {NOW} FROM waiting), false), clock_timestamp(),
       (SELECT at FROM leased), (SELECT at FROM waiting)
"""  # noqa: S608


class PostgreSQLLooks(PostgreSQLSession):
    """The statements of looks."""

    def queues(self, known: Collection[str] = ()) -> list[str]:
        rows = self._rows(OTHER_QUEUES, {"known": texts(known)}) if known else self._rows(QUEUES, None)
        return [row[0] for row in rows]

    def look(self, begins: Mapping[str, Spot], topics: Iterable[str], closed: Collection[str] = ()) -> dict[str, Seen]:
        rows = self._rows(
            LOOK,
            {
                "queues": texts(begins),
                "dues": [due for due, _id in begins.values()],
                "ids": array([pk for _due, pk in begins.values()]),
                "topics": texts(topics),
                "closed": texts(closed),
            },
        )
        return {
            queue: Seen(queue, now, _spot(*first), _spot(due, pk), bool(is_open))
            for queue, now, *first, due, pk, is_open in rows
        }

    def due(
        self, queue: str, topics: Iterable[str], limit: int, closed: Collection[str] = (), after: Spot = BEGINNING
    ) -> list[Ticket]:
        """Return due messages, and lock them until the end of the transaction."""
        parameters: dict[str, Any] = {"queue": queue, "topics": texts(topics), "closed": texts(closed), "limit": limit}
        parameters["due"], parameters["id"] = after
        rows = self._rows(DUE, parameters) or self._rows(DUE_UNLOCKED, parameters)
        return [Ticket(row[0]) for row in rows]

    def anything_expired(self, leased_from: datetime, waiting_from: datetime) -> Expired:
        return Expired(*self._rows(ANYTHING_EXPIRED, {"leased": leased_from, "waiting": waiting_from})[0])


def _spot(due: datetime | None, pk: int | None) -> Spot | None:
    return None if due is None or pk is None else (due, pk)
