"""The hot moves on PostgreSQL: one statement for each move changes the rows and adds to their log.

Ids are locked in ascending order, so that two batches cannot wait for each other in a circle. Times come from
``clock_timestamp()``, the database's clock at that moment, and not from the beginning of the transaction. Spans are
multiples of a second or less: a day in an interval is a day of the session's time zone, with 23 to 25 hours. Values
travel as parameters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import chain
from typing import Any, cast

import psycopg
from django.core.exceptions import EmptyResultSet
from django.db import NotSupportedError, OperationalError, ProgrammingError, connections
from django.db.models import QuerySet

from ...core import clock
from ...core.clock import SECOND, ceil_tenth, span_us
from ...core.outcomes import error_kind
from ...core.states import LIVE, State
from ...models import Message
from ..identity import known_identity, learn_identity
from . import ROWS_PASSED
from .expressions import QUEUES, Microseconds, is_open
from .moves import IDENTITY
from .rows import (
    WHOLE,
    Claimed,
    Facts,
    Failure,
    Inserted,
    LeaseRenewal,
    Moved,
    NewMessage,
    Reference,
    Spot,
    Stretch,
    Success,
    Ticket,
    decoded,
)
from .sessions import Session, ask_session, known_session, own_transaction

# Due times are whole tenths of a millisecond, rounded up: a message is never early.
CEIL_TENTH = "date_bin('100 microseconds', {} + interval '99 microseconds', timestamptz '2000-01-01 00:00:00Z')"

# The process that answers, and the connections that the user may have: nobody limits a superuser.
MOST_CONNECTIONS = """
SELECT pg_backend_pid(),
       CASE WHEN rolsuper THEN current_setting('max_connections')::int
            ELSE least(current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
                         - coalesce(current_setting('reserved_connections', true)::int, 0),
                       nullif(rolconnlimit, -1), nullif(datconnlimit, -1)) END
  FROM pg_roles, pg_database
 WHERE rolname = session_user AND datname = current_database()
"""

LOG_COLUMNS = """message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor,
         reason, error, traceback, exception"""

# The columns of every new message. The first row of the log is in the row of the message: created_by. See ``LogRow``.
FRESH = {
    "state": "'scheduled'",
    "headers": "'{}'",
    "due_at": CEIL_TENTH.format("clock_timestamp() + %(delay)s * interval '1 microsecond'"),
    "created_at": "clock_timestamp()",
    **dict.fromkeys(("attempts", "deliveries", "reported", "excused"), "0"),
    "moves": "1",
    "worker": "''",
    "cancel_requested": "false",
}
# The columns that a statement names only when the message has a value for them: each parameter costs both sides time.
GIVEN = {
    **{
        name: f"%({name})s" for name in ("topic", "queue", "key", "priority", "max_attempts", "limit_key", "created_by")
    },
    **{name: f"%({name})s::jsonb" for name in ("payload", "headers", "retry")},
    **{name: f"%({name})s::float8" for name in ("timeout", "lease", "key_for")},
    "key_deliveries": "%(key_deliveries)s::int",
    "due_at": CEIL_TENTH.format("%(due_at)s::timestamptz"),
    "expires_at": "due + %(expires_at)s::float8 * interval '1 microsecond'",
}

# True for every id. The server assumes ten rows for an array parameter. A kept plan for ten rows looks more expensive
# than a new plan for the one or two rows that are usual, so the server would plan each time, which takes longer than
# the statement itself. With a range it assumes hardly any rows, and keeps the plan.
LOOKS_LIKE_FEW = "id BETWEEN 1 AND 9223372036854775807"
# The state of a row that is found by its id. With a plain comparison the planner could instead read all scheduled (or
# running) rows along a partial index, and would do so when the last ANALYZE found hardly any: in a table with a long
# history and a burst since then, that is a million rows for each claim.
IS_SCHEDULED = "m.state || '' = 'scheduled'"
IS_RUNNING = "m.state || '' = 'running'"
# The time when a statement begins to search. The clock itself would be read anew for each row, and the server searches
# no index for such a value: it would read all rows.
NOW = "(SELECT clock_timestamp())"
NOT_EXPIRED = "(m.expires_at IS NULL OR m.expires_at > clock_timestamp())"
# The worker of the claim that only the row of the message has. See ``LogRow``.
CLAIMED_BY = "CASE WHEN m.claimed_at IS NOT NULL THEN coalesce(m.claimed_by, m.worker) END"
# The first row of the log, from the rows of messages ``x`` that alone have it so far.
FIRST_ROW = """SELECT id, 1, created_at, NULL, 'scheduled', 0, due_at, NULL::timestamptz, created_by, '', '', '', ''
      FROM x WHERE created_by IS NOT NULL"""

IS_LIVE = f"state IN ({', '.join(repr(state.value) for state in sorted(LIVE))})"
# ``HOLDS_KEY`` of the model, for a message with a key.
UNLESS_HELD = f"""
    ON CONFLICT (topic, key)
       WHERE key IS NOT NULL AND next_id IS NULL
         AND (key_for IS NOT NULL OR {IS_LIVE} AND (key_deliveries IS NULL OR deliveries <= key_deliveries))
       DO NOTHING
