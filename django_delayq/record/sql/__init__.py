"""Everything that depends on the database's vendor. Other modules ask ``statements`` and never for the vendor."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

if TYPE_CHECKING:
    from .limited import PortableLimits
    from .portable import Portable


# The vendors that can keep messages. Others have no unique index over some of the rows: two live messages could have
# one key. The migration has the same list.
VENDORS = ("postgresql", "sqlite")


def unsupported(using: str) -> str | None:
    """Return why a database cannot keep messages; None when it can. Needs no connection."""
    connection = connections[using]
    if connection.vendor in VENDORS:
        return None
    return (
        f"django-delayq keeps messages in PostgreSQL or SQLite, and the database {using!r} is"
        f" {connection.display_name}: give the app delayq a database of its own with a database router."
    )


def commits_nothing(using: str) -> str | None:
    """Return why workers and commands would commit nothing to a database; None when they would. Needs no connection.

    Calls in the project's own processes are committed by the project.
    """
    if connections[using].settings_dict["AUTOCOMMIT"]:
        return None
    return (
        f"DATABASES[{using!r}]['AUTOCOMMIT'] is False, and nothing that workers and commands of django-delayq write"
        " would be committed: set it to True in the settings that these run with."
    )


def is_in_memory(using: str) -> bool:
    """Return whether a database is one of SQLite in the memory of this process. Needs no connection."""
    connection = connections[using]
    name = str(connection.settings_dict["NAME"])
    return connection.vendor == "sqlite" and (":memory:" in name or "mode=memory" in name)


@cache
def statements(using: str) -> Portable:
    """Return the statements for the database behind an alias.

    Raises ``ImproperlyConfigured`` for a vendor that cannot keep messages. A new vendor needs a place in ``VENDORS``,
    and an answer wherever this package asks for the vendor: about sessions, the clock, write locks and the log.
    """
    reason = unsupported(using)
    if reason is not None:
        raise ImproperlyConfigured(reason)
    # Imported here: psycopg is needed only where the database is PostgreSQL.
    if connections[using].vendor == "postgresql":
        from .postgresql import PostgreSQL

        return PostgreSQL(using)
    from .portable import Portable

    return Portable(using)


@cache
def limit_statements(using: str) -> PortableLimits:
    """Return the statements of limits for the database behind an alias."""
    if connections[using].vendor == "postgresql":
        from .postgresql_limited import PostgreSQLLimits

        return PostgreSQLLimits(using)
    from .limited import PortableLimits

    return PortableLimits(using)


def vendor_name(using: str) -> str:
    """Return Django's name for the vendor of a database, for people to read."""
    return connections[using].vendor


def keeps_ambiguous_times(using: str) -> bool:
    """Tell whether a database keeps local times without their offset from UTC, in a zone whose clocks are changed."""
    connection = connections[using]
    if connection.features.supports_timezones or connection.timezone is None:
        return False
    return any(datetime(2026, month, 1, tzinfo=connection.timezone).utcoffset() for month in (1, 7))


def has_one_writer(using: str) -> bool:
    """Tell whether only one transaction can write at a time, so that more worker processes gain nothing."""
    return connections[using].vendor == "sqlite"
