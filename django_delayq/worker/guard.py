"""Guards the transaction and the session of handlers: a handler cannot end its transaction or change later sessions.

The guard sees the statements that go through Django. Statements on the driver's own connection cannot be refused, only
noticed afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from ..sql.sessions import is_in_transaction

# SQL with more characters than this is not cached, and is read in full only when it holds several statements.
LONG = 2000

# Comments and literals, in which no word counts.
_MUTE = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$", re.DOTALL)
# Words that end a transaction. The driver's status shows the end too, but too late: the effects are committed, and the
# next delivery would repeat them. After "COMMIT AND CHAIN" and "COMMIT; BEGIN" even the status is as before.
_ENDS = re.compile(
    r"(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b", re.IGNORECASE
)
# Words whose effect on the session outlives the transaction. No driver shows it: PostgreSQL reports a few parameters to
# its clients, but not the others, and no temporary tables, prepared statements, channels and locks. SQLite reports
# nothing.
_SETS = re.compile(
    r"(?:SET\s+(?!LOCAL\b|TRANSACTION\b|CONSTRAINTS\b)|RESET|DISCARD|DEALLOCATE|LISTEN|LOAD|PRAGMA|ATTACH|DETACH"
    r"|PREPARE\s+(?!TRANSACTION\b)|DECLARE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+|GLOBAL\s+)?TEMP(?:ORARY)?\b)\b",
    re.IGNORECASE,
)
_CALLS = re.compile(r"\b(?:set_config|pg_(?:try_)?advisory_lock(?:_shared)?)\s*\(", re.IGNORECASE)

Execute = Callable[[Any, Any, bool, dict[str, Any]], Any]


class Words(NamedTuple):
    """The side effects that a text of SQL has on its transaction and session."""

    ends_transaction: bool
    changes_session: bool


def read(sql: Any) -> Words:
    """Read the side effects of SQL before it is executed. SQL that is not a str (composed by psycopg) has none."""
    if not isinstance(sql, str):
        return Words(False, False)
    if len(sql) <= LONG:
        return _read_and_remember(sql)
    return _read(sql if ";" in sql else sql[:LONG])


def _read(sql: str) -> Words:
    statements = [statement.lstrip() for statement in _MUTE.sub(" ", sql).split(";")]
    # The body of a routine or trigger has an END of its own.
    defines = statements[0][:6].upper() == "CREATE"
    return Words(
        not defines and any(map(_ENDS.match, statements)),
        any(map(_SETS.match, statements)) or _CALLS.search(sql) is not None,
    )


_read_and_remember = lru_cache(maxsize=512)(_read)


def watch_session(connection: BaseDatabaseWrapper) -> None:
    """Note from now on when a statement changes the session of a connection, so that it is not used again."""
    if not hasattr(connection, "delayq_wrappers"):
        connection.execute_wrappers.append(_note_change)
        vars(connection)["delayq_wrappers"] = list(connection.execute_wrappers)


def remove_foreign_wrappers(connection: BaseDatabaseWrapper) -> None:
    """Take away the execute wrappers that a handler left behind."""
    wrappers = getattr(connection, "delayq_wrappers", None)
    if wrappers is not None and connection.execute_wrappers != wrappers:
        connection.execute_wrappers[:] = wrappers


def _note_change(execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    if read(sql).changes_session:
        context["connection"].delayq_changed = True
    return execute(sql, params, many, context)


def is_changed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a handler may have left settings, locks or the like in the session of a connection."""
    return getattr(connection, "delayq_changed", False)


class HandlersTransaction:
    """Watches the transaction around a transactional handler; a context manager inside that transaction.

    It refuses statements that would end the transaction, and notices by the driver's status, before and after each
    statement, when the handler ended it on the driver's own connection.
    """

    def __init__(self, using: str) -> None:
        self._connection = connections[using]
        self._has_begun = self._has_ended = False
        self._check_status()

    @property
    def has_ended(self) -> bool:
        """True when the handler committed the transaction, or rolled it back, without Django noticing."""
        self._check_status()
        return self._has_ended

    def __enter__(self) -> HandlersTransaction:
        self._connection.execute_wrappers.append(self._guard)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.execute_wrappers.remove(self._guard)

    def _guard(self, execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if read(sql).ends_transaction:
            raise TransactionManagementError(
                "The transaction of a transactional handler is ended by the worker, together with its record."
            )
        self._check_status()
        try:
            return execute(sql, params, many, context)
        finally:
            self._check_status()

    def _check_status(self) -> None:
        is_open = is_in_transaction(self._connection)
        self._has_ended = self._has_ended or (self._has_begun and is_open is False)
        self._has_begun = self._has_begun or is_open is True
