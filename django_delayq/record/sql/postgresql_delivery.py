"""The statements on PostgreSQL that claim messages, and end and prolong deliveries, with their log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psycopg
from django.db import connections

from ...core.clock import SECOND
from ...core.outcomes import error_kind
from ...core.states import State
from . import requests
from .log_in_row import CLAIM_IN_ROW, CLEAR, COLUMNS, EARLIER_ROWS, KEEP_CLAIM, LOG_COLUMNS, SUCCESS_IN_ROW
from .postgresql_base import (
    CEIL_TENTH,
    IS_RUNNING,
    IS_SCHEDULED,
    LOOKS_LIKE_FEW,
    LOST_STATEMENT,
    MAY_CLAIM,
    OF_TOPICS,
    PostgreSQLSession,
    array,
    texts,
)
from .rows import Claimed, Claiming, Failure, LeaseRenewal, Moved, Success, decoded
from .sessions import is_failed

# The due time that Redis has. Divided as a double it is the same as if it was divided as a numeric, for less work.
READY = f"to_timestamp(t.ready / {SECOND}::float8)"

TICKETS = f"""
    SELECT * FROM unnest(%(ids)s::bigint[], %(ready)s::bigint[]) AS t(id, ready)
     WHERE {LOOKS_LIKE_FEW}
"""  # noqa: S608
LEASE_OF_TOPIC = "(%(leases)s::float8[])[array_position(%(topics)s::text[], m.topic::text)]"

CLAIM = f"""
WITH t AS ({TICKETS}), x AS (
    SELECT m.id,
           coalesce(m.lease, {LEASE_OF_TOPIC}) AS lease,
           {READY} AS ready_at
      FROM t JOIN delayq_message m ON m.id = t.id
     WHERE {IS_SCHEDULED}
       AND m.due_at <= least({READY}, clock_timestamp() + %(ahead)s * interval '1 second')
       AND {MAY_CLAIM}
     ORDER BY m.id
       FOR NO KEY UPDATE OF m SKIP LOCKED
)
UPDATE delayq_message m
   SET state = 'running', deliveries = m.deliveries + 1, moves = m.moves + 1, worker = %(worker)s,
       leased_until = clock_timestamp() + x.lease * interval '1 second',
       {CLAIM_IN_ROW}
  FROM x WHERE m.id = x.id
RETURNING m.id, m.topic, m.queue, m.key, m.priority, m.payload::text, m.headers::text, m.due_at, m.expires_at,
          m.retry::text, m.max_attempts, m.attempts, m.deliveries, m.reported, m.excused, m.claimed_at, m.timeout,
          m.lease, m.conflicts, m.limit_key
"""  # noqa: S608


def claim_from(due: str) -> str:
    """Return the claim of the messages of any topic whose ids another statement selects."""
    tickets = f"SELECT id, NULL::bigint AS ready FROM ({due}) due"  # noqa: S608
    any_topic = CLAIM.replace(TICKETS, tickets).replace(LEASE_OF_TOPIC, "%(lease)s::float8")
    # The subquery that locks rows runs only once.
    return any_topic.replace("WITH t AS (", "WITH t AS MATERIALIZED (").replace(OF_TOPICS, "true")


SUCCESSES = f"""SELECT * FROM unnest(%(ids)s::bigint[], %(deliveries)s::int[], %(places)s::int[]{{results}})
        AS o(id, delivery, place{{result}})
     WHERE {LOOKS_LIKE_FEW}"""  # noqa: S608

# The usual success, of the current delivery: the row of the log is in the row of the message. See ``log_in_row``.
SUCCEED = f"""
WITH o AS (
    {SUCCESSES}
), x AS (
    SELECT m.id, (%(actors)s::text[])[o.place] AS actor{{its}}
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
)
UPDATE delayq_message m
   SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
       {SUCCESS_IN_ROW},
       reported = m.reported + 1, moves = m.moves + 1{{kept}}
  FROM x WHERE m.id = x.id
RETURNING m.id
"""  # noqa: S608

# The same of one message, whichever its current delivery is.
SUCCEED_CURRENT = f"""
UPDATE delayq_message m
   SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
       {KEEP_CLAIM}, consumed_by = %(actor)s,
       reported = m.reported + 1, moves = m.moves + 1
 WHERE m.id = %(id)s::bigint AND m.queue = %(queue)s AND {IS_RUNNING}
