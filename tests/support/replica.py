"""A database alias that only reads, and the router of a project that reads from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

REPLICA = "replica"


class Router:
    """Reads from the replica, and writes to the database behind it."""

    def db_for_read(self, model: type[Any], **hints: Any) -> str:
        return REPLICA

    def db_for_write(self, model: type[Any], **hints: Any) -> str | None:
        return "default"


class InstanceRouter(Router):
    """Writes what was read from the replica to the database behind it, and leaves the rest to Django."""

    def db_for_write(self, model: type[Any], **hints: Any) -> str | None:
        instance = hints.get("instance")
        return "default" if instance is not None and instance._state.db == REPLICA else None


@contextmanager
def replica() -> Iterator[None]:
    """Add an alias for the default database on which each write is refused."""
    settings = copy.deepcopy(connections.settings["default"])
    if settings["ENGINE"].endswith("sqlite3"):
        settings["NAME"] = f"file:{settings['NAME']}?mode=ro"
    else:
        settings["OPTIONS"]["options"] = "-c default_transaction_read_only=on"
    # Nothing is to be emptied after a test.
    settings["TEST"]["MIRROR"] = "default"
    connections.settings[REPLICA] = settings
    try:
        yield
    finally:
        connections[REPLICA].close()
        del connections[REPLICA]
        del connections.settings[REPLICA]
