"""The transaction of a test, which takes the place of the many transactions of life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..sql.sessions import is_failed

logger = logging.getLogger("django_delayq")


def _done() -> None:
    """Stand in the place of a function that was called: others may remember places in the list."""


def is_in_own_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open that is not the one in which ``TestCase`` wraps each test."""
    blocks: list[Any] = vars(connection)["atomic_blocks"]
    return bool(blocks) and not blocks[-1]._from_testcase


def call_on_commit_functions() -> None:
    """Call the functions that wait for a commit: in life, the transaction of the code under test has ended by now."""
    for connection in connections.all(initialized_only=True):
        hooks: list[Any] = connection.run_on_commit
        place = 0
        while connection.in_atomic_block and not is_in_own_transaction(connection) and place < len(hooks):
            savepoints, function, is_robust = hooks[place]
            if function is not _done:
                hooks[place] = (savepoints, _done, is_robust)
                _call(function, is_robust)
            place += 1


def _call(function: Callable[[], object], is_robust: bool) -> None:
    try:
        function()
    except Exception:
        if not is_robust:
            raise
        logger.exception("A function that follows a commit failed")


@contextmanager
def usable_afterwards() -> Iterator[None]:
    """Keep the open transactions usable after a handler whose statement failed.

    In life the failed statement is undone alone, unless the handler has a transaction of its own. Here, on PostgreSQL,
    all that the handler did in this database since its beginning is undone.
    """
    marks = [(c, c.savepoint()) for c in connections.all(initialized_only=True) if c.in_atomic_block]
    try:
        yield
    finally:
        for connection, mark in marks:
            if not connection.in_atomic_block:
                continue
            connection.needs_rollback = False
            if is_failed(connection):
                connection.savepoint_rollback(mark)
            connection.savepoint_commit(mark)
