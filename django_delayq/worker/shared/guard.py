"""Reads what a handler sends through Django's cursors: the end of its transaction and its session are the worker's.

It reads before a statement is sent: after a COMMIT the effects of a handler that fails would stay. And no driver tells
that a session was changed. What is sent on the driver's own connection or cursor is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

# SQL with more characters than this is not cached, and is read in full only when it holds several statements.
LONG = 2000

# Comments, literals and quoted names, in which no word counts.
_MUTE = re.compile(
    r"""--[^\n]*|/\*.*?\*/|\bE'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$""",
    re.DOTALL | re.IGNORECASE,
)
# The body of a routine or a trigger, which has an END of its own.
_BODY = re.compile(r"(\bCREATE\b[^;]*?)\bBEGIN\b.*?;\s*END\b", re.DOTALL | re.IGNORECASE)
_ENDS_TRANSACTION = re.compile(
    r"(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b", re.IGNORECASE
)
# What a DO block does is in a literal: it may be anything.
_CHANGES_SESSION = re.compile(
    r"(?:SET(?!\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\b)|RESET|DISCARD|DEALLOCATE|LISTEN|LOAD|PRAGMA|ATTACH|DETACH|DO"
    r"|PREPARE(?!\s+TRANSACTION\b)|DECLARE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:LOCAL\s+|GLOBAL\s+)?TEMP(?:ORARY)?)\b",
    re.IGNORECASE,
)
# The same within a statement.
_CHANGES_WITHIN = re.compile(
    r"\b(?:set_config\s*\((?![^()]*,\s*true\s*\))|pg_(?:try_)?advisory_lock(?:_shared)?\s*\("
    r"|INTO\s+TEMP(?:ORARY)?\s+\w|pg_temp\s*\.)",
    re.IGNORECASE,
)


class Words(NamedTuple):
    """The side effects that a text of SQL has on its transaction and session."""

    ends_transaction: bool
    changes_session: bool


def read(sql: Any, connection: BaseDatabaseWrapper) -> Words:
    """Read the side effects of a statement, in any form that the driver takes, before it is sent."""
    if isinstance(sql, bytes):
        sql = sql.decode(errors="replace")
    elif hasattr(sql, "as_string"):
        with connection.wrap_database_errors:
            sql = sql.as_string(connection.connection)
    if not isinstance(sql, str):
        # A form that is not known yet.
        return Words(False, True)
    if len(sql) <= LONG:
        return _read_and_remember(sql)
    return _read(sql if ";" in sql else sql[:LONG])


def _read(sql: str) -> Words:
    """Return what the statements of an SQL text begin, end or change, as far as it matters here."""
    text = _BODY.sub(r"\1", _MUTE.sub(" ", sql))
    statements = [statement.lstrip() for statement in text.split(";")]
    return Words(
        any(map(_ENDS_TRANSACTION.match, statements)),
        any(map(_CHANGES_SESSION.match, statements)) or _CHANGES_WITHIN.search(text) is not None,
    )


_read_and_remember = lru_cache(maxsize=512)(_read)

Execute = Callable[[Any, Any, bool, dict[str, Any]], Any]


def note_change(execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Note on the connection when a statement changes its session. An execute wrapper of Django."""
    connection = context["connection"]
    if read(sql, connection).changes_session:
        connection.delayq_changed = True
    return execute(sql, params, many, context)


def refuse_end(execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Refuse a statement that would end the transaction of a transactional handler. An execute wrapper of Django."""
    if read(sql, context["connection"]).ends_transaction:
        raise TransactionManagementError(
            "The transaction of a transactional handler is ended by the worker, together with its record."
        )
    return execute(sql, params, many, context)
