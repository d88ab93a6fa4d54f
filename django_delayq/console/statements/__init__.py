"""The console's SQL that depends on the database's vendor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from django.db import connections

from ...record.sql.sessions import TooSlow, statement_timeout
from .portable_console import PortableConsole
from .postgresql_console import PostgreSQLConsole

__all__ = ["TooSlow", "console_statements", "in_time", "statement_timeout"]

T = TypeVar("T")
Given = TypeVarTuple("Given")


def console_statements(using: str) -> PortableConsole:
    """Return the console's statements for the database behind an alias."""
    return (PostgreSQLConsole if connections[using].vendor == "postgresql" else PortableConsole)(using)


def in_time(using: str, milliseconds: int, read: Callable[[*Given], T], *given: *Given) -> T | None:
    """Return what ``read(*given)`` returns; None when one of its statements takes longer than ``milliseconds``."""
    try:
        with statement_timeout(using, milliseconds):
            return read(*given)
    except TooSlow:
        return None
