"""The transaction of a test, which takes the place of the many transactions of life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..sql.sessions import breaks_by_errors, is_failed

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
        place = 0
        while connection.in_atomic_block and not is_in_own_transaction(connection):
            # A function may add others, and a rollback in it makes another list.
            hooks: list[Any] = connection.run_on_commit
            if place >= len(hooks):
                break
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


class _Alone:
    """An execute wrapper that has each statement fail alone, as it does outside of a transaction.

    Statements in a transaction that the handler has opened fail with that.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._depth = len(connection.savepoint_ids)

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        connection = self._connection
        is_of_savepoints = isinstance(sql, str) and sql.startswith(("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO"))
        if len(connection.savepoint_ids) != self._depth or is_of_savepoints:
            return execute(sql, params, many, context)
        # A statement before this one may have failed, and the handler went on.
        connection.needs_rollback = False
        if not breaks_by_errors(connection):
            return execute(sql, params, many, context)
        mark: Any = connection.savepoint()
        try:
            result = execute(sql, params, many, context)
        except BaseException:
            connection.savepoint_rollback(mark)
            raise
        connection.savepoint_commit(mark)
        return result


@contextmanager
def as_without_transaction() -> Iterator[None]:
    """Have a handler run in the transaction of a test as it runs in life, where it is in none unless it opens one.

    Should the open transaction be broken at the end all the same, on PostgreSQL, all that the handler did is undone.
    """
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                stack.enter_context(_usable_afterwards(connection))
                wrapper = _Alone(connection)
                connection.execute_wrappers.append(wrapper)
                stack.callback(connection.execute_wrappers.remove, wrapper)
        yield


@contextmanager
def _usable_afterwards(connection: BaseDatabaseWrapper) -> Iterator[None]:
    mark: Any = connection.savepoint() if breaks_by_errors(connection) else None
    try:
        yield
    finally:
        connection.needs_rollback = False
        if mark is not None:
            if is_failed(connection):
                connection.savepoint_rollback(mark)
            connection.savepoint_commit(mark)
