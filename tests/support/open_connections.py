"""Asks after each test for database connections that are open, and that nobody can close any more.

The thread of such a connection has ended, or Django has another one in its place. It would go at a garbage
collection, as an error of whichever test runs then.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from django.db import connections
from django.db.backends.signals import connection_created
from django.dispatch import receiver


class Opened(NamedTuple):
    """A connection, the thread that opened it, the test that ran then, and where that was.

    A thread of a worker refers to all of its worker, which must be able to go.
    """

    connection: weakref.ref[Any]
    thread: weakref.ref[threading.Thread]
    test: str
    where: str

    def is_of(self, thread: threading.Thread) -> bool:
        """Tell whether this thread opened it."""
        return self.thread() is thread

    def has_no_thread(self) -> bool:
        """Tell whether its thread has ended."""
        thread = self.thread()
        return thread is None or not thread.is_alive()

    def __str__(self) -> str:
        return f"{self.test}:\n{self.where}"


# Processes that tests fork have their own.
_PID = os.getpid()

_opened: list[Opened] = []
_test = "no test"


@receiver(connection_created)
def note_opened(*, connection: Any, **_named: Any) -> None:
    """Remember a connection, from whichever thread it comes."""
    if connection.vendor == "postgresql" and os.getpid() == _PID:
        where = "".join(traceback.format_stack(limit=20))
        thread = weakref.ref(threading.current_thread())
        _opened.append(Opened(weakref.ref(connection.connection), thread, _test, where))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note the name of the test."""
    global _test  # noqa: PLW0603
    _test = item.nodeid
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Close what was left, so that no other test fails."""
    yield
    here = [connection.connection for connection in connections.all(initialized_only=True)]
    noted = [*_opened]
    left: list[Opened] = []
    for one in noted:
        connection = one.connection()
        if connection is None or connection.closed:
            _opened.remove(one)
        elif one.has_no_thread() or (one.is_of(threading.current_thread()) and connection not in here):
            _opened.remove(one)
            left.append(one)
            connection.close()
    assert left == [], "open connections that nobody can close:\n" + "\n".join(map(str, left))
