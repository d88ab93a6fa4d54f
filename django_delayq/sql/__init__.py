"""Everything that depends on the database's vendor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Protocol

from django.db import connections

from .rows import Claimed, Failure, Holding, Inserted, Moved, NewMessage, Success, Ticket


class Statements(Protocol):
    """The hot moves. Each is atomic, and writes the log rows with the moves."""

    def now(self) -> datetime: ...
    def insert(self, new: NewMessage, actor: str) -> Inserted | None: ...
    def insert_many(self, new: Sequence[NewMessage], actor: str) -> list[Inserted]: ...
    def queues(self) -> list[str]: ...
    def until_due(self, queue: str, topics: Iterable[str]) -> float | None: ...
    def anything_overdue(self) -> tuple[bool, bool]: ...
    def due(self, queue: str, topics: Iterable[str], limit: int) -> list[Ticket]: ...
    def claim(self, tickets: Sequence[Ticket], leases: dict[str, float], worker: str) -> list[Claimed]: ...
    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]: ...
    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]: ...
    def extend(self, holdings: Sequence[Holding], *, wait: bool) -> dict[int, bool]: ...
    def settled(self, seconds: float) -> bool: ...


def statements(using: str) -> Statements:
    """The statements for the database behind an alias. A new vendor needs nothing more than ``Portable``."""
    # Imported here: psycopg is needed only where the database is PostgreSQL.
    if connections[using].vendor == "postgresql":
        from .postgresql import PostgreSQL

        return PostgreSQL(using)
    from .portable import Portable

    return Portable(using)
