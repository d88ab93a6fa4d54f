"""Asks the database driver about a session, by vendor, opens the queue's own transactions, and limits statements.

Of the questions only ``ask_session`` costs a round trip, once for each connection.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

# psycopg's transaction_status: no transaction is open; a statement has no answer yet; a transaction is open; one of its
# statements has failed, and only a rollback is possible.
IDLE, ACTIVE, OPEN, FAILED = range(4)
# psycopg's number for this level of isolation.
READ_COMMITTED = 2
# A pooler makes up the process id that it tells its clients: it has no process for each of them.
ASK = "SELECT pg_backend_pid(), current_setting('default_transaction_isolation')"

# PostgreSQL's codes of a serialization failure and of a deadlock; SQLite's code of a database that is locked, in its
# lowest byte.
DEADLOCK = "40P01"
CONFLICTS = ("40001", DEADLOCK)
SQLITE_BUSY = 5
# PostgreSQL's code of a statement that the server stopped.
QUERY_CANCELED = "57014"
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %s, true)"
SET_LIMIT = "SELECT set_config('statement_timeout', %s, true), set_config('jit', %s, true)"
# The option for the name of a session that has no other name, and the prefix of the names that workers give.
FALLBACK_NAME = "fallback_application_name"
APPLICATION = "django-delayq"
# The most causes of an error that are looked at: a chain may be a circle.
MOST_CAUSES = 20


class _AskedHere(threading.local):
    """How long the queue's own transactions in this thread wait for a lock (ms); 0: for ever."""

    lock_timeout = 0


_here = _AskedHere()


class TooSlow(Exception):
    """The database stopped a statement, because its answer would have taken too long."""


@dataclass(slots=True)
class Session:
    """The properties of a connection to PostgreSQL that decide how statements are sent.

    ``keeps_plans``: a statement that was prepared is there for the next one. Behind a pooler the next statement may go
    to another server process, where a client of the same pooler has prepared something else under the same name.
    ``is_read_committed``: a statement outside of a transaction runs at READ COMMITTED. ``knows_success``: the statement
    of one success has been prepared.
    """

    keeps_plans: bool
    is_read_committed: bool
    knows_success: bool = False
    # The cursor for the next statement, by the time zone of the session, in which it reads times, and the encoding of
    # its texts. It is taken out while it is in use: threads may share a connection.
    cursors: dict[tuple[bytes | None, bytes | None], Any] = field(default_factory=dict)


def name_sessions(name: str) -> None:
    """Give this name to the sessions that the process opens from now on, where the project gives them none.

    PostgreSQL shows it as the name of the application.
    """
    for alias in connections:
        if connections[alias].vendor != "postgresql":
            continue
        options = connections.settings[alias].setdefault("OPTIONS", {})
        if options.get(FALLBACK_NAME, APPLICATION).startswith(APPLICATION):
            # The name that OPTIONS, a service file or PGAPPNAME gives wins.
            options[FALLBACK_NAME] = f"{APPLICATION} {name}"


def known_session(connection: BaseDatabaseWrapper) -> Session | None:
    """Return the properties of an open connection to PostgreSQL; None when it was not asked for them yet."""
    found: Session | None = getattr(connection.connection, "delayq_session", None)
    return found


def ask_session(connection: BaseDatabaseWrapper) -> Session:
    """Ask an open connection to PostgreSQL for its properties, and remember them as long as it lasts."""
    raw: Any = connection.connection
    with connection.wrap_database_errors, raw.cursor() as cursor:
        pid, isolation = cursor.execute(ASK, prepare=False).fetchone()
    is_direct = pid == raw.info.backend_pid and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    # With prepare_threshold in OPTIONS the project itself says that prepared statements work.
    found = Session(is_direct or raw.prepare_threshold is not None, isolation == "read committed")
    raw.delayq_session = found
    return found


def ensure_usable(connection: BaseDatabaseWrapper) -> None:
    """Connect as Django does before a statement: anew where CONN_HEALTH_CHECKS shows a dead connection."""
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    if "cursor" in vars(connection):
        # Django's test cases put one there that forbids the databases which they do not name.
        connection.cursor().close()


