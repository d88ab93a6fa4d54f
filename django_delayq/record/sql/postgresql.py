"""The hot moves on PostgreSQL: one statement for each move changes the rows and adds to their log.

Ids are locked in ascending order, so that two batches cannot wait for each other in a circle. Times come from
``clock_timestamp()``, the database's clock at that moment, and not from the beginning of the transaction. Spans are
multiples of a second or less: a day in an interval is a day of the session's time zone, with 23 to 25 hours. Values
travel as parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any, cast

import psycopg
from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import QuerySet

from ...core.clock import MICROSECOND, ceil_tenth
from ...core.known_record import known_identity, learn_identity
from ...models import Message
from ...models.messages import HOLDS_KEY, IN_THE_WAY, WAITS_AGAIN
from .expressions import OF_TOPIC, QUEUES, Microseconds, is_open, text_of
from .holders import HOLDERS, Holder
from .moves import IDENTITY
from .portable import Portable
from .postgresql_base import (
    CEIL_TENTH,
    IS_SCHEDULED,
    LOOKS_LIKE_FEW,
    NOT_EXPIRED,
    NOW,
    OF_TOPICS,
    PAUSED,
    array,
    texts,
)
from .postgresql_delivery import PostgreSQLDelivery, claim_from, claimed
from .rows import (
    ALL_CHANGES,
    BEGINNING,
    ROWS_PASSED,
    Claimed,
    Expired,
    Facts,
    Failure,
    IndexPosition,
    Inserted,
    Moved,
    NewMessage,
    QueueLook,
    Span,
    Ticket,
    ToAnnounce,
)

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

# A policy of the role 0 counts for every role.
ROW_SECURITY = """
SELECT c.relname::text, current_user::text,
       EXISTS (SELECT FROM pg_policy p, unnest(p.polroles) r
                WHERE p.polrelid = c.oid AND p.polpermissive AND p.polcmd IN ('r', '*')
                  AND CASE WHEN r = 0 THEN true ELSE pg_has_role(r, 'USAGE') END)
  FROM unnest(%s::text[]) t JOIN pg_class c ON c.oid = to_regclass(t)
 WHERE row_security_active(c.oid)
 ORDER BY 1
"""

FACTS = f"""
SELECT id, state, topic, queue, limit_key, due_at, priority FROM delayq_message
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW}
"""  # noqa: S608

# There are no dead rows in the gaps between the known queues and behind the last one.
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

# Returns the time in any case, and the messages that wait for an announcement. Those that are no longer scheduled have
# no queue.
UNANNOUNCED = f"""
SELECT clock_timestamp(), u.message_id, m.queue, (extract(epoch FROM m.due_at) * 1000000)::bigint, m.priority
  FROM (VALUES (1)) one
  LEFT JOIN (SELECT * FROM delayq_unannounced LIMIT %s::int) u ON true
  LEFT JOIN delayq_message m ON m.id = u.message_id AND {IS_SCHEDULED}
"""  # noqa: S608

# The names of the limits that are full. The server looks up a name in a table of hashes, however many there are.
CLOSED = "SELECT unnest(%(closed)s::text[])"

# Finds the first row, and from there on the first one that may begin: so dead rows are passed only once. The condition
# is true for every position, and the server keeps the plan: see ``LOOKS_LIKE_FEW``.
CANDIDATES = f"""
SELECT q.queue, clock_timestamp(), f.due_at, f.id, s.due_at, s.id, s.is_candidate
  FROM unnest(%(queues)s::text[], %(dues)s::timestamptz[], %(ids)s::bigint[]) q(queue, due, id)
  LEFT JOIN LATERAL (
    SELECT due_at, id FROM delayq_message
     WHERE state = 'scheduled' AND queue = q.queue AND (due_at, id) > (q.due, q.id)
     ORDER BY due_at, id LIMIT 1
  ) f ON true
  LEFT JOIN LATERAL (
    SELECT * FROM (
        SELECT due_at, id, row_number() OVER (ORDER BY due_at, id) AS number,
               {{chosen}} AND {NOT_EXPIRED} AS is_candidate
          FROM (SELECT * FROM delayq_message
                 WHERE state = 'scheduled' AND queue = q.queue AND (due_at, id) >= (f.due_at, f.id)
                   AND q.queue NOT IN ({PAUSED}) AND 'queue ' || q.queue NOT IN ({CLOSED})
                 ORDER BY due_at, id LIMIT {ROWS_PASSED}) m
    ) m WHERE is_candidate OR number = {ROWS_PASSED} ORDER BY due_at, id LIMIT 1
  ) s ON true
 WHERE q.id BETWEEN 0 AND 9223372036854775807
