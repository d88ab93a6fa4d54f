"""Asks the database driver about a session, by vendor. None of these functions costs a round trip."""

from __future__ import annotations

import contextlib
import select

from django.db.backends.base.base import BaseDatabaseWrapper

# Values of psycopg's transaction_status: no transaction is open; the connection is broken.
IDLE, UNKNOWN = 0, 4


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool | None:
    """Return whether the driver has a transaction open; None when that cannot be told."""
    raw = connection.connection
    if raw is None:
        return None
    if connection.vendor == "postgresql":
        # The first statement begins the transaction.
        status = raw.info.transaction_status
        return None if status == UNKNOWN else status != IDLE
    if connection.vendor == "sqlite":
        with contextlib.suppress(Exception):
            return bool(raw.in_transaction)
    return None


def has_news(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server has sent something unasked: mostly, that it closed the connection."""
    if connection.vendor != "postgresql" or not hasattr(select, "poll"):
        return False
    raw = connection.connection
    if raw.closed:
        return True
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_clean(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an open connection works as far as the driver knows, with no transaction begun by hand."""
    raw = connection.connection
    if connection.vendor == "postgresql":
        return not raw.closed and raw.info.transaction_status == IDLE and bool(raw.autocommit)
    if connection.vendor == "sqlite":
        # For a closed connection the driver only raises an error.
        with contextlib.suppress(Exception):
            return not raw.in_transaction
        return False
    return bool(connection.get_autocommit())
