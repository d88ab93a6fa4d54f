"""The statements of limits on PostgreSQL: one for each step, whatever the number of messages and limits."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from .limited import LOCKS, LONGEST_PAUSE, STRIPES, Candidate, Count, PortableLimits, Taking, stripes
from .postgresql_base import (
    IS_RUNNING,
    IS_SCHEDULED,
    LOOKS_LIKE_FEW,
    MAY_CLAIM,
    NOW,
    PostgreSQLSession,
    array,
    texts,
)
from .postgresql_delivery import CLAIM, claimed, claiming
from .rows import Claimed, Claiming

# The locks are taken in the order of the array. The statement after this one sees what others have committed.
# The server would plan the statements of each claim anew, for a third of their time: with the lengths of its arrays a
# plan always looks cheaper than the one that is kept.
LOCK = f"""
SELECT set_config('idle_in_transaction_session_timeout', '{LONGEST_PAUSE}', true),
       set_config('plan_cache_mode', 'force_generic_plan', true),
       pg_advisory_xact_lock({LOCKS}, stripe)
  FROM unnest(%(stripes)s::int[]) stripe
"""  # noqa: S608

CLAIMABLE = f"""
SELECT m.id, m.topic, m.queue, m.limit_key, m.priority, m.due_at
  FROM delayq_message m
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW} AND {IS_SCHEDULED}
   AND m.due_at <= clock_timestamp() + %(ahead)s * interval '1 second'
   AND {MAY_CLAIM}
 ORDER BY m.id
   FOR NO KEY UPDATE OF m SKIP LOCKED
"""  # noqa: S608

# A permit ``p`` whose delivery ran on at a time though its message was over.
IS_KEPT = """EXISTS (SELECT FROM delayq_lease l WHERE l.message_id = p.message_id
                  AND l.delivery = -p.delivery AND l.until >= {since} OFFSET 0)"""

# A permit ``p`` that counts.
IS_TAKEN = f"""(EXISTS (SELECT FROM delayq_message m
                WHERE m.id = p.message_id AND {IS_RUNNING} AND m.deliveries = p.delivery OFFSET 0)
             OR {IS_KEPT.format(since=NOW)})"""

# A permit ``p`` whose delivery ran, within its lease, ``since`` seconds ago or later. No row of the log tells of a
# success: see ``LogRow``.
SINCE = "(SELECT clock_timestamp() - %(since)s * interval '1 second')"
WAS_TAKEN = f"""(EXISTS (SELECT FROM delayq_message m WHERE m.id = p.message_id
                  AND (m.finished_at >= {SINCE}
                       OR {IS_RUNNING} AND m.deliveries = p.delivery AND (m.leased_until >= {SINCE}
                          OR EXISTS (SELECT FROM delayq_lease l WHERE l.message_id = p.message_id
                                      AND l.delivery = p.delivery AND l.until >= {SINCE}))
                       OR EXISTS (SELECT FROM delayq_log l WHERE l.message_id = p.message_id
                                   AND l.delivery = p.delivery AND l.from_state = 'running' AND l.at >= {SINCE}))
                OFFSET 0) OR {IS_KEPT.format(since=SINCE)})"""  # noqa: S608

# Reads each permit once: there may be thousands.
PLACES = "count(*) AS places, count(*) FILTER (WHERE {counts}) AS running FROM delayq_place p"
COUNTS = f"""
SELECT n.name, clock_timestamp(), p.running, p.places - p.running, r.full_at
  FROM unnest(%(names)s::text[]) n(name) LEFT JOIN delayq_rate r ON r.name = n.name
 CROSS JOIN LATERAL (SELECT {PLACES} WHERE p.name = n.name) p
""".format(counts=IS_TAKEN)  # noqa: S608
USED = f"""
SELECT coalesce(p.name, r.name), clock_timestamp(), coalesce(p.running, 0), coalesce(p.places - p.running, 0), r.full_at
  FROM (SELECT p.name, {PLACES} GROUP BY p.name LIMIT %(limit)s) p
  FULL JOIN (SELECT name, full_at FROM delayq_rate WHERE full_at > {SINCE} LIMIT %(limit)s) r
    ON r.name = p.name