"""  # noqa: S608

FIND_CANDIDATES = CANDIDATES.format(chosen=f"{OF_TOPICS} AND {OF_TOPIC} NOT IN ({CLOSED})")
FIND_ANY_CANDIDATES = CANDIDATES.format(chosen="true")

# The messages behind a position that may be claimed.
WAITING = f"""FROM delayq_message
         WHERE state = 'scheduled' AND queue = %(queue)s AND due_at <= {NOW}
           AND (due_at, id) > (%(due)s::timestamptz, %(id)s::bigint) AND %(queue)s NOT IN ({PAUSED})
         ORDER BY due_at, id LIMIT"""
MAY_BEGIN = f"""SELECT id, priority, due_at FROM (SELECT * {WAITING} {ROWS_PASSED}) m
     WHERE {OF_TOPICS} AND {is_open(CLOSED)} AND {NOT_EXPIRED} ORDER BY due_at, id LIMIT"""  # noqa: S608
# The same for programs, which pull messages of any topic, under no limits. A program may take its messages one by one,
# and each of its claims compares priorities: so these are read from the index alone.
MAY_BE_PULLED = f"SELECT id, priority, due_at {WAITING}"

LOCKED = f"""
    SELECT m.id FROM delayq_message m
     WHERE m.id = head.id AND {IS_SCHEDULED} AND {NOT_EXPIRED} FOR NO KEY UPDATE SKIP LOCKED
"""  # noqa: S608

# True for every id, as ``LOOKS_LIKE_FEW``, where the server has statistics of the ids, but none of this sum.
HEAD_LOOKS_SHORT = f"head.id + 0{LOOKS_LIKE_FEW.removeprefix('id')}"

# Priority counts among the thousand most overdue rows: sorting all due rows of a backlog could not use the index.
# Only the rows that are returned are locked, one by one until there are enough: another process would pass over the
# others, and take less urgent ones.
HEAD_OF_DUE = f"""
SELECT l.id FROM (
    SELECT * FROM ({{may_begin}} 1000) x ORDER BY priority DESC, due_at, id OFFSET 0
) head CROSS JOIN LATERAL ({LOCKED}) l WHERE {HEAD_LOOKS_SHORT} LIMIT %(limit)s
"""  # noqa: S608

# If others have locked the thousand most overdue rows: the first rows that are not locked.
UNLOCKED_OF_DUE = f"""
SELECT id FROM (
    SELECT head.* FROM ({{may_begin}} {ROWS_PASSED}) head CROSS JOIN LATERAL ({LOCKED}) l
     WHERE {HEAD_LOOKS_SHORT} LIMIT 1000
) x ORDER BY priority DESC, due_at, id LIMIT %(limit)s
"""  # noqa: S608

DUE, DUE_UNLOCKED = (sql.format(may_begin=MAY_BEGIN) for sql in (HEAD_OF_DUE, UNLOCKED_OF_DUE))
CLAIM_DUE, CLAIM_DUE_UNLOCKED = (
    claim_from(sql.format(may_begin=MAY_BE_PULLED)) for sql in (HEAD_OF_DUE, UNLOCKED_OF_DUE)
)

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


def _position(due: datetime | None, pk: int | None) -> IndexPosition | None:
    return None if due is None or pk is None else (due, pk)


# The columns of every new message.
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

# The properties of a message on which the text of the statement depends.
NAMED = (*GIVEN, "own")
# The server gets spans as doubles: of whole microseconds up to 285 years these are exact.

# A message that comes back from a delivery while this statement runs counts as one that came back later. One that waits
# again is not in the way of what its handler schedules under its own key.
UNLESS_WAITING = """
     WHERE NOT EXISTS (
        SELECT FROM delayq_message
         WHERE topic = %(topic)s::varchar AND key = %(key)s::varchar AND {waits_again}
     )
"""

UNLESS_HELD = """
    ON CONFLICT (topic, key) WHERE {holds_key} DO NOTHING
"""

# A claim passes over the rows until the caller's transaction ends. Several callers can hold them at once.
KEEP_WAITING = """
SELECT id FROM delayq_message WHERE id = ANY(%s) AND state = 'scheduled' AND (%s OR {in_the_way}) ORDER BY id FOR SHARE
"""

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

# NULL as COPY writes it.
NULL = "\\N"

# Rows that are sent together: the server works on them while the next ones are made.
ROWS_PER_WRITE = 50


@cache
def _insert(given: tuple[str, ...], using: str, *, knows: bool) -> str:
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
        if "own" not in given:
            rest += UNLESS_WAITING.format(waits_again=text_of(WAITS_AGAIN, using))
        rest += UNLESS_HELD.format(holds_key=text_of(HOLDS_KEY, using))
    row = ", ".join(values.values())
    # The server makes a subquery of each SELECT that reads the clock, which takes it longer.
    chosen = f"SELECT {row}{rest}" if rest else f"VALUES ({row})"
    return f"""