@contextlib.contextmanager
def own_transaction(using: str) -> Iterator[None]:
    """Open a transaction of the queue's own, at READ COMMITTED. Inside a transaction of the caller it is a savepoint.

    The moves lock rows and then decide by what the rows hold now. At a higher level of isolation, which the OPTIONS of
    the database or the server may ask for, a statement sees the rows as they were when its transaction began, and fails
    when another transaction has changed one since. It would also miss a pause that was committed before its locks were
    taken. A transaction of the caller keeps the level that the caller chose.
    """
    connection = connections[using]
    if connection.vendor != "postgresql" or connection.in_atomic_block or not connection.get_autocommit():
        with transaction.atomic(using=using):
            yield
        return
    ensure_usable(connection)
    raw: Any = connection.connection
    before = raw.isolation_level

    def restore() -> None:
        if connection.connection is raw and raw.info.transaction_status == IDLE:
            raw.isolation_level = before

    if before != READ_COMMITTED:
        raw.isolation_level = READ_COMMITTED
    try:
        with transaction.atomic(using=using):
            if before != READ_COMMITTED:
                # Before the functions on commit of others: these run at the caller's level.
                transaction.on_commit(restore, using=using)
            if _here.lock_timeout:
                with connection.cursor() as cursor:
                    cursor.execute(SET_LOCK_TIMEOUT, [str(_here.lock_timeout)])
            yield
    finally:
        if before != READ_COMMITTED:
            restore()


@contextlib.contextmanager
def lock_timeout(milliseconds: int) -> Iterator[None]:
    """Have the queue's own transactions of this thread fail when they wait for a lock for longer than this.

    A process that freezes in a transaction keeps its locks until it thaws. Single statements wait as long as they
    must, and SQLite has a timeout anyway.
    """
    before = _here.lock_timeout
    _here.lock_timeout = milliseconds
    try:
        yield
    finally:
        _here.lock_timeout = before


@contextlib.contextmanager
def statement_timeout(using: str, milliseconds: int) -> Iterator[None]:
    """Raise ``TooSlow`` when a statement inside takes longer than ``milliseconds``. Without effect on SQLite."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        yield
        return
    outer = connection.in_atomic_block or not connection.get_autocommit()
    try:
        with own_transaction(using), connection.cursor() as cursor:
            before = None
            if outer:
                cursor.execute("SELECT current_setting('statement_timeout'), current_setting('jit')")
                before = cursor.fetchone()
            # To compile a statement takes longer than any statement here that is fast enough.
            cursor.execute(SET_LIMIT, [str(milliseconds), "off"])
            yield
            if before is not None:
                # The caller's transaction goes on with the settings that it had.
                cursor.execute(SET_LIMIT, before)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) == QUERY_CANCELED:
            raise TooSlow from error
        raise


@contextlib.contextmanager
def without_jit(using: str) -> Iterator[None]:
    """Read in one transaction whose statements are not compiled, which takes longer than they do."""
    connection = connections[using]
    if connection.vendor != "postgresql" or connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    with own_transaction(using):
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL jit = off")
        yield


def breaks_by_errors(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a statement that fails breaks the open transaction; elsewhere it only undoes itself."""
    return connection.vendor == "postgresql"


def is_failed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a statement failed in the open transaction, so that the database takes only a rollback."""
    raw = connection.connection
    return connection.vendor == "postgresql" and raw is not None and raw.pgconn.transaction_status == FAILED


def conflict_in(error: BaseException | None) -> BaseException | None:
    """Return the driver's error if a transaction failed only because of another one, so that it may succeed when it is
    repeated. What was raised may have that error among its causes.
    """
    # A handler may raise anything: attributes of any type, and causes that go round in a circle.
    for _ in range(MOST_CAUSES):
        if error is None:
            break
        sqlstate, code = getattr(error, "sqlstate", None), getattr(error, "sqlite_errorcode", None)
        if isinstance(sqlstate, str) and sqlstate in CONFLICTS:
            return error
        if isinstance(code, int) and code & 0xFF == SQLITE_BUSY:
            return error
        error = error.__cause__
    return None


def is_deadlock(error: OperationalError) -> bool:
    """Return whether the database has ended a transaction because two waited for each other."""
    return getattr(conflict_in(error), "sqlstate", None) == DEADLOCK


def has_news(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server has sent something unasked: mostly, that it closed the connection."""
    if connection.vendor != "postgresql" or not hasattr(select, "poll"):
        return False
    raw = connection.connection
    if raw.closed:
        return True
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_waiting(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server is yet to answer a statement, or to take the connection. Any thread may ask."""
    raw = connection.connection
    return connection.vendor == "postgresql" and (raw is None or raw.pgconn.transaction_status == ACTIVE)


def is_clean(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an open connection works as far as the driver knows, with no transaction begun by hand."""
    raw = connection.connection
    if connection.vendor == "postgresql":
        return not raw.closed and raw.pgconn.transaction_status == IDLE and bool(raw.autocommit)
    if connection.vendor == "sqlite":
        # For a closed connection the driver only raises an error.
        with contextlib.suppress(Exception):
            return not raw.in_transaction
        return False
    return bool(connection.get_autocommit())