"""
# ``WAITS_AGAIN`` of the model, which is not in the way of what a handler schedules under its own key. A message that
# comes back from a delivery while this statement runs counts as one that came back later.
UNLESS_WAITING = """
     WHERE NOT EXISTS (
        SELECT FROM delayq_message
         WHERE topic = %(topic)s::varchar AND key = %(key)s::varchar AND next_id IS NULL AND state = 'scheduled'
           AND deliveries > key_deliveries AND deliveries = reported
     )
"""

# A claim passes over the row until the caller's transaction ends. Several callers can hold it at once.
KEEP_WAITING = "SELECT id FROM delayq_message WHERE id = %s AND state = 'scheduled' FOR SHARE"

# The codes of a prepared statement that does not exist, and of a name that another one has.
LOST_STATEMENT = ("26000", "42P05")

# OFFSET keeps the server from looking up the sequence for each id.
RESERVE = f"""
SELECT clock_timestamp(), array_agg(nextval(sequence)), ({IDENTITY})
  FROM (SELECT pg_get_serial_sequence('delayq_message', 'id')::regclass OFFSET 0) s(sequence),
       generate_series(1, %s::int)
"""  # noqa: S608

COPY_MESSAGES = """
COPY delayq_message (id, topic, queue, priority, payload, headers, due_at, expires_at, retry, max_attempts,
    timeout, lease, limit_key, key, key_deliveries, key_for, created_at, created_by, state, attempts, deliveries,
    reported, excused, moves, worker, cancel_requested)
    FROM STDIN
"""

# A cursor keeps the rows of its last answer in memory. With more rows than this it is not kept itself.
MOST_ROWS_KEPT = 10

# NULL as COPY writes it.
NULL = "\\N"
# Rows that are sent together: the server works on them while the next ones are made.
ROWS_PER_WRITE = 50

FACTS = f"""
SELECT id, state, topic, queue, limit_key, due_at, priority FROM delayq_message
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW}
"""  # noqa: S608

# A message that stands under none of the limits ``closed``. The server looks up a name in a table of hashes, however
# many names there are.
IS_OPEN = is_open("SELECT unnest(%(closed)s::text[])")

HEAD = """SELECT * FROM delayq_message m
     WHERE state = 'scheduled' AND queue = q.queue
       AND (due_at, id) > (%(due)s::timestamptz, %(id)s::bigint) AND due_at <= %(end)s::timestamptz"""
OF_TOPICS = "topic = ANY(%(topics)s::text[])"
# Behind the last one of so many messages there may be others.
FIRST_OPEN = f"""SELECT * FROM (
        SELECT x.*, row_number() OVER (ORDER BY due_at, id) AS number
          FROM ({HEAD} ORDER BY due_at, id LIMIT {ROWS_PASSED}) x
     ) m WHERE {OF_TOPICS} AND {IS_OPEN} OR number = {ROWS_PASSED}"""  # noqa: S608


def _heads(chosen: str) -> str:
    """Return the statement that reads the first messages of those that are chosen in each queue ``q``."""
    return f"""
SELECT q.queue, m.id, (extract(epoch FROM m.due_at) * 1000000)::bigint, m.priority
  FROM unnest(%(queues)s::text[]) q(queue)
 CROSS JOIN LATERAL (
    SELECT id, due_at, priority FROM ({chosen}) m ORDER BY due_at, id LIMIT %(limit)s
 ) m
"""  # noqa: S608


# One search in the index for each queue.
HEADS, HEADS_OF_TOPICS, OPEN_HEADS = map(_heads, (HEAD, f"{HEAD} AND {OF_TOPICS}", FIRST_OPEN))

SPOT = """
SELECT due_at, id FROM delayq_message
 WHERE state = 'scheduled' AND queue = %(queue)s AND (due_at, id) > (%(after)s::timestamptz, %(after_id)s::bigint)
 ORDER BY due_at, id OFFSET %(number)s - 1 LIMIT 1
