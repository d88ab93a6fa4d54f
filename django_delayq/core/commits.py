"""Calls functions after a commit, in every mode of a connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_delayq")


def on_commit(using: str, function: Callable[..., None], *given: Any) -> None:
    """Call a function when the transaction on ``using`` commits; at once outside of one. Its errors are logged.

    After ``set_autocommit(False)`` a transaction is open at all times, and ``connection.commit()`` ends it. Django
    refuses functions in this mode, or calls them only when autocommit is on again, which may never happen.
    """
    if given:
        function = _with(function, given)
    connection = connections[using]
    if not is_manual(connection):
        transaction.on_commit(function, using=using, robust=True)
        return
    # A rollback empties this list, and so does the end of the connection.
    hooks: list[Any] | None = getattr(connection, "run_on_commit", None)
    if hooks is None:
        # Redis does not learn of these messages now; the sweep finds them.
        return
    vars(function)["delayq_manual"] = True
    hooks.append((set(connection.savepoint_ids), function, True))
    _watch(connection)


def _with(function: Callable[..., None], given: Sequence[Any]) -> Callable[[], None]:
    """Return a function without arguments that calls this one with the given arguments."""

    # A nested function, not a partial: Django 5.2 and 6.0 cannot log the failure of a robust partial.
    @wraps(function)
    def call() -> None:
        function(*given)

    return call


def is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the caller ends transactions by hand, after ``set_autocommit(False)``."""
    if connection.in_atomic_block:
        return not connection.commit_on_exit
    return not connection.get_autocommit()


def _watch(connection: BaseDatabaseWrapper) -> None:
    """Have the next commit by hand followed by the functions that wait for it."""
    if "commit" in vars(connection):
        return

    def commit() -> None:
        type(connection).commit(connection)
        vars(connection).pop("commit", None)
        hooks: list[Any] = connection.run_on_commit
        connection.run_on_commit = [hook for hook in hooks if not hasattr(hook[1], "delayq_manual")]
        for function in [hook[1] for hook in hooks if hasattr(hook[1], "delayq_manual")]:
            try:
                function()
            except Exception:
                logger.exception("A function that follows a commit failed")

    vars(connection)["commit"] = commit
