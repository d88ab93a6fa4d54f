"""Upkeep of database connections in long-lived threads: kept open, checked after a pause, thrown away when dirty."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import Empty, Queue, SimpleQueue
from typing import Any, TypeVar

from django.db import Error as DatabaseError
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ...record.sql.sessions import has_news, is_clean
from ...record.sql.troubles import Trouble, trouble
from .guard import note_change

# A connection that was not used for this long is tested before it is used again. Seconds.
USABLE_CHECK_AFTER = 30.0
# The least time between two checks whether the server has closed a connection: a check between any two messages would
# cost more than it is worth. Seconds.
CLOSED_CHECK_INTERVAL = 0.05

# How a task left a connection: what it wrote there since its last commit is undone.
IN_TRANSACTION = "in a transaction"

# When a server was last found that takes no writes (monotonic). Any thread sets it, and each one reads it.
_refused = 0.0

T = TypeVar("T")


class _Opened:
    """The open connections of a thread. Asking Django for them is the slowest step between two messages."""

    def __init__(self) -> None:
        # Each has the time (monotonic) of the last check whether the server has closed it.
        self.opened: dict[BaseDatabaseWrapper, float] = {}
        self.used: float | None = None


class _OpenedHere(threading.local):
    def __init__(self) -> None:
        self.mine = _Opened()


_here = _OpenedHere()


def _note_opened(*, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    if not hasattr(connection, "delayq_wrappers"):
        connection.execute_wrappers.append(note_change)
        vars(connection)["delayq_wrappers"] = list(connection.execute_wrappers)
    vars(connection)["delayq_since"] = now = time.monotonic()
    _here.mine.opened.setdefault(connection, now)


connection_created.connect(_note_opened, dispatch_uid="django_delayq.worker.shared.connections")


def _adopt() -> None:
    """Note the connections that the thread had before it began to work."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None:
            _note_opened(connection=connection)


def before_task() -> None:
    """Make sure before a task that no connection of this thread is stale, and that none is closed for its age alone."""
    # A look at what is local to a thread takes several times as long as at any other attribute.
    here = _here.mine
    if here.used is None:
        _adopt()
        here.used = time.monotonic()
    if not here.opened:
        return
    now = time.monotonic()
    unused, here.used = now - here.used, now
    for connection, checked in list(here.opened.items()):
        if connection.connection is None:
            continue
        if vars(connection)["delayq_since"] <= _refused:
            discard(connection)
            continue
        connection.close_at = None
        is_time = now - checked > CLOSED_CHECK_INTERVAL
        if is_time:
            here.opened[connection] = now
        if connection.errors_occurred or unused > USABLE_CHECK_AFTER or (is_time and has_news(connection)):
            connection.errors_occurred = False
            if not connection.is_usable():
                discard(connection)


def note_error(error: BaseException) -> None:
    """Have all threads connect anew before their next tasks if a server took no writes.

    After a failover the old server may go on and keep its connections. A thread that only reads would never notice, and
    take what it reads there for the present state.
    """
    global _refused  # noqa: PLW0603
    if isinstance(error, DatabaseError) and trouble(error) == Trouble.READ_ONLY:
        _refused = time.monotonic()


def connect(using: str) -> None:
    """Give this thread a connection that the server has not closed. Raises what the driver raises when it gets none."""
    connection = connections[using]
    if connection.connection is not None and has_news(connection) and not connection.is_usable():
        discard(connection)
        connection = connections[using]
    connection.ensure_connection()


def wait_for(queue: SimpleQueue[T] | Queue[T], closed_after: float) -> T:
    """Take the next task from a queue. The connections of a thread that waits ``closed_after`` seconds are closed."""
    # Between any two messages: a "try" costs nothing there, and contextlib.suppress does.
    try:
        return queue.get(timeout=closed_after)
    except Empty:
        close_all()
    return queue.get()


def leave_pools() -> None:
    """Use no connection pools: each thread of a worker keeps its own connection, and a child inherits no pool."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        close_pool = getattr(connection, "close_pool", None)
        if close_pool is not None:
            close_pool()
    for alias in connections:
        connections.settings[alias].get("OPTIONS", {}).pop("pool", None)


def after_task() -> str:
    """Close the connections of this thread that a task left dirty: in a transaction, or with a changed session.

    Return how it left one of them; "" if there were none.
    """
    here = _here.mine
    found = ""
    if not here.opened:
        return found
    here.used = time.monotonic()
    for connection in list(here.opened):
        # A handler may have left some behind.
        connection.execute_wrappers[:] = vars(connection)["delayq_wrappers"]
        if connection.connection is not None and (how := _dirty(connection)):
            discard(connection)
            found = how
        connection.queries_log.clear()
    return found


def _dirty(connection: BaseDatabaseWrapper) -> str:
    if connection.in_atomic_block or connection.needs_rollback or not is_clean(connection):
        return "broken" if connection.errors_occurred else IN_TRANSACTION
    return "with a changed session" if hasattr(connection, "delayq_changed") else ""


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection in any state; the next use opens a new one."""
    raw, alias = connection.connection, connection.alias
    with contextlib.suppress(Exception):
        raw.close()
    pool = getattr(connection, "pool", None)
    if pool is not None:
        # The pool replaces a closed connection; one that never comes back would be missing for good.
        with contextlib.suppress(Exception):
            pool.putconn(raw)
    connection.connection = None
    _here.mine.opened.pop(connection, None)
    with contextlib.suppress(AttributeError):
        del connections[alias]


def close_all() -> None:
    """Close the connections of a thread that ends."""
    for connection in connections.all(initialized_only=True):
        with contextlib.suppress(DatabaseError, Exception):
            connection.close()