"""  # noqa: S608

# A permit that an earlier delivery of one of the messages has left is written again, and not deleted.
CLAIM_AND_TAKE = f"""
WITH claimed AS ({CLAIM}), taken AS (
    INSERT INTO delayq_place (name, message_id, delivery)
    SELECT p.name, p.id, c.deliveries
      FROM unnest(%(names)s::text[], %(named)s::bigint[]) p(name, id) JOIN claimed c ON c.id = p.id
        ON CONFLICT (name, message_id) DO UPDATE SET delivery = excluded.delivery
), used AS (
    INSERT INTO delayq_rate (name, full_at) SELECT * FROM unnest(%(rates)s::text[], %(full)s::timestamptz[])
        ON CONFLICT (name) DO UPDATE SET full_at = excluded.full_at
), dropped AS (
    DELETE FROM delayq_place p
     WHERE p.name = ANY(%(with_dead_permits)s::text[]) AND p.message_id <> ALL(%(ids)s::bigint[]) AND NOT {IS_TAKEN}
)
SELECT * FROM claimed
"""  # noqa: S608

# Limits and messages in one answer: a claim waits for each of its statements.
LOOK = f"""
WITH c AS MATERIALIZED ({CLAIMABLE}), n AS MATERIALIZED ({COUNTS})
SELECT NULL::bigint, NULL, NULL, NULL, NULL::smallint, NULL::timestamptz, n.* FROM n
 UNION ALL SELECT c.*, NULL, NULL, NULL, NULL, NULL FROM c
"""  # noqa: S608

DROP_PLACES = f"DELETE FROM delayq_place p WHERE NOT {IS_TAKEN} RETURNING message_id"  # noqa: S608
DROP_RATES = f"DELETE FROM delayq_rate WHERE full_at < {SINCE} RETURNING name"  # noqa: S608


class PostgreSQLLimits(PostgreSQLSession, PortableLimits):
    """The statements on one database alias."""

    def lock(self, names: Collection[str] | None) -> None:
        self._rows(LOCK, {"stripes": stripes(names)})

    def read_candidates(self, names: Collection[str], asked: Claiming) -> tuple[dict[str, Count], list[Candidate]]:
        ids = array([ticket.id for ticket in asked.tickets])
        parameters = {"names": texts(names), "ids": ids, "topics": texts(asked.leases)}
        rows = self._rows(
            LOOK, {**parameters, "queue": asked.queue, "ahead": float(asked.ahead), "overrides": asked.overrides}
        )
        counts = {row[6]: Count._make(row[7:]) for row in rows if row[0] is None}
        return counts, [Candidate._make(row[:6]) for row in rows if row[0] is not None]

    def counts(self, names: Collection[str]) -> dict[str, Count]:
        rows = self._rows(COUNTS, {"names": texts(names)})
        return {row[0]: Count._make(row[1:]) for row in rows}

    def used(self, limit: int, since: timedelta | None = None) -> dict[str, Count]:
        parameters = {"limit": limit, "since": 0.0 if since is None else since.total_seconds()}
        sql = USED.format(counts=IS_TAKEN if since is None else WAS_TAKEN)
        return {row[0]: Count._make(row[1:]) for row in self._rows(sql, parameters)}

    def claim_limited(self, taking: Taking, asked: Claiming) -> list[Claimed]:
        places = [(name, ticket.id) for ticket in asked.tickets for name in taking.names[ticket.id]]
        parameters = claiming(asked) | {
            "names": texts([name for name, _id in places]),
            "named": array([pk for _name, pk in places]),
            "rates": texts(taking.rates),
            "full": list(taking.rates.values()),
            "with_dead_permits": texts(taking.with_dead_permits),
        }
        return [claimed(row) for row in self._rows(CLAIM_AND_TAKE, parameters)]

    def lock_overrides(self) -> None:
        self._rows(f"SELECT pg_advisory_xact_lock({LOCKS}, {STRIPES})", keep=False)

    def drop_permits(self) -> None:
        self._rows(DROP_PLACES, None)

    def drop_rates(self, since: timedelta) -> None:
        self._rows(DROP_RATES, {"since": since.total_seconds()})
