"""The transaction of a test, which takes the place of the many transactions in production."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, update_wrapper, wraps
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..record.sql.sessions import breaks_by_errors, is_failed

logger = logging.getLogger("django_delayq")


class OnCommit:
    """A function that waits for a commit, and knows whether it was called.

    Nothing commits in a ``TestCase``. A caller of the functions that wait, such as ``captureOnCommitCallbacks``,
    leaves them in the list of the connection. The functions of a class of tests wait anew in each of its tests: what
    the test before has done was rolled back.
    """

    def __init__(self, connection: BaseDatabaseWrapper, function: Callable[[], object]) -> None:
        # Django logs the name, and the publisher looks for its batch.
        update_wrapper(self, function)
        self._connection = connection
        self._function = function
        # The savepoints in which the function was called; None: it was not called.
        self._called_in: list[Any] | None = None
        self._was_called_by_us = False

    def __call__(self) -> object:
        # A capture may have read the list before a handler ran, after which all functions were called.
        if self.was_called and self._was_called_by_us:
            return None
        return self._call(by_us=False)

    def __eq__(self, other: object) -> bool:
        return self is other or self._function == other

    def __hash__(self) -> int:
        return hash(self._function)

    def call(self) -> None:
        """Call the function, which nobody has called. Later calls do nothing."""
        self._call(by_us=True)

    @property
    def was_called(self) -> bool:
        """Whether it was called in a savepoint that was not rolled back since."""
        within = self._called_in
        return within is not None and self._connection.savepoint_ids[: len(within)] == within

    def _call(self, *, by_us: bool) -> object:
        self._called_in, self._was_called_by_us = [*self._connection.savepoint_ids], by_us
        return self._function()


@cache
def notice_calls() -> None:
    """Wrap the functions that wait for a commit from now on: what somebody else has called is not called again."""
    register = BaseDatabaseWrapper.on_commit

    @wraps(register)
    def on_commit(connection: BaseDatabaseWrapper, func: Callable[[], object], robust: bool = False) -> None:
        waits = connection.in_atomic_block and callable(func)
        register(connection, OnCommit(connection, func) if waits else func, robust)

    BaseDatabaseWrapper.on_commit = on_commit  # type: ignore[method-assign,assignment]


def is_in_own_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open that is not the one in which ``TestCase`` wraps each test."""
    if not connection.in_atomic_block:
        return False
    blocks = connection.savepoint_ids
    # Not by ``_Blocks``, which would give the block a savepoint.
    connection.savepoint_ids = [*blocks]
    try:
        # Django refuses a durable block in every other transaction. This one does nothing.
        with transaction.atomic(using=connection.alias, savepoint=False, durable=True):
            return False
    except RuntimeError:
        return True
    finally:
        connection.savepoint_ids = blocks


def call_on_commit_functions() -> None:
    """Call the functions that wait for a commit: in production the transaction of the tested code has ended by now."""
    for connection in connections.all(initialized_only=True):
        place = 0
        while connection.in_atomic_block:
            # A function may add others, and a rollback in it makes another list.
            hooks: list[Any] = connection.run_on_commit
            if place >= len(hooks):
                break
            savepoints, function, is_robust = hooks[place]
            if not isinstance(function, OnCommit):
                # It was registered before ``notice_calls``.
                function = OnCommit(connection, function)
                hooks[place] = (savepoints, function, is_robust)
            place += 1
            if function.was_called:
                continue
            if is_in_own_transaction(connection):
                break
            try:
                _call(function, is_robust)
            except BaseException:
                # As Django does, it leaves those after it uncalled.
                del connection.run_on_commit[place:]
                raise


def _call(function: OnCommit, is_robust: bool) -> None:
    """Call a function that follows a commit; a robust one may fail."""
    try:
        function.call()
    except Exception:
        if not is_robust:
            raise
        logger.exception("A function that follows a commit failed")


class _Blocks(list[Any]):
    """The savepoints of blocks that are open on a connection, for a handler that no transaction surrounds in
    production.

    The outermost block that it opens has a savepoint for its transaction, also when it asks for none. Outside of it
    each statement fails alone: a statement that failed before, and whose error the handler caught, hinders nothing. In
    a block that the handler has opened, all statements fail after one that failed.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection.savepoint_ids)
        self._connection = connection
        self._depth = len(self)
        # The savepoint before the first statement; None: there was none, or a failed one breaks no transaction.
        self._mark: Any = None
        self._is_marked = not breaks_by_errors(connection)

    def append(self, savepoint: Any) -> None:
        super().append(self._connection.savepoint() if savepoint is None and self._is_outside else savepoint)

    def validate(self) -> None:
        """Take the place of ``validate_no_broken_transaction``, which comes before each statement."""
        if not self._is_marked:
            self._is_marked = True
            self._mark = self._connection.savepoint()
        if self._is_outside:
            transaction.set_rollback(False, using=self._connection.alias)
        type(self._connection).validate_no_broken_transaction(self._connection)

    def execute(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Execute a statement, as a wrapper that Django calls."""
        connection = self._connection
        is_of_savepoints = isinstance(sql, str) and sql.startswith(("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO"))
        if not self._is_outside or is_of_savepoints or not breaks_by_errors(connection):
            return execute(sql, params, many, context)
        mark: Any = connection.savepoint()
        try:
            result = execute(sql, params, many, context)
        except BaseException:
            connection.savepoint_rollback(mark)
            raise
        connection.savepoint_commit(mark)
        return result

    def close(self) -> None:
        """Take the place of ``close``, which would end the transaction of the test."""
        if not self._is_outside:
            transaction.set_rollback(True, using=self._connection.alias)

    def leave(self) -> None:
        """Leave the transaction of the test usable."""
        connection = self._connection
        connection.savepoint_ids = [*connection.savepoint_ids]
        transaction.set_rollback(False, using=connection.alias)
        if self._mark is not None:
            if is_failed(connection):
                connection.savepoint_rollback(self._mark)
            connection.savepoint_commit(self._mark)

    @property
    def _is_outside(self) -> bool:
        return len(self) == self._depth


@contextmanager
def as_without_transaction() -> Iterator[None]:
    """Have a handler run in the transaction of a test as it runs in production: outside of transactions that it does
    not open.

    Should the open transaction be broken at the end all the same, on PostgreSQL, all that the handler did is undone.
    """
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                stack.enter_context(_outside_of_blocks(connection))
        yield


@contextmanager
def _outside_of_blocks(connection: BaseDatabaseWrapper) -> Iterator[None]:
    blocks = connection.savepoint_ids = _Blocks(connection)
    in_place = {"validate_no_broken_transaction": blocks.validate, "close": blocks.close}
    vars(connection).update(in_place)
    connection.execute_wrappers.append(blocks.execute)
    try:
        yield
    finally:
        connection.execute_wrappers.remove(blocks.execute)
        for name in in_place:
            del vars(connection)[name]
        blocks.leave()
