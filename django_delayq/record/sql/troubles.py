"""Tells what an error of the database means, in words for people."""

from __future__ import annotations

from enum import StrEnum

from django.db import InterfaceError, OperationalError


class Trouble(StrEnum):
    """What an error of the database means."""

    AWAY = "The database does not answer"
    OUTDATED = "The tables are missing or out of date: run migrate"
    FORBIDDEN = "The user of the database lacks a right: grant it"
    READ_ONLY = "The database takes no writes"
    REFUSED = "The database refused a statement"


# PostgreSQL's codes, or how they begin.
_CODES = {
    # Class 08 is about connections, 57P about servers that end or start, 53300 is too many connections.
    Trouble.AWAY: ("08", "57P", "53300"),
    # A table, a column, a schema or a function that is missing.
    Trouble.OUTDATED: ("42P01", "42703", "3F000", "42883"),
    # A right that the user of the database lacks.
    Trouble.FORBIDDEN: ("42501",),
    # A standby, or default_transaction_read_only.
    Trouble.READ_ONLY: ("25006",),
}
# SQLite has words only.
_MISSING_IN_SQLITE = ("no such table", "no such column", "has no column")


def trouble(error: BaseException) -> Trouble:
    """Return what an error of Django's database layer means."""
    code = getattr(error.__cause__, "sqlstate", None) or getattr(error, "sqlstate", None)
    if code is not None:
        return next((found for found, prefixes in _CODES.items() if code.startswith(prefixes)), Trouble.REFUSED)
    if any(words in str(error) for words in _MISSING_IN_SQLITE):
        return Trouble.OUTDATED
    if "readonly database" in str(error):
        return Trouble.READ_ONLY
    if hasattr(error.__cause__, "sqlite_errorcode"):
        return Trouble.REFUSED
    # A driver that finds no server, or loses it, has no code.
    return Trouble.AWAY if isinstance(error, OperationalError | InterfaceError) else Trouble.REFUSED


def in_words(error: BaseException) -> str:
    """Return a sentence about an error of the database, with the error itself."""
    return f"{trouble(error)}: {str(error).strip() or type(error).__name__}"