RETURNING m.deliveries
"""  # noqa: S608

# The same for one delivery by a thread of the worker that claimed it, in the transaction of its handler. One request
# records it and commits: see ``PostgreSQLDelivery.commit_success``. Where no row moves, the division fails, and with it
# what follows. All parameters are numbers, because they are written into the text of the command.
PREPARE_SUCCESS = f"""
PREPARE delayq_success (bigint, int, int) AS
WITH x AS (
    UPDATE delayq_message m
       SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
           {KEEP_CLAIM}, consumed_by = 'worker:' || m.worker || '/' || $3,
           reported = m.reported + 1, moves = m.moves + 1
     WHERE m.id = $1 AND {IS_RUNNING} AND m.deliveries = $2
    RETURNING m.id
)
SELECT 1 / count(*) FROM x
"""  # noqa: S608
COMMIT_SUCCESS = "SAVEPOINT delayq_success; EXECUTE delayq_success ({:d}, {:d}, {:d}); COMMIT"
UNDO_SUCCESS = b"ROLLBACK TO SAVEPOINT delayq_success"

# The success of an earlier delivery, which has crashed as far as the record knows. A later one that runs goes on, and
# keeps its permits: see ``Lease``.
SUCCEED_LATE = f"""
WITH o AS (
    {SUCCESSES}
), x AS (
    SELECT m.id, m.state, m.deliveries, m.leased_until, o.delivery, (%(actors)s::text[])[o.place] AS actor{{its}}
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE m.state IN ('running', 'scheduled')
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
), u AS (
    UPDATE delayq_message m
       SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
           {KEEP_CLAIM},
           reported = least(m.reported + 1, m.deliveries - m.excused), moves = m.moves + 1{{kept}}
      FROM x WHERE m.id = x.id
    RETURNING m.id, m.moves, m.finished_at, m.due_at, x.state, x.delivery, x.actor
), l AS (
    INSERT INTO delayq_lease (message_id, delivery, until)
    SELECT id, -deliveries,
           greatest(leased_until, (SELECT until FROM delayq_lease WHERE message_id = id AND delivery = deliveries))
      FROM x WHERE state = 'running' AND delivery < deliveries
)
INSERT INTO delayq_log ({LOG_COLUMNS})
SELECT id, moves, finished_at, state, 'consumed', delivery, due_at, NULL, actor, '', '', '', '' FROM u
RETURNING message_id
"""  # noqa: S608

# A message that was claimed a moment early and is released must fall due no earlier than before: see greatest().
AFTER = "clock_timestamp() + x.delay * interval '1 second'"

FAIL = f"""
WITH o AS (
    SELECT * FROM unnest(%(id)s::bigint[], %(delivery)s::int[], %(actor)s::text[], %(dead)s::bool[],
                         %(delay)s::float8[], %(counts)s::bool[], %(conflict)s::bool[], %(reason)s::text[],
                         %(error)s::text[], %(traceback)s::text[], %(exception)s::text[],
                         %(kind)s::text[]{{payloads}})
        AS o(id, delivery, actor, dead, delay, counts, conflict, reason, error, traceback, exception, kind{{payload}})
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT o.*, CASE WHEN m.cancel_requested THEN 'cancelled' WHEN o.dead THEN 'dead' ELSE 'scheduled' END AS after,
           {COLUMNS}
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
), u AS (
    UPDATE delayq_message m
       SET state = x.after, leased_until = NULL, worker = '', reported = m.reported + 1, moves = m.moves + 1,
           {CLEAR},
           attempts = m.attempts + x.counts::int, conflicts = m.conflicts + x.conflict::int{{changed}},
           error = CASE WHEN x.kind <> '' THEN x.kind ELSE m.error END,
           finished_at = CASE WHEN x.after <> 'scheduled' THEN clock_timestamp() END,
           due_at = CASE WHEN x.after = 'scheduled' AND x.delay IS NOT NULL
                         THEN greatest(m.due_at, {CEIL_TENTH.format(AFTER)})
                         ELSE m.due_at END
      FROM x WHERE m.id = x.id
    RETURNING m.id, m.topic, m.queue, m.priority, m.due_at, m.moves, m.deliveries, x.after, x.delivery,
              x.actor, CASE WHEN x.after = 'cancelled' THEN 'cancel requested; ' ELSE '' END || x.reason AS reason,
              x.error, x.traceback, x.exception
), l AS (
    INSERT INTO delayq_log ({LOG_COLUMNS})
    {EARLIER_ROWS}
    UNION ALL
    SELECT id, moves, clock_timestamp(), 'running', after, delivery, due_at, NULL, actor, reason, error, traceback,
           exception
      FROM u
)
SELECT id, topic, queue, priority, after, due_at, deliveries, reason FROM u
"""  # noqa: S608

# The row of the message is locked against the reaper, and not changed: see ``Lease``. One that somebody else has locked
# is read without a lock (None): the reaper leaves it alone until its lock goes, and then sees the new lease.
EXTEND = f"""
WITH o AS (
    SELECT * FROM unnest(%(id)s::bigint[], %(delivery)s::int[], %(lease)s::float8[]) AS o(id, delivery, lease)
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT m.id, m.deliveries, m.cancel_requested, abs(o.lease) AS lease,
           o.lease > 0 OR m.leased_until < clock_timestamp() AND NOT EXISTS (
               SELECT FROM delayq_lease l
                WHERE l.message_id = m.id AND l.delivery = m.deliveries AND l.until >= clock_timestamp()) AS renews
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR SHARE OF m
), l AS (
    INSERT INTO delayq_lease (message_id, delivery, until)
    SELECT id, deliveries, clock_timestamp() + lease * interval '1 second' FROM x WHERE renews AND lease > 0
    ON CONFLICT (message_id, delivery) DO UPDATE SET until = greatest(delayq_lease.until, excluded.until)
)
SELECT id, cancel_requested FROM x
"""  # noqa: S608


def _passing_over(sql: str) -> str:
    """Return the statement so that it passes over rows that another transaction has locked."""
    skipping, count = re.subn(r"(FOR (?:NO KEY UPDATE|SHARE) OF m)\n", r"\1 SKIP LOCKED\n", sql)
    assert count == 1
    return skipping


# Successes with results that are kept (True), and failures that change a payload (True), travel by statements of their
# own, so that others cost no more.
KEEPING = {
    False: {"results": "", "result": "", "its": "", "kept": ""},
    True: {
        "results": ", %(results)s::text[]",
        "result": ", result",
        "its": ", o.result",
        "kept": ", result = x.result::jsonb",
    },
}

CHANGING = {
    False: FAIL.format(payloads="", payload="", changed=""),
    True: FAIL.format(
        payloads=", %(payload)s::text[]",
        payload=", payload",
        changed=", payload = coalesce(x.payload::jsonb, m.payload)",
    ),
}

# The usual and the late success. The statements that wait for rows that another transaction has locked (True), and
# those that pass over them (False).
SUCCEEDS = {
    (wait, keeps): [
        sql if wait else _passing_over(sql) for sql in (SUCCEED.format(**kept), SUCCEED_LATE.format(**kept))
    ]
    for wait in (True, False)
    for keeps, kept in KEEPING.items()
}

FAILS = {(True, changes): sql for changes, sql in CHANGING.items()} | {
    (False, changes): _passing_over(sql) for changes, sql in CHANGING.items()
}

# Whether the transaction takes no writes, as after a failover. A query would fix its snapshot: then a handler could not
# choose its isolation.
SHOW_READ_ONLY = "SHOW transaction_read_only"

EXTENDS = {True: EXTEND, False: _passing_over(EXTEND), None: EXTEND.replace("FOR SHARE OF m", "")}


class PostgreSQLDelivery(PostgreSQLSession):
    """The statements of deliveries."""

    def claim(self, asked: Claiming) -> list[Claimed]:
        return [claimed(row) for row in self._rows(CLAIM, claiming(asked))]

    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]:
        ids, deliveries, actors, results = zip(*successes, strict=True)
        place = {actor: number for number, actor in enumerate(dict.fromkeys(actors), 1)}
        parameters: dict[str, Any] = {
            "ids": array(ids),
            "deliveries": array(deliveries),
            "places": array([place[actor] for actor in actors]),
            "actors": texts(place),
        }
        keeps = any(result is not None for result in results)
        if keeps:
            parameters["results"] = list(results)
        usual, late = SUCCEEDS[wait, keeps]
        done = {row[0] for row in self._rows(usual, parameters)}
        if len(done) < len(successes):
            done.update(row[0] for row in self._rows(late, parameters))
        return done

    def succeed_current(self, queue: str, message_id: int, actor: str) -> int | None:
        rows = self._rows(SUCCEED_CURRENT, {"queue": queue, "id": message_id, "actor": actor})
        return rows[0][0] if rows else None

    def commit_success(self, success: Success, thread: int | None) -> bool:
        connection = connections[self.using]
        session = None if thread is None or success.result is not None else self._session_with_plans(connection)
        if session is None:
            return bool(self.succeed([success], wait=True))
        raw = connection.connection
        with connection.wrap_database_errors:
            if not session.knows_success:
                raw.execute(PREPARE_SUCCESS, prepare=False)
                session.knows_success = True
            try:
                requests.send(raw, COMMIT_SUCCESS.format(success.id, success.delivery, thread).encode())
            except psycopg.Error as error:
                if not is_failed(connection):
                    # The commit failed, or the connection.
                    raise
                if error.sqlstate in LOST_STATEMENT:
                    session.knows_success = False
                requests.send(raw, UNDO_SUCCESS)
            else:
                return True
        # This delivery is not the current one, or something else is wrong, which shows now.
        return bool(self.succeed([success], wait=True))

    def begin(self) -> None:
        connection = connections[self.using]
        raw, session = connection.connection, self._session_with_plans(connection)
        command = None if session is None else requests.begin(raw)
        with connection.wrap_database_errors:
            if command is None:
                # psycopg begins a transaction with its first statement. Django would count this among the handler's.
                (shown,) = raw.execute(SHOW_READ_ONLY, prepare=False).fetchone()
                refuses = shown == "on" and not raw.read_only
            else:
                requests.send(raw, command)
                refuses = requests.refuses_writes(raw)
            if refuses:
                raise psycopg.errors.ReadOnlySqlTransaction("the server takes no writes")

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        """Record failures after which nothing follows."""
        columns = _columns(Failure, failures)
        columns["delay"] = [None if delay is None else delay.total_seconds() for delay in columns["delay"]]
        columns["kind"] = [error_kind(error) for error in columns["error"]]
        changes = any(payload is not None for payload in columns["payload"])
        rows = self._rows(FAILS[wait, changes], columns)
        return [Moved(row[0], row[1], row[2], row[3], State(row[4]), row[5], row[6], row[7]) for row in rows]

    def extend(self, renewals: Sequence[LeaseRenewal], *, wait: bool = True) -> dict[int, bool]:
        answers = self._extend(EXTENDS[wait], renewals)
        if not wait and (unanswered := [renewal for renewal in renewals if renewal.id not in answers]):
            answers |= self._extend(EXTENDS[None], unanswered)
        return answers

    def _extend(self, sql: str, renewals: Sequence[LeaseRenewal]) -> dict[int, bool]:
        return {row[0]: row[1] for row in self._rows(sql, _columns(LeaseRenewal, renewals))}


def _columns(kind: type[Failure | LeaseRenewal], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return rows of this kind as an array for each column."""
    return {name: [row[place] for row in rows] for place, name in enumerate(kind._fields)}


def claiming(asked: Claiming) -> dict[str, Any]:
    """Return the parameters of ``CLAIM``."""
    return {
        "ids": array([ticket.id for ticket in asked.tickets]),
        "ready": array([ticket.ready_tenths for ticket in asked.tickets]),
        "topics": texts(asked.leases),
        "leases": array(asked.leases.values()),
        "worker": asked.worker,
        "queue": asked.queue,
        "ahead": asked.ahead,
        "overrides": asked.overrides,
    }


def claimed(row: tuple[Any, ...]) -> Claimed:
    """Return a row of ``CLAIM`` with the values of its JSON columns."""
    values = list(row)
    for place in (5, 6, 9):
        if values[place] is not None:
            values[place] = decoded(values[place])
    return Claimed._make(values)