"""
IN_STRETCH = """(m.due_at, m.id) > (%(after)s::timestamptz, %(after_id)s::bigint)
       AND (m.due_at, m.id) <= (%(end)s::timestamptz, %(end_id)s::bigint)"""

# Every claim reads this: a transaction that has begun a claim holds a lock on the table of queues until it commits.
PAUSED = "SELECT name FROM delayq_queue WHERE resumes_at IS NULL OR resumes_at > clock_timestamp()"

UNTIL_DUE = f"""
SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM delayq_message m
 WHERE state = 'scheduled' AND queue = %(queue)s AND topic = ANY(%(topics)s::text[]) AND {IS_OPEN}
   AND {IN_STRETCH} AND %(queue)s NOT IN ({PAUSED})
 ORDER BY due_at, id LIMIT 1
"""  # noqa: S608

# READ COMMITTED takes the locks of a statement before its snapshot: a transaction that holds no such lock after a pause
# was committed will see the pause.
CLAIMS_UNDER_WAY = """
SELECT virtualtransaction FROM pg_locks
 WHERE relation = 'delayq_queue'::regclass AND mode = 'AccessShareLock' AND granted AND pid <> pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# The first row in the order of an index: EXISTS has no order, and the planner reads the table for it, since it believes
# that the time of every third row is over.
ANYTHING_EXPIRED = f"""
SELECT coalesce((SELECT true FROM delayq_message m
                  WHERE state = 'running' AND leased_until < {NOW}
                    AND NOT EXISTS (SELECT FROM delayq_lease l
                                     WHERE l.message_id = m.id AND l.delivery = m.deliveries AND l.until >= {NOW})
                  ORDER BY leased_until LIMIT 1), false),
       coalesce((SELECT true FROM delayq_message
                  WHERE state = 'scheduled' AND expires_at IS NOT NULL AND expires_at <= {NOW}
                  ORDER BY expires_at LIMIT 1), false)
"""  # noqa: S608

# Priority counts among the thousand most overdue rows: sorting all due rows of a backlog could not use the index.
MOST_OVERDUE = f"""
    SELECT id, priority, due_at FROM delayq_message m
     WHERE state = 'scheduled' AND queue = %(queue)s AND due_at <= {NOW} AND topic = ANY(%(topics)s::text[])
       AND {NOT_EXPIRED} AND {IS_OPEN}
       AND {IN_STRETCH} AND %(queue)s NOT IN ({PAUSED})
     ORDER BY due_at, id LIMIT 1000
"""  # noqa: S608

# Only the rows that are returned are locked, one by one until there are enough: another process would pass over the
# others, and take less urgent ones.
DUE = f"""
SELECT l.id FROM (SELECT * FROM ({MOST_OVERDUE}) x ORDER BY priority DESC, due_at, id OFFSET 0) head
 CROSS JOIN LATERAL (
    SELECT m.id FROM delayq_message m WHERE m.id = head.id AND {IS_SCHEDULED} FOR NO KEY UPDATE SKIP LOCKED
 ) l LIMIT %(limit)s
"""  # noqa: S608

# For the case that others have locked the thousand most overdue rows: these are the first that are not locked.
DUE_UNLOCKED = f"""
SELECT id FROM ({MOST_OVERDUE} FOR NO KEY UPDATE SKIP LOCKED) head
 ORDER BY priority DESC, due_at, id LIMIT %(limit)s
"""  # noqa: S608

# What a claim asks of a message besides its state and its due time.
MAY_CLAIM = f"""{NOT_EXPIRED}
       AND m.topic = ANY(%(topics)s::text[])
       AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
       AND m.queue NOT IN ({PAUSED})"""

# The due time that Redis has. Divided as a double it is the same as if it was divided as a numeric, for less work.
READY = f"to_timestamp(t.ready / {SECOND}::float8)"

CLAIM = f"""
WITH t AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(ready)s::bigint[]) AS t(id, ready)
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT m.id,
           coalesce(m.lease, (%(leases)s::float8[])[array_position(%(topics)s::text[], m.topic::text)]) AS lease,
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
       claimed_at = clock_timestamp(), ready_at = x.ready_at
  FROM x WHERE m.id = x.id
RETURNING m.id, m.topic, m.queue, m.key, m.priority, m.payload::text, m.headers::text, m.due_at, m.expires_at,
          m.retry::text, m.max_attempts, m.attempts, m.deliveries, m.reported, m.excused, m.claimed_at, m.timeout,
          m.lease, m.conflicts, m.limit_key
"""  # noqa: S608

