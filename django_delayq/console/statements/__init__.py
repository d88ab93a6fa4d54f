"""The console's SQL that depends on the database's vendor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from django.db import connections

from ...record.sql.sessions import TooSlow, statement_timeout
from .shapes import DueCount, DueRange, RollupKey, RollupWindow, Scalar, StepCounts, Vacuum

__all__ = ["ConsoleStatements", "TooSlow", "console_statements", "statement_timeout"]


class ConsoleStatements(Protocol):
    """The statements of one database, each in the words of its vendor."""

    def add_to_rollups(self, rows: Mapping[RollupKey, Sequence[int]]) -> None:
        """Add counts, in the order of ``Rollup.COUNTS``, to rollups; insert the rollups that are missing."""

    def sum_rollups(self, windows: Sequence[RollupWindow]) -> Iterator[StepCounts]:
        """Sum the rollups of each window by step and queue, in one statement."""

    def count_due(self, ranges: Sequence[DueRange], cap: int, sample: int) -> Iterator[DueCount]:
        """Count each range up to one more than the cap, with the topics of its first ``sample`` messages.

        Ranges without messages are left out.
        """

    def estimate_due(self, spans: Sequence[tuple[datetime | None, datetime]]) -> Mapping[int, int]:
        """Return the planner's guess of how many rows fall due in each span, by the span's place.

        A span without a guess is missing.
        """

    def payload_has(self, column: str, path: Sequence[str], value: Scalar) -> tuple[str, tuple[object, ...]]:
        """Return a condition, and its parameters: the payload in the column has the value under a path of names."""

    def stored_size(self, column: str) -> str:
        """Return an expression for the size of a column where it is stored, in about bytes."""

    def vacuum(self) -> Vacuum:
        """Return what the vendor knows about dead rows in the message table."""


def console_statements(using: str) -> ConsoleStatements:
    """Return the console's statements for the database behind an alias."""
    if connections[using].vendor == "postgresql":
        from .postgresql_console import PostgreSQLConsole

        return PostgreSQLConsole(using)
    from .portable_console import PortableConsole

    return PortableConsole(using)
