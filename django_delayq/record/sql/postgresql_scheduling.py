"""The statements on PostgreSQL that write new messages: one for a single message, COPY for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache, lru_cache
from typing import Any

import psycopg
from django.db import connections

from ...core.clock import ceil_tenth
from ...core.known_record import known_identity, learn_identity
from ...core.states import LIVE
from .moves import IDENTITY
from .postgresql_base import CEIL_TENTH, PostgreSQLSession
from .rows import Inserted, NewMessage

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

# What decides how the statement reads.
NAMED = (*GIVEN, "own")
# The server gets spans as doubles: of whole microseconds up to 285 years these are exact.
MICROSECOND = timedelta(microseconds=1)

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


class PostgreSQLScheduling(PostgreSQLSession):
    """The statements that write new messages."""

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        parameters: dict[str, Any] = {**new._asdict(), "created_by": actor}
        if new.headers == "{}":
            parameters["headers"] = None
        parameters["delay"] = None if new.due_at else new.delay / MICROSECOND
        parameters["expires_at"] = None if new.expires is None else new.expires / MICROSECOND
        given = tuple([name for name in NAMED if parameters[name] is not None])
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
