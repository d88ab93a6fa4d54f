"""The statements of limits on PostgreSQL: one for each step, whatever the number of messages and limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from ...core.states import State
from .limited import LOCKS, LONGEST_KEPT, LONGEST_PAUSE, Candidate, Count, Promoted, Refused, TakenPlace, stripes
from .postgresql import (
    FIRST_ROW,
    IS_LIMITED,
    IS_RUNNING,
    IS_SCHEDULED,
    LOG_COLUMNS,
    LOOKS_LIKE_FEW,
    MAY_CLAIM,
    NOT_EXPIRED,
    PAUSED,
    PostgreSQL,
)
from .rows import Moved

# The locks are taken in the order of the array. The statement after this one sees what others have committed.
# A promotion (True) does not wait for its commit to reach the disk: a claim that follows does, and takes it along, and
# after a crash of the server the messages are limited again.
LOCK = {
    hastily: f"""
SELECT set_config('idle_in_transaction_session_timeout', '{LONGEST_PAUSE}', true),
       pg_advisory_xact_lock({LOCKS}, stripe){commit}
  FROM unnest(%(stripes)s::int[]) stripe
"""  # noqa: S608
    for hastily, commit in {False: "", True: ", set_config('synchronous_commit', 'off', true)"}.items()
}

TOPICS_OF = f"""
SELECT id, topic, queue, limit_key FROM delayq_message m
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW} AND {IS_SCHEDULED}
"""  # noqa: S608

COLUMNS = "m.id, m.topic, m.queue, m.limit_key, m.priority, m.due_at, m.deliveries"

CLAIMABLE = f"""
SELECT {COLUMNS},
       EXISTS (SELECT FROM delayq_place p WHERE p.message_id = m.id AND p.delivery = m.deliveries + 1)
  FROM delayq_message m
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW} AND {IS_SCHEDULED}
   AND m.due_at <= clock_timestamp() + %(ahead)s * interval '1 second'
   AND {MAY_CLAIM}
 ORDER BY m.id
   FOR NO KEY UPDATE OF m SKIP LOCKED
"""  # noqa: S608
# The names of the limits under which a message stands, as ``core/limits.py`` makes them.
QUEUE_NAME = "'queue ' || m.queue"
TOPIC_NAME = "'topic ' || m.topic || coalesce(' key ' || m.limit_key, '')"

WAITING = f"""
SELECT w.* FROM unnest(%(names)s::text[], %(rooms)s::int[]) n(name, room)
 CROSS JOIN LATERAL (
    SELECT {COLUMNS}, false, m.limited_by FROM delayq_message m
     WHERE {IS_LIMITED} AND m.limited_by = n.name AND {NOT_EXPIRED} AND m.queue NOT IN ({PAUSED})
       AND {QUEUE_NAME} <> ALL(%(full)s::text[]) AND {TOPIC_NAME} <> ALL(%(full)s::text[])
     ORDER BY m.priority DESC, m.due_at, m.id LIMIT n.room
       FOR NO KEY UPDATE OF m SKIP LOCKED
 ) w
"""  # noqa: S608

COUNTS = f"""
SELECT n.name, clock_timestamp(), p.running, p.kept, r.full_at, w.priority, w.due_at, w.id
  FROM unnest(%(names)s::text[]) n(name)
  LEFT JOIN delayq_rate r ON r.name = n.name
 CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE {IS_RUNNING} AND m.deliveries = p.delivery) AS running,
           count(*) FILTER (WHERE {IS_SCHEDULED} AND m.deliveries = p.delivery - 1
                              AND p.kept_until > clock_timestamp()
                              AND p.kept_until <= clock_timestamp() + %(longest)s * interval '1 second') AS kept
      FROM delayq_place p JOIN delayq_message m ON m.id = p.message_id
     WHERE p.name = n.name
 ) p
  LEFT JOIN LATERAL (
    SELECT m.priority, m.due_at, m.id FROM delayq_message m
     WHERE {IS_LIMITED} AND m.limited_by = n.name AND m.queue NOT IN ({PAUSED})
     ORDER BY m.priority DESC, m.due_at, m.id LIMIT 1
 ) w ON true
