"""Database connections in long-lived threads: kept, checked after a pause, thrown away when dirty."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from typing import Any

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from .guard import is_changed, unwrap, watch

# A connection that has rested this long is asked whether it still works before it is used again.
REST = 30.0
# And this long after the last look, whether the server has closed it: between any two messages of many that costs more
# than it is worth.
PAUSE = 0.05


class _Here(threading.local):
    """What there is in this thread. To ask Django for its connections costs more than all else between two messages."""

    def __init__(self) -> None:
        # And when it was last looked at whether the server has closed them.
        self.opened: dict[BaseDatabaseWrapper, float] = {}
        self.used: float | None = None


_here = _Here()


def _note_opened(*, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    watch(connection)
    _here.opened.setdefault(connection, time.monotonic())


connection_created.connect(_note_opened, dispatch_uid="django_delayq.worker.connections")


def _adopt() -> None:
    """The thread may have had connections before it began to work."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None:
            _note_opened(connection=connection)


def before_task() -> None:
    """Before a piece of work: no connection of this thread is stale, and none is closed for its age alone."""
    now = time.monotonic()
    if _here.used is None:
        _here.used = now
        _adopt()
    rested = now - _here.used
    _here.used = now
    for connection, looked in list(_here.opened.items()):
        if connection.connection is None:
            continue
        connection.close_at = None
        look = now - looked > PAUSE
        if look:
            _here.opened[connection] = now
        if connection.errors_occurred or rested > REST or (look and _has_news(connection)):
            connection.errors_occurred = False
            if not connection.is_usable():
                discard(connection)


def _has_news(connection: BaseDatabaseWrapper) -> bool:
    """Whether the server has said something unasked, which most often is good-bye. Costs no round trip."""
    if connection.vendor != "postgresql" or not hasattr(select, "poll"):
        return False
    raw = connection.connection
    if raw.closed:
        return True
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def leave_pools() -> None:
    """Each thread of a worker keeps a connection of its own, and a child process must not inherit a pool's."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        close_pool = getattr(connection, "close_pool", None)
        if close_pool is not None:
            close_pool()
    for alias in connections:
        connections.settings[alias].get("OPTIONS", {}).pop("pool", None)


def after_task() -> None:
    """After a piece of work: whatever it left open in this thread is rolled back and thrown away."""
    _here.used = time.monotonic()
    for connection in list(_here.opened):
        unwrap(connection)
        if connection.connection is not None and _is_dirty(connection):
            discard(connection)
        connection.queries_log.clear()


def _is_dirty(connection: BaseDatabaseWrapper) -> bool:
    if connection.in_atomic_block or connection.needs_rollback or connection.closed_in_transaction:
        return True
    if is_changed(connection):
        return True
    raw = connection.connection
    if connection.vendor == "postgresql":
        # 0 is "idle": anything else is a transaction that somebody began by hand, or a broken connection.
        return raw.closed or raw.info.transaction_status != 0 or not raw.autocommit
    if connection.vendor == "sqlite":
        # Python says nothing of a closed one but an error.
        with contextlib.suppress(Exception):
            return bool(raw.in_transaction)
        return True
    return not connection.get_autocommit()


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close it, whatever state it is in; the next use opens a new one."""
    raw, alias = connection.connection, connection.alias
    with contextlib.suppress(Exception):
        raw.close()
    pool = getattr(connection, "pool", None)
    if pool is not None:
        # It replaces a closed one; one that never comes back would be missing for good.
        with contextlib.suppress(Exception):
            pool.putconn(raw)
    connection.connection = None
    _here.opened.pop(connection, None)
    with contextlib.suppress(AttributeError):
        del connections[alias]


def close_all() -> None:
    """At the end of a thread."""
    for connection in connections.all(initialized_only=True):
        with contextlib.suppress(DatabaseError, Exception):
            connection.close()
