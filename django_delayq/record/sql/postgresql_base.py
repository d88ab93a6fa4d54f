"""What all statements on PostgreSQL share: how they are run, and the conditions and values in them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import psycopg
from django.db import NotSupportedError, OperationalError, ProgrammingError, connections

from ...core import in_tests
from .sessions import Session, ask_session, ensure_usable, is_failed, known_session, own_transaction

# The codes of a prepared statement that does not exist, and of a name that another one has.
LOST_STATEMENT = ("26000", "42P05")

# A cursor keeps the rows of its last answer in memory. With more rows than this it is not kept itself.
MOST_ROWS_KEPT = 10

# --- conditions and values --------------------------------------------------------------------------------------------

# Due times are whole tenths of a millisecond, rounded up: a message is never early.
CEIL_TENTH = "date_bin('100 microseconds', {} + interval '99 microseconds', timestamptz '2000-01-01 00:00:00Z')"

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

# Every claim reads this: a transaction that has begun a claim holds a lock on the table of queues until it commits.
PAUSED = "SELECT name FROM delayq_queue WHERE resumes_at IS NULL OR resumes_at > clock_timestamp()"

OF_TOPICS = "m.topic = ANY(%(topics)s::text[])"

# The conditions of a claim on a message, besides its state and its due time.
MAY_CLAIM = f"""{NOT_EXPIRED}
       AND {OF_TOPICS}
       AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
       AND m.queue NOT IN ({PAUSED})
       AND NOT EXISTS (SELECT FROM delayq_limit_override WHERE id > %(overrides)s)"""


def array(numbers: Iterable[float | None]) -> str:
    """Write an array as PostgreSQL does. Faster than psycopg, which looks for the type of each element."""
    return "{" + ",".join(["NULL" if number is None else str(number) for number in numbers]) + "}"


def texts(values: Iterable[str]) -> str:
    """Write an array of texts, with any characters in them."""
    return "{" + ",".join([_quoted(text) for text in values]) + "}"


def nullable_texts(values: Iterable[object]) -> str:
    """Write an array of what the server reads from text: numbers, times, words and None for NULL."""
    return "{" + ",".join(["NULL" if value is None else _quoted(str(value)) for value in values]) + "}"


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- running statements -----------------------------------------------------------------------------------------------


class PostgreSQLSession:
    """Runs statements on one database alias: at READ COMMITTED, and so that the server keeps their plans."""

    def __init__(self, using: str) -> None:
        self.using = using

    def _rows(self, sql: str, parameters: Any = None, *, keep: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement. ``keep``: the server keeps its plan, if the session may have plans that are kept."""
        connection = connections[self.using]
        try:
            return self._run(connection, sql, parameters, keep=keep)
        except NotSupportedError:
            # A migration has changed the type of a column in a plan that the server keeps: that plan would fail for
            # ever.
            if connection.in_atomic_block or not connection.get_autocommit():
                raise
            connection.close()
            return self._run(connection, sql, parameters, keep=keep)
        except (OperationalError, ProgrammingError) as error:
            # The server lost the prepared statement, or has another one under its name: the statement did not run.
            if getattr(error.__cause__, "sqlstate", None) not in LOST_STATEMENT:
                raise
            session = known_session(connection)
            if session is not None:
                session.keeps_plans = False
            if connection.in_atomic_block or not connection.get_autocommit():
                raise
            return self._run(connection, sql, parameters, keep=keep)

    def _session_with_plans(self, connection: Any) -> Session | None:
        """Return the session if it keeps what is prepared in it, and would take a statement now; else None."""
        connection.validate_no_broken_transaction()
        session = known_session(connection)
        return session if session is not None and session.keeps_plans and not is_failed(connection) else None

    def _run(self, connection: Any, sql: str, parameters: Any, *, keep: bool) -> list[tuple[Any, ...]]:
        """Run a statement at READ COMMITTED, or at the level of the transaction that is open.

        The server keeps its plan: planning one of these takes longer than running it. The cursor is psycopg's own:
        Django's would keep every statement in memory under DEBUG, and it reads times in Python. It is kept for the next
        statement: a new one would look for the types of all values again.
        """
        ensure_usable(connection)
        connection.validate_no_broken_transaction()
        session = known_session(connection)
        # The first statement of a connection is often its only one: to prepare it would cost another round trip.
        keep = keep and session is not None and session.keeps_plans
        session = session or ask_session(connection)
        if not (session.is_read_committed or connection.in_atomic_block) and connection.get_autocommit():
            with own_transaction(self.using):
                return self._run(connection, sql, parameters, keep=keep)
        if in_tests.clock is not None:
            # Each text is another one: the server would keep its plan in vain.
            sql, keep = sql.replace("clock_timestamp()", f"timestamptz '{in_tests.clock().isoformat()}'"), False
        raw = connection.connection
        before, zone = raw.prepare_threshold, raw.pgconn.parameter_status(b"TimeZone")
        how = zone, raw.pgconn.parameter_status(b"client_encoding")
        cursor = session.cursors.pop(how, None) or psycopg.Cursor(raw)
        with connection.wrap_database_errors:
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