"""  # noqa: S608

PLACES = """
INSERT INTO delayq_place (name, message_id, delivery, kept_until)
SELECT * FROM unnest(%(names)s::text[], %(ids)s::bigint[], %(deliveries)s::int[], %(kept)s::timestamptz[])
    ON CONFLICT (name, message_id) DO UPDATE SET delivery = excluded.delivery, kept_until = excluded.kept_until
"""

RATES = """
INSERT INTO delayq_rate (name, full_at) SELECT * FROM unnest(%(names)s::text[], %(full)s::timestamptz[])
    ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at
"""

LIMIT = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(befores)s::text[], %(names)s::text[], %(reasons)s::text[])
        AS o(id, before, name, reason)
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT o.*, m.created_at, m.created_by, m.due_at FROM o JOIN delayq_message m ON m.id = o.id
     WHERE m.state || '' = o.before
       FOR NO KEY UPDATE OF m
), u AS (
    UPDATE delayq_message m SET state = 'limited', limited_by = x.name, moves = m.moves + 1, created_by = NULL
      FROM x WHERE m.id = x.id
    RETURNING m.id, m.moves, m.deliveries, m.due_at, x.before, x.reason
)
INSERT INTO delayq_log ({LOG_COLUMNS})
{FIRST_ROW}
UNION ALL
SELECT id, moves, clock_timestamp(), before, 'limited', deliveries, due_at, NULL, %(actor)s, reason, '', '', '' FROM u
RETURNING message_id
"""  # noqa: S608

PROMOTE = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(due)s::timestamptz[], %(reasons)s::text[]) AS o(id, due, reason)
     WHERE {LOOKS_LIKE_FEW}
), u AS (
    UPDATE delayq_message m SET state = 'scheduled', limited_by = NULL, due_at = o.due, moves = m.moves + 1
      FROM o WHERE m.id = o.id AND {IS_LIMITED}
    RETURNING m.id, m.topic, m.queue, m.priority, m.due_at, m.moves, m.deliveries, o.reason
), l AS (
    INSERT INTO delayq_log ({LOG_COLUMNS})
    SELECT id, moves, clock_timestamp(), 'limited', 'scheduled', deliveries, due_at, NULL, %(actor)s, reason, '', '', ''
      FROM u
)
SELECT id, topic, queue, priority, due_at, deliveries, reason FROM u
"""  # noqa: S608

# Rows that another transaction has locked are left for the next time: nobody waits for anybody in a circle.
FREE_PLACES = f"""
SELECT p.ctid FROM {{places}}
  LEFT JOIN LATERAL (
    SELECT {IS_RUNNING} AND m.deliveries = p.delivery OR {IS_SCHEDULED} AND m.deliveries = p.delivery - 1 AS counts
      FROM delayq_message m WHERE m.id = p.message_id OFFSET 0
 ) m ON true
 WHERE m.counts IS NOT TRUE
   FOR UPDATE OF p SKIP LOCKED
"""  # noqa: S608
DROP_PLACES = f"""
WITH d AS (
    DELETE FROM delayq_place WHERE ctid = ANY(ARRAY(
        {FREE_PLACES.format(places="unnest(%(names)s::text[]) n(name) JOIN delayq_place p ON p.name = n.name")}
    ))
)
SELECT n.name FROM unnest(%(names)s::text[]) n(name)
 WHERE EXISTS (SELECT FROM delayq_message m WHERE {IS_LIMITED} AND m.limited_by = n.name OFFSET 0)
