"""The console's SQL that depends on the database's vendor."""

from __future__ import annotations

from django.db import connections

from ...record.sql.sessions import TooSlow, statement_timeout
from .portable_console import PortableConsole
from .postgresql_console import PostgreSQLConsole

__all__ = ["TooSlow", "console_statements", "statement_timeout"]


def console_statements(using: str) -> PortableConsole:
    """Return the console's statements for the database behind an alias."""
    return (PostgreSQLConsole if connections[using].vendor == "postgresql" else PortableConsole)(using)