# The usual success, of the current delivery: the row of the log is in the row of the message. See ``LogRow``.
SUCCEED = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(deliveries)s::int[], %(places)s::int[]{{results}})
        AS o(id, delivery, place{{result}})
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT m.id, (%(actors)s::text[])[o.place] AS actor{{its}}
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
)
UPDATE delayq_message m
   SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
       claimed_by = {CLAIMED_BY}, consumed_by = x.actor,
       reported = m.reported + 1, moves = m.moves + 1{{kept}}
  FROM x WHERE m.id = x.id
RETURNING m.id
"""  # noqa: S608

# The success of an earlier delivery, which has crashed as far as the record knows.
SUCCEED_LATE = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(deliveries)s::int[], %(places)s::int[]{{results}})
        AS o(id, delivery, place{{result}})
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT m.id, m.state, o.delivery, (%(actors)s::text[])[o.place] AS actor{{its}}
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE m.state IN ('running', 'scheduled')
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
), u AS (
    UPDATE delayq_message m
       SET state = 'consumed', finished_at = clock_timestamp(), leased_until = NULL, worker = '',
           claimed_by = {CLAIMED_BY},
           reported = least(m.reported + 1, m.deliveries - m.excused), moves = m.moves + 1{{kept}}
      FROM x WHERE m.id = x.id
    RETURNING m.id, m.moves, m.finished_at, m.due_at, x.state, x.delivery, x.actor
)
INSERT INTO delayq_log ({LOG_COLUMNS})
SELECT id, moves, finished_at, state, 'consumed', delivery, due_at, NULL, actor, '', '', '', '' FROM u
RETURNING message_id
"""  # noqa: S608

# A message that was claimed a moment early and is released must fall due no earlier than before: see greatest().
AFTER = "clock_timestamp() + x.delay * interval '1 second'"