"""  # noqa: S608
DROP_ALL_PLACES = f"""
DELETE FROM delayq_place WHERE ctid = ANY(ARRAY({FREE_PLACES.format(places="delayq_place p")})) RETURNING message_id
"""  # noqa: S608

DROP_RATES = """
DELETE FROM delayq_rate WHERE name IN (
    SELECT name FROM delayq_rate WHERE full_at < clock_timestamp() FOR UPDATE SKIP LOCKED
) RETURNING name
"""

NAMES_OF = "SELECT DISTINCT name FROM delayq_place WHERE message_id = ANY(%(ids)s::bigint[])"

# One search in the index for each line.
LINES = f"""
WITH RECURSIVE l(name) AS (
    (SELECT m.limited_by FROM delayq_message m WHERE {IS_LIMITED} AND m.limited_by > %(after)s
      ORDER BY m.limited_by LIMIT 1)
    UNION ALL
    SELECT (SELECT m.limited_by FROM delayq_message m WHERE {IS_LIMITED} AND m.limited_by > l.name
             ORDER BY m.limited_by LIMIT 1)
      FROM l WHERE l.name IS NOT NULL
)
SELECT name FROM l WHERE name IS NOT NULL LIMIT %(limit)s
"""  # noqa: S608


class PostgreSQLLimits:
    """The statements on one database alias."""

    def __init__(self, using: str) -> None:
        self._rows = PostgreSQL(using)._rows

    def lock(self, names: Collection[str] | None, *, hastily: bool = False) -> None:
        self._rows(LOCK[hastily], {"stripes": stripes(names)})

    def now(self) -> datetime:
        now: datetime = self._rows("SELECT clock_timestamp()", None)[0][0]
        return now

    def topics_of(self, ids: Sequence[int]) -> list[tuple[int, str, str, str | None]]:
        return [(row[0], row[1], row[2], row[3]) for row in self._rows(TOPICS_OF, {"ids": list(ids)})]

    def claimable(
        self, ids: Sequence[int], topics: Collection[str], queue: str | None, ahead: float
    ) -> list[Candidate]:
        parameters = {"ids": list(ids), "topics": list(topics), "queue": queue, "ahead": float(ahead)}
        return [Candidate._make((*row, None)) for row in self._rows(CLAIMABLE, parameters)]

    def waiting(self, rooms: Mapping[str, int], full: Collection[str]) -> list[Candidate]:
        rows = self._rows(WAITING, {"names": list(rooms), "rooms": list(rooms.values()), "full": list(full)})
        return [Candidate._make(row) for row in rows]

    def counts(self, names: Collection[str]) -> dict[str, Count]:
        rows = self._rows(COUNTS, {"names": list(names), "longest": LONGEST_KEPT.total_seconds()})
        return {row[0]: Count._make((*row[1:5], None if row[7] is None else row[5:8])) for row in rows}

    def write(self, places: Sequence[TakenPlace], rates: Mapping[str, datetime]) -> None:
        if places:
            names, ids, deliveries, kept = zip(*places, strict=True)
            parameters: dict[str, Any] = {"names": names, "ids": ids, "deliveries": deliveries, "kept": kept}
            self._write(PLACES, {name: list(values) for name, values in parameters.items()})
        if rates:
            self._write(RATES, {"names": list(rates), "full": list(rates.values())})

    def _write(self, sql: str, parameters: Any) -> None:
        self._rows(sql + "RETURNING name", parameters)

    def limit(self, refused: Sequence[Refused], actor: str) -> None:
        self._rows(
            LIMIT,
            {
                "ids": [row.id for row in refused],
                "befores": [row.before.value for row in refused],
                "names": [row.name for row in refused],
                "reasons": [row.reason for row in refused],
                "actor": actor,
            },
        )

    def promote(self, promoted: Sequence[Promoted], actor: str) -> list[Moved]:
        rows = self._rows(
            PROMOTE,
            {
                "ids": [row.id for row in promoted],
                "due": [row.due_at for row in promoted],
                "reasons": [row.reason for row in promoted],
                "actor": actor,
            },
        )
        return [Moved._make((*row[:4], State.SCHEDULED, *row[4:])) for row in rows]

    def drop_places(self, names: Collection[str]) -> list[str]:
        return [row[0] for row in self._rows(DROP_PLACES, {"names": list(names)})]

    def drop_all_places(self) -> None:
        self._rows(DROP_ALL_PLACES, None)

    def drop_rates(self) -> None:
        self._rows(DROP_RATES, None)

    def names_of(self, ids: Collection[int]) -> set[str]:
        return {row[0] for row in self._rows(NAMES_OF, {"ids": list(ids)})}

    def lines(self, after: str, limit: int) -> list[str]:
        return [row[0] for row in self._rows(LINES, {"after": after, "limit": limit})]
