"""Watches what a handler says to its databases: its transaction is not its own to end, its settings end with it.

It sees what goes through Django. What a handler does on the driver's own connection it cannot refuse, only notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

# Longer texts than this are not remembered, and looked at in full only when they hold several statements.
LONG = 2000

# Comments and literals, in which no word counts.
_MUTE = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$", re.DOTALL)
_ENDS = re.compile(
    r"(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b", re.IGNORECASE
)
_SETS = re.compile(
    r"(?:SET\s+(?!LOCAL\b|TRANSACTION\b|CONSTRAINTS\b)|RESET|DISCARD|DEALLOCATE|LISTEN|LOAD|PRAGMA|ATTACH|DETACH"
    r"|PREPARE\s+(?!TRANSACTION\b)|DECLARE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+|GLOBAL\s+)?TEMP(?:ORARY)?\b)\b",
    re.IGNORECASE,
)
_CALLS = re.compile(r"\b(?:set_config|pg_(?:try_)?advisory_lock(?:_shared)?)\s*\(", re.IGNORECASE)

Execute = Callable[[Any, Any, bool, dict[str, Any]], Any]


class Words(NamedTuple):
    """What a text of SQL does beside its work."""

    ends_transaction: bool
    changes_session: bool


def read(sql: Any) -> Words:
    """What a text says; one that is no text (a composed one of psycopg) says nothing."""
    if not isinstance(sql, str):
        return Words(False, False)
    if len(sql) <= LONG:
        return _remembered(sql)
    return _read(sql if ";" in sql else sql[:LONG])


def _read(sql: str) -> Words:
    statements = [statement.lstrip() for statement in _MUTE.sub(" ", sql).split(";")]
    # The body of a routine or trigger has an END of its own.
    defines = statements[0][:6].upper() == "CREATE"
    return Words(
        not defines and any(map(_ENDS.match, statements)),
        any(map(_SETS.match, statements)) or _CALLS.search(sql) is not None,
    )


_remembered = lru_cache(maxsize=512)(_read)


def watch(connection: BaseDatabaseWrapper) -> None:
    """From now on notice what is set in a session of this connection, so that the session is not used again."""
    if not hasattr(connection, "delayq_wrappers"):
        connection.execute_wrappers.append(_note)
        vars(connection)["delayq_wrappers"] = list(connection.execute_wrappers)


def unwrap(connection: BaseDatabaseWrapper) -> None:
    """Take away the wrappers that a handler left behind."""
    wrappers = getattr(connection, "delayq_wrappers", None)
    if wrappers is not None and connection.execute_wrappers != wrappers:
        connection.execute_wrappers[:] = wrappers


def _note(execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    if read(sql).changes_session:
        context["connection"].delayq_changed = True
    return execute(sql, params, many, context)


def is_changed(connection: BaseDatabaseWrapper) -> bool:
    """Whether a handler may have left settings, locks or the like in this session."""
    return getattr(connection, "delayq_changed", False)


class HandlersTransaction:
    """The transaction around a transactional handler. Used inside of it."""

    def __init__(self, using: str) -> None:
        self._connection = connections[using]
        self._begun = self._ended = False
        self._look()

    @property
    def ended(self) -> bool:
        """Whether somebody committed or rolled it back behind Django's back."""
        self._look()
        return self._ended

    def __enter__(self) -> HandlersTransaction:
        self._connection.execute_wrappers.append(self._watch)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.execute_wrappers.remove(self._watch)

    def _watch(self, execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if read(sql).ends_transaction:
            raise TransactionManagementError(
                "The transaction of a transactional handler is ended by the worker, together with its record."
            )
        self._look()
        try:
            return execute(sql, params, many, context)
        finally:
            self._look()

    def _look(self) -> None:
        is_open = _is_open(self._connection)
        self._ended = self._ended or (self._begun and is_open is False)
        self._begun = self._begun or is_open is True


def _is_open(connection: BaseDatabaseWrapper) -> bool | None:
    """Whether a transaction is open in the driver's eyes, which cost no round trip; None: there is no telling."""
    raw = connection.connection
    if raw is None:
        return None
    if connection.vendor == "postgresql":
        # 0 is "idle", 4 is "unknown": the connection is broken. The first statement begins the transaction.
        status = raw.info.transaction_status
        return None if status == 4 else status != 0
    if connection.vendor == "sqlite":
        try:
            return bool(raw.in_transaction)
        except Exception:  # noqa: BLE001
            return None
    return None