FAIL = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(deliveries)s::int[], %(actors)s::text[], %(dead)s::bool[],
                         %(delays)s::float8[], %(counts)s::bool[], %(conflicts)s::bool[], %(reasons)s::text[],
                         %(errors)s::text[], %(tracebacks)s::text[], %(exceptions)s::text[],
                         %(kinds)s::text[]{{payloads}})
        AS o(id, delivery, actor, dead, delay, counts, conflict, reason, error, traceback, exception, kind{{payload}})
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT o.*, CASE WHEN m.cancel_requested THEN 'cancelled' WHEN o.dead THEN 'dead' ELSE 'scheduled' END AS after,
           m.created_at, m.created_by, m.claimed_at, m.ready_at, {CLAIMED_BY} AS worker, m.due_at, m.moves
      FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR NO KEY UPDATE OF m
), u AS (
    UPDATE delayq_message m
       SET state = x.after, leased_until = NULL, worker = '', reported = m.reported + 1, moves = m.moves + 1,
           created_by = NULL, claimed_at = NULL, ready_at = NULL, claimed_by = NULL,
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
    {FIRST_ROW}
    UNION ALL
    SELECT id, moves, claimed_at, 'scheduled', 'running', delivery, due_at, ready_at, 'worker:' || worker,
           '', '', '', ''
      FROM x WHERE claimed_at IS NOT NULL
    UNION ALL
    SELECT id, moves, clock_timestamp(), 'running', after, delivery, due_at, NULL, actor, reason, error, traceback,
           exception
      FROM u
)
SELECT id, topic, queue, priority, after, due_at, deliveries, reason FROM u
"""  # noqa: S608

# The row of the message is locked against the reaper, and not changed: see ``Lease``.
EXTEND = f"""
WITH o AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(deliveries)s::int[], %(leases)s::float8[]) AS o(id, delivery, lease)
     WHERE {LOOKS_LIKE_FEW}
), x AS (
    SELECT m.id, m.deliveries, m.cancel_requested, o.lease FROM o JOIN delayq_message m ON m.id = o.id
     WHERE {IS_RUNNING} AND m.deliveries = o.delivery
     ORDER BY m.id
       FOR SHARE OF m
), l AS (
    INSERT INTO delayq_lease (message_id, delivery, until)
    SELECT id, deliveries, clock_timestamp() + lease * interval '1 second' FROM x WHERE lease > 0
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
        payloads=", %(payloads)s::text[]",
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
# An array instead of a parameter for each id: the statement is the same for any number, and its plan is kept.
DELETE = """
WITH log AS (DELETE FROM delayq_log WHERE message_id = ANY(%(ids)s::bigint[])),
     gone AS (DELETE FROM delayq_message WHERE id = ANY(%(ids)s::bigint[]) RETURNING id)
SELECT count(*) FROM gone
"""

# The first rows after a place among those that a query finds. Arrays again: the planner does not know how many rows it
# will be, and could read the whole table for them. A commit of the purge itself does not wait until it is on the disk,
# and keeps no other commit waiting: what a crash of the server brings back, the next purge deletes.
DELETE_FIRST = """
WITH chosen AS ({chosen} AND (finished_at, id) > (%s::timestamptz, %s::bigint)
                 ORDER BY finished_at, id LIMIT %s::int FOR UPDATE SKIP LOCKED),
     log AS (DELETE FROM delayq_log WHERE message_id = ANY(ARRAY(SELECT id FROM chosen))),
     gone AS (DELETE FROM delayq_message WHERE id = ANY(ARRAY(SELECT id FROM chosen)) RETURNING id),
     last AS (SELECT finished_at, id FROM chosen ORDER BY finished_at DESC, id DESC LIMIT 1)
SELECT (SELECT count(*) FROM gone), (SELECT finished_at FROM last), (SELECT id FROM last),
       CASE WHEN %s::bool THEN set_config('synchronous_commit', 'off', true) END
"""

# The server itself sets to NULL, or deletes, what has another action. A partition has the key of its table once more.
REFERENCES = """
SELECT k.conrelid::regclass::text, quote_ident(a.attname)
  FROM pg_constraint k JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = k.conkey[1]
 WHERE k.contype = 'f' AND k.confrelid = 'delayq_message'::regclass AND k.confdeltype IN ('a', 'r')
   AND k.conparentid = 0
 ORDER BY 1, 2
"""

EXTENDS = {True: EXTEND, False: _passing_over(EXTEND)}


@cache
def _insert(given: tuple[str, ...], *, knows: bool) -> str:
    """Return the statement that inserts a message with these values.

    ``knows``: this process knows the identity of the database. If not, it comes with the row, and costs no query of its
    own. Checking for a conflict costs a second record in the server's log, so only a message with a key does.
    """
    values = FRESH | {name: GIVEN[name] for name in given if name in GIVEN}
    rest = ""
    if "expires_at" in given:
        # The clock is read once.
        rest, values["due_at"] = f" FROM (SELECT {values['due_at']}) d(due)", "due"
    if "key" in given:
        rest += UNLESS_HELD if "own" in given else UNLESS_WAITING + UNLESS_HELD
    row = ", ".join(values.values())
    # The server makes a subquery of each SELECT that reads the clock, which takes it longer.
    chosen = f"SELECT {row}{rest}" if rest else f"VALUES ({row})"
    return f"""
INSERT INTO delayq_message ({", ".join(values)})
{chosen}
RETURNING id, due_at, created_at{"" if knows else f", ({IDENTITY})"}
"""


def _run(raw: Any, session: Session, sql: str, parameters: Any, *, keep: bool) -> list[tuple[Any, ...]]:
    """Run a statement by a cursor.

    The cursor is psycopg's own: Django's would keep every statement in memory under DEBUG, and it reads times in
    Python. It is kept for the next statement: a new one would look for the types of all values again.
    """
    before, zone = raw.prepare_threshold, raw.pgconn.parameter_status(b"TimeZone")
    how = zone, raw.pgconn.parameter_status(b"client_encoding")
    cursor = session.cursors.pop(how, None) or psycopg.Cursor(raw)
    try:
        raw.prepare_threshold = 0 if keep else None
        rows: list[tuple[Any, ...]] = cursor.execute(sql, parameters, binary=True).fetchall()
    finally:
        raw.prepare_threshold = before
    if len(rows) <= MOST_ROWS_KEPT:
        session.cursors[how] = cursor
    if zone == b"UTC":
        return rows
    # The driver returns times of the session's time zone, with which Python cannot compute (UTCDateTimeField).
    return [tuple([v.astimezone(UTC) if isinstance(v, datetime) else v for v in row]) for row in rows]


class PostgreSQL:
    """The statements on one database alias."""

    def __init__(self, using: str) -> None:
        self.using = using

    def _rows(self, sql: str, parameters: Any, *, keep: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement. ``keep``: the server keeps its plan, if the session may have plans that are kept."""
        connection = connections[self.using]
        try:
            return self._fetch(connection, sql, parameters, keep=keep)
        except NotSupportedError:
            # A migration has changed the type of a column in a plan that the server keeps: that plan would fail for
            # ever.
            if connection.in_atomic_block or not connection.get_autocommit():
                raise
            connection.close()
            return self._fetch(connection, sql, parameters, keep=keep)
        except (OperationalError, ProgrammingError) as error:
            # The server lost the prepared statement, or has another one under its name: the statement did not run.
            if getattr(error.__cause__, "sqlstate", None) not in LOST_STATEMENT:
                raise
            session = known_session(connection)
            if session is not None:
                session.keeps_plans = False
            if connection.in_atomic_block or not connection.get_autocommit():
                raise
            return self._fetch(connection, sql, parameters, keep=keep)

    def _fetch(self, connection: Any, sql: str, parameters: Any, *, keep: bool) -> list[tuple[Any, ...]]:
        """Run a statement at READ COMMITTED, or at the level of the transaction that is open."""
        connection.ensure_connection()
        connection.validate_no_broken_transaction()
        session = known_session(connection)
        # The first statement of a connection is often its only one: to prepare it would cost another round trip.
        keep = keep and session is not None and session.keeps_plans
        if session is None:
            session = ask_session(connection)
        if session.is_read_committed or connection.in_atomic_block or not connection.get_autocommit():
            return self._execute(connection, sql, parameters, keep=keep)
        with own_transaction(self.using):
            return self._execute(connection, sql, parameters, keep=keep)

    @staticmethod
    def _execute(connection: Any, sql: str, parameters: Any, *, keep: bool) -> list[tuple[Any, ...]]:
        """Run a statement, and let the server keep its plan: planning one of these takes longer than running it."""
        if clock.of_tests is not None:
            # Each text is another one: the server would keep its plan in vain.
            sql, keep = sql.replace("clock_timestamp()", f"timestamptz '{clock.of_tests().isoformat()}'"), False
        raw = connection.connection
        with connection.wrap_database_errors:
            return _run(raw, raw.delayq_session, sql, parameters, keep=keep)

    def now(self) -> datetime:
        return cast(datetime, self._rows("SELECT clock_timestamp()", None)[0][0])

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        values = {
            "topic": new.topic,
            "queue": new.queue,
            "key": new.key,
            "priority": new.priority,
            "payload": new.payload,
            "headers": None if new.headers == "{}" else new.headers,
            "due_at": new.due_at,
            "delay": float(span_us(new.delay)) if new.due_at is None else None,
            "expires_at": None if new.expires is None else float(span_us(new.expires)),
            "retry": new.retry,
            "max_attempts": new.max_attempts,
            "timeout": new.timeout,
            "lease": new.lease,
            "limit_key": new.limit_key,
            "created_by": actor,
            "key_deliveries": new.key_deliveries,
            "key_for": new.key_for,
        }
        parameters: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        given = tuple(parameters) if new.own is None else (*parameters, "own")
        knows = bool(known_identity(self.using))
        rows = self._rows(_insert(given, knows=knows), parameters)
        if not rows:
            return None
        if not knows:
            learn_identity(self.using, rows[0][3])
        return Inserted(*rows[0][:3])

    def keep_waiting(self, message_id: int) -> bool:
        return bool(self._rows(KEEP_WAITING, [message_id]))

    def insert_many(self, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
        """Write messages by COPY, in the caller's transaction.

        The caller prepares a message while the server works on those before it, so preparing costs no time.
        """
        now, ids, identity = self._rows(RESERVE, [len(new)])[0]
        learn_identity(self.using, identity)
        connection = connections[self.using]
        with (
            connection.wrap_database_errors,
            psycopg.Cursor(connection.connection) as cursor,
            cursor.copy(COPY_MESSAGES) as copy,
        ):
            rows = []
            rest = f"{now.isoformat()}\t{_copied_text(actor)}\tscheduled\t0\t0\t0\t0\t1\t\tf\n"
            for number, message in zip(ids, new, strict=True):
                due, due_text = _rounded(message.due_at or now + message.delay)
                rows.append(_copied(number, message, due, due_text) + rest)
                if len(rows) == ROWS_PER_WRITE:
                    copy.write("".join(rows))
                    rows.clear()
                yield message, Inserted(number, due, now)
            copy.write("".join(rows))

    def facts(self, ids: Sequence[int]) -> list[Facts]:
        return [Facts._make((pk, State(state), *rest)) for pk, state, *rest in self._rows(FACTS, {"ids": _array(ids)})]

    def queues(self) -> list[str]:
        return [row[0] for row in self._rows(QUEUES, None)]

    def heads(
        self,
        queues: Sequence[str],
        *,
        after: tuple[datetime, int],
        end: datetime | None,
        limit: int,
        topics: Sequence[str] | None = None,
        closed: Collection[str] = (),
    ) -> list[tuple[str, int, int, int]]:
        parameters = {
            "queues": _texts(queues),
            "due": after[0],
            "id": after[1],
            "end": "infinity" if end is None else end.isoformat(),
            "limit": limit,
        }
        sql = HEADS
        if topics is not None:
            sql = OPEN_HEADS if closed else HEADS_OF_TOPICS
            parameters |= {"topics": _texts(topics), **({"closed": _texts(closed)} if closed else {})}
        return cast(list[tuple[str, int, int, int]], self._rows(sql, parameters))

    def spot(self, queue: str, after: Spot, number: int) -> Spot | None:
        rows = self._rows(SPOT, {"queue": queue, "after": after[0], "after_id": after[1], "number": number})
        return cast(Spot, rows[0]) if rows else None

    def until_due(
        self, queue: str, topics: Iterable[str], closed: Collection[str], stretch: Stretch = WHOLE
    ) -> float | None:
        rows = self._rows(UNTIL_DUE, _open(queue, topics, closed, stretch))
        return rows[0][0] if rows else None

    def anything_expired(self) -> tuple[bool, bool]:
        leased, expired = self._rows(ANYTHING_EXPIRED, None)[0]
        return leased, expired

    def due(
        self, queue: str, topics: Iterable[str], limit: int, closed: Collection[str], stretch: Stretch = WHOLE
    ) -> list[Ticket]:
        """Return due messages, and lock them until the end of the transaction."""
        parameters = {"limit": limit, **_open(queue, topics, closed, stretch)}
        rows = self._rows(DUE, parameters) or self._rows(DUE_UNLOCKED, parameters)
        return [Ticket(row[0]) for row in rows]

    def claims_under_way(self) -> set[str]:
        return {row[0] for row in self._rows(CLAIMS_UNDER_WAY, None)}

    def claim(
        self, tickets: Sequence[Ticket], leases: dict[str, float], worker: str, queue: str | None, ahead: float
    ) -> list[Claimed]:
        rows = self._rows(
            CLAIM,
            {
                "ids": _array([ticket.id for ticket in tickets]),
                "ready": _array([ticket.ready_tenths for ticket in tickets]),
                "topics": _texts(leases),
                "leases": _array(leases.values()),
                "worker": worker,
                "queue": queue,
                "ahead": ahead,
            },
        )
        return [_claimed(row) for row in rows]

    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]:
        ids, deliveries, actors, results = zip(*successes, strict=True)
        place = {actor: number for number, actor in enumerate(dict.fromkeys(actors), 1)}
        parameters: dict[str, Any] = {
            "ids": _array(ids),
            "deliveries": _array(deliveries),
            "places": _array([place[actor] for actor in actors]),
            "actors": _texts(place),
        }
        keeps = any(result is not None for result in results)
        if keeps:
            parameters["results"] = list(results)
        usual, late = SUCCEEDS[wait, keeps]
        done = {row[0] for row in self._rows(usual, parameters)}
        if len(done) < len(successes):
            done.update(row[0] for row in self._rows(late, parameters))
        return done

    def begin(self) -> None:
        connection = connections[self.using]
        with connection.wrap_database_errors:
            # psycopg begins a transaction with its first statement. Django would count this among the handler's.
            connection.connection.execute("SELECT 1", prepare=False)

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        parameters: dict[str, Any] = {
            "ids": [failure.id for failure in failures],
            "deliveries": [failure.delivery for failure in failures],
            "actors": [failure.actor for failure in failures],
            "dead": [failure.dead for failure in failures],
            "delays": [None if f.delay is None else f.delay.total_seconds() for f in failures],
            "counts": [failure.counts for failure in failures],
            "conflicts": [failure.conflict for failure in failures],
            "reasons": [failure.reason for failure in failures],
            "errors": [failure.error for failure in failures],
            "tracebacks": [failure.traceback for failure in failures],
            "exceptions": [failure.exception for failure in failures],
            "kinds": [error_kind(failure.error) for failure in failures],
        }
        payloads = [failure.payload for failure in failures]
        changes = any(payload is not None for payload in payloads)
        if changes:
            parameters["payloads"] = payloads
        rows = self._rows(FAILS[wait, changes], parameters)
        return [Moved(row[0], row[1], row[2], row[3], State(row[4]), row[5], row[6], row[7]) for row in rows]

    def extend(self, renewals: Sequence[LeaseRenewal], *, wait: bool) -> dict[int, bool]:
        rows = self._rows(
            EXTENDS[wait],
            {
                "ids": [renewal.id for renewal in renewals],
                "deliveries": [renewal.delivery for renewal in renewals],
                "leases": [renewal.lease for renewal in renewals],
            },
        )
        return {row[0]: row[1] for row in rows}

    def delete(self, ids: Sequence[int]) -> None:
        self._rows(DELETE, {"ids": _array(ids)})

    def deletion(self, rows: QuerySet[Message]) -> Callable[[int], int]:
        # Compiled once: it takes Django milliseconds, in which no handler of this process runs.
        try:
            chosen, parameters = rows.values_list("finished_at", "id").query.sql_with_params()
        except EmptyResultSet:
            return lambda _size: 0
        statement = DELETE_FIRST.format(chosen=chosen)
        after: Sequence[Any] = ("-infinity", 0)

        def delete(size: int) -> int:
            nonlocal after
            connection = connections[self.using]
            is_own = connection.get_autocommit() and not connection.in_atomic_block
            # Planned each time: which index is best depends on the states.
            [(deleted, *last, _set)] = self._rows(statement, [*parameters, *after, size, is_own], keep=False)
            after = last if deleted else after
            return int(deleted)

        return delete

    def references(self) -> list[Reference]:
        return [Reference(table, column) for table, column in self._rows(REFERENCES, [])]

    def places(self, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
        # As the driver reads them: this saves making a datetime for each row, and a number from that.
        compiler = rows.values_list("id", Microseconds("due_at"), "priority").query.get_compiler(self.using)
        found: Iterable[tuple[int, int, int]] = chain.from_iterable(compiler.execute_sql())
        return found

    def has_been_up_for(self, seconds: float) -> bool:
        sql = "SELECT pg_postmaster_start_time() < clock_timestamp() - %s * interval '1 second'"
        return bool(self._rows(sql, [float(seconds)])[0][0])

    def most_connections(self) -> int | None:
        connection = connections[self.using]
        with connection.cursor() as cursor:
            cursor.execute(MOST_CONNECTIONS)
            pid, most = cursor.fetchone()
        # A pooler tells its clients another process id, and has many of them share a connection.
        return most if pid == connection.connection.info.backend_pid else None

    def estimated_rows(self, relation: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [relation])
            rows: int = cursor.fetchone()[0]
        # -1: never analysed.
        return rows if rows >= 0 else None


@lru_cache(maxsize=256)
def _rounded(due: datetime) -> tuple[datetime, str]:
    """Return the due time as the record has it, and as COPY reads it. Many messages in bulk fall due together."""
    rounded = ceil_tenth(due)
    return rounded, rounded.isoformat()


def _copied(number: int, message: NewMessage, due: datetime, due_text: str) -> str:
    """Return the columns up to the time of creation as COPY reads them.

    A tab ends a column and a newline a row: a topic, a queue and a key contain neither, and JSON escapes them. Only the
    backslashes of JSON itself have to be escaped.
    """
    payload, headers = message.payload.replace("\\", "\\\\"), message.headers.replace("\\", "\\\\")
    expires = NULL if message.expires is None else (due + message.expires).isoformat()
    retry = NULL if message.retry is None else message.retry.replace("\\", "\\\\")
    attempts = NULL if message.max_attempts is None else message.max_attempts
    timeout = NULL if message.timeout is None else message.timeout
    lease = NULL if message.lease is None else message.lease
    group = NULL if message.limit_key is None else message.limit_key.replace("\\", "\\\\")
    held = f"{NULL}\t{NULL}\t{NULL}" if message.key is None else _copied_key(message)
    return (
        f"{number}\t{message.topic}\t{message.queue}\t{message.priority}\t{payload}\t{headers}\t{due_text}"
        f"\t{expires}\t{retry}\t{attempts}\t{timeout}\t{lease}\t{group}\t{held}\t"
    )


def _copied_key(message: NewMessage) -> str:
    """Return the key and the columns that say how long it is held as COPY reads them."""
    held = (message.key_deliveries, message.key_for)
    numbers = [NULL if number is None else str(number) for number in held]
    return "\t".join([_copied_text(message.key or ""), *numbers])


def _copied_text(text: str) -> str:
    """Return any text as COPY reads it."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _array(numbers: Iterable[float | None]) -> str:
    """Write an array as PostgreSQL does. Faster than psycopg, which looks for the type of each element."""
    return "{" + ",".join(["NULL" if number is None else str(number) for number in numbers]) + "}"


def _texts(texts: Iterable[str]) -> str:
    """Write an array of texts, with any characters in them."""
    return "{" + ",".join([_quoted(text) for text in texts]) + "}"


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _open(queue: str, topics: Iterable[str], closed: Collection[str], stretch: Stretch) -> dict[str, Any]:
    """Return the parameters for messages of a part of a queue that stand under none of these limits."""
    (after, after_id), (end, end_id), _is_last = stretch
    place = {"after": after, "after_id": after_id, "end": end, "end_id": end_id}
    return {"queue": queue, "topics": _texts(topics), **place, "closed": _texts(closed)}


def _claimed(row: tuple[Any, ...]) -> Claimed:
    """Return a row of ``CLAIM`` with the values of its JSON columns."""
    values = list(row)
    for place in (5, 6, 9):
        if values[place] is not None:
            values[place] = decoded(values[place])
    return Claimed._make(values)