INSERT INTO delayq_message ({", ".join(values)})
{chosen}
RETURNING id, due_at, created_at{"" if knows else f", ({IDENTITY})"}
"""


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
    key = NULL if message.key is None else message.key.replace("\\", "\\\\")
    key_deliveries = NULL if message.key_deliveries is None else message.key_deliveries
    key_for = NULL if message.key_for is None else message.key_for
    return (
        f"{number}\t{message.topic}\t{message.queue}\t{message.priority}\t{payload}\t{headers}\t{due_text}"
        f"\t{expires}\t{retry}\t{attempts}\t{timeout}\t{lease}\t{group}\t{key}\t{key_deliveries}\t{key_for}\t"
    )


def _copied_text(text: str) -> str:
    """Return any text as COPY reads it."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


HEAD = """SELECT * FROM delayq_message m
     WHERE state = 'scheduled' AND queue = q.queue
       AND (due_at, id) > (%(due)s::timestamptz, %(id)s::bigint) AND due_at <= %(end)s::timestamptz"""


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
HEADS, HEADS_OF_TOPICS = map(_heads, (HEAD, f"{HEAD} AND {OF_TOPICS}"))

# READ COMMITTED takes the locks of a statement before its snapshot: a transaction that holds no such lock after a pause
# was committed will see the pause.
CLAIMS_UNDER_WAY = """
SELECT virtualtransaction FROM pg_locks
 WHERE relation = 'delayq_queue'::regclass AND mode = 'AccessShareLock' AND granted AND pid <> pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
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


class PostgreSQL(PostgreSQLDelivery, Portable):
    """The statements on one database alias."""

    # The server itself sets to NULL, or deletes, what has another action. A partition has the key of its table once
    # more.
    REFERENCES = """
    SELECT k.conrelid::regclass::text, quote_ident(a.attname)
      FROM pg_constraint k JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = k.conkey[1]
     WHERE k.contype = 'f' AND k.confrelid = 'delayq_message'::regclass AND k.confdeltype IN ('a', 'r')
       AND k.conparentid = 0
     ORDER BY 1, 2
    """
    # One search in the index for each queue.
    FIRST_OF_EACH = f"""({QUEUES}) q CROSS JOIN LATERAL (
        SELECT * FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue AND {{chosen}}
         ORDER BY m.due_at, m.id LIMIT {{limit}}
    ) m"""  # noqa: S608

    def now(self) -> datetime:
        return cast(datetime, self._rows("SELECT clock_timestamp()")[0][0])

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        parameters: dict[str, Any] = {**new._asdict(), "created_by": actor}
        if new.headers == "{}":
            parameters["headers"] = None
        parameters["delay"] = None if new.due_at else new.delay / MICROSECOND
        parameters["expires_at"] = None if new.expires is None else new.expires / MICROSECOND
        given = tuple([name for name in NAMED if parameters[name] is not None])
        knows = bool(known_identity(self.using))
        rows = self._rows(_insert(given, self.using, knows=knows), parameters)
        if not rows:
            return None
        if not knows:
            learn_identity(self.using, rows[0][3])
        return Inserted(*rows[0][:3])

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        if any(failure.leads_on for failure in failures):
            # The statement writes no message that follows.
            return Portable.fail(self, failures, wait=wait)
        return super().fail(failures, wait=wait)

    def keep_waiting(self, ids: Sequence[int], *, is_next: bool) -> set[int]:
        sql = KEEP_WAITING.format(in_the_way=text_of(IN_THE_WAY, self.using))
        return {pk for (pk,) in self._rows(sql, [list(ids), is_next])}

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
            rows: list[str] = []
            asked, due, due_text = None, now, ""
            rest = f"{now.isoformat()}\t{_copied_text(actor)}\tscheduled\t0\t0\t0\t0\t1\t\tf\n"
            for number, message in zip(ids, new, strict=True):
                if (wanted := message.due_at or now + message.delay) != asked:
                    # Many messages in bulk fall due together, one after another.
                    asked, due = wanted, ceil_tenth(wanted)
                    due_text = due.isoformat()
                rows.append(_copied(number, message, due, due_text) + rest)
                if len(rows) == ROWS_PER_WRITE:
                    copy.write("".join(rows))
                    rows.clear()
                yield message, Inserted(number, due, now)
            copy.write("".join(rows))

    def unannounced(self, limit: int) -> ToAnnounce:
        rows = self._rows(UNANNOUNCED, [limit])
        ids = [pk for _now, pk, *_message in rows if pk is not None]
        return ToAnnounce(rows[0][0], ids, [(queue, pk, *rest) for _now, pk, queue, *rest in rows if queue])

    def queues(self, known: Collection[str] = ()) -> list[str]:
        rows = self._rows(OTHER_QUEUES, {"known": texts(known)}) if known else self._rows(QUEUES, None)
        return [row[0] for row in rows]

    def find_candidates(
        self, begins: Mapping[str, IndexPosition], topics: Iterable[str] | None, closed: Collection[str] = ()
    ) -> dict[str, QueueLook]:
        rows = self._rows(
            FIND_ANY_CANDIDATES if topics is None else FIND_CANDIDATES,
            {
                "queues": texts(begins),
                "dues": [due for due, _id in begins.values()],
                "ids": array([pk for _due, pk in begins.values()]),
                "topics": texts(topics or ()),
                "closed": texts(closed),
            },
        )
        return {
            queue: QueueLook(queue, now, _position(*first), _position(due, pk), bool(is_candidate))
            for queue, now, *first, due, pk, is_candidate in rows
        }

    def due(
        self,
        queue: str,
        topics: Iterable[str],
        limit: int,
        closed: Collection[str] = (),
        after: IndexPosition = BEGINNING,
    ) -> list[Ticket]:
        """Return due messages, and lock them until the end of the transaction."""
        parameters: dict[str, Any] = {"queue": queue, "topics": texts(topics), "closed": texts(closed), "limit": limit}
        parameters["due"], parameters["id"] = after
        rows = self._rows(DUE, parameters) or self._rows(DUE_UNLOCKED, parameters)
        return [Ticket(row[0]) for row in rows]

    def claim_due(self, queue: str, limit: int, lease: float, worker: str) -> list[Claimed]:
        terms: dict[str, Any] = {"queue": queue, "limit": limit, "lease": lease, "worker": worker, "ahead": 0.0}
        terms["due"], terms["id"] = BEGINNING
        # No limit applies to what programs pull.
        terms["overrides"] = ALL_CHANGES
        rows = self._rows(CLAIM_DUE, terms) or self._rows(CLAIM_DUE_UNLOCKED, terms)
        return [claimed(row) for row in rows]

    def anything_expired(self, leased_from: datetime, waiting_from: datetime) -> Expired:
        return Expired(*self._rows(ANYTHING_EXPIRED, {"leased": leased_from, "waiting": waiting_from})[0])

    def facts(self, ids: Sequence[int]) -> dict[int, Facts]:
        return {row[0]: Facts._make(row) for row in self._rows(FACTS, {"ids": array(ids)})} if ids else {}

    def heads(self, queues: Sequence[str], span: Span) -> list[tuple[str, int, int, int]]:
        end = "infinity" if span.end is None else span.end.isoformat()
        parameters: dict[str, Any] = {"queues": texts(queues), "end": end, "limit": span.limit}
        parameters["due"], parameters["id"] = span.after
        sql = HEADS
        if span.topics is not None:
            sql = HEADS_OF_TOPICS
            parameters["topics"] = texts(span.topics)
        return cast(list[tuple[str, int, int, int]], self._rows(sql, parameters))

    def claims_under_way(self) -> set[str]:
        return {row[0] for row in self._rows(CLAIMS_UNDER_WAY)}

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

    def places(self, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
        # Numbers, as the driver reads them: to make a datetime for each row, and a number of that, would take longer.
        compiler = rows.values_list("id", Microseconds("due_at"), "priority").query.get_compiler(self.using)
        found: Iterable[tuple[int, int, int]] = chain.from_iterable(compiler.execute_sql())
        return found

    def has_been_up_for(self, seconds: float) -> bool:
        sql = "SELECT pg_postmaster_start_time() < clock_timestamp() - %s * interval '1 second'"
        return bool(self._rows(sql, [float(seconds)])[0][0])

    def takes_writes(self) -> bool:
        return self._rows("SHOW transaction_read_only") == [("off",)]

    def most_connections(self) -> tuple[int, bool] | None:
        pid, most = self._rows(MOST_CONNECTIONS)[0]
        # A pooler tells its clients another process id.
        return most, pid != connections[self.using].connection.info.backend_pid

    def row_security(self, tables: Collection[str]) -> list[tuple[str, str, bool]]:
        return [(table, role, shows) for table, role, shows in self._rows(ROW_SECURITY, [texts(tables)])]

    def snapshot_holders(self) -> list[Holder] | None:
        return [Holder(*row) for row in self._rows(HOLDERS)]

    def estimated_rows(self, relation: str) -> int | None:
        rows: int = self._rows("SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [relation])[0][0]
        # -1: never analysed.
        return rows if rows >= 0 else None
