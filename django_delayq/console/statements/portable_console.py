"""The console's statements as SQLite understands them; PostgreSQL shares those that are the same for both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections

from ...record.sql.expressions import QUEUES
from ..console_tuning import tuning
from ..models import Rollup


class PortableConsole:
    """The console's statements in SQL that each database understands."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.connection = connections[using]

    def wait_for_other_starts(self) -> None:
        """Have other transactions wait here until this one ends. On SQLite, a transaction that writes waits anyway."""

    def add_to_rollups(self, rows: Mapping[RollupKey, Counter[str]]) -> None:
        """Add counts, by the names in ``Rollup.COUNTS``, to rollups; insert the rollups that are missing."""
        # All processes use one order, so that no two wait for each other.
        ordered = sorted(rows.items())
        with self.connection.cursor() as cursor:
            for start in range(0, len(ordered), tuning.rollup_batch):
                batch = ordered[start : start + tuning.rollup_batch]
                values: list[Any] = []
                for key, counts in batch:
                    values += [key.seconds, self._moment(key.at), key.queue, key.topic]
                    values += [counts[name] for name in Rollup.COUNTS]
                cursor.execute(_upsert(len(batch)), values)

    def count_due(self, spans: Sequence[tuple[datetime, datetime]], cap: int) -> Iterator[tuple[int, int]]:
        """Count the scheduled messages of each queue that fall due in each span, up to one more than the cap.

        Yields the number of a span and the count of its messages, for each queue that has any.
        """
        # The order of the index makes a walk along it the only plan worth considering.
        sql = f"""
        WITH s(place, start, finish) AS (VALUES {", ".join(["(%s, %s, %s)"] * len(spans))})
        SELECT place, number FROM (
            SELECT r.place, (
                SELECT count(*) FROM (
                    SELECT 1 FROM delayq_message m
                    WHERE m.state = 'scheduled' AND m.queue = r.queue AND m.due_at >= r.start AND m.due_at < r.finish
                    ORDER BY m.due_at, m.id LIMIT {cap + 1}
                ) x
            ) AS number
            FROM (SELECT * FROM ({QUEUES}) q CROSS JOIN s) r
        ) c WHERE number > 0
        """  # noqa: S608
        values = [
            value
            for place, (start, end) in enumerate(spans)
            for value in (place, self._moment(start), self._moment(end))
        ]
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values)
            yield from cursor.fetchall()

    def estimate_due(self, spans: Sequence[tuple[datetime | None, datetime]]) -> Mapping[int, int]:
        """Return the planner's estimate of the rows that fall due in each span, by its number; empty: no estimate."""
        return {}

    def payload_has(self, column: str, path: Sequence[str], value: Scalar) -> tuple[str, tuple[object, ...]]:
        """Return a condition, and its parameters: the payload in the column has the value under a path of names."""
        place = "$" + "".join(f'."{name}"' for name in path)
        if value is None or isinstance(value, bool):
            return f"COALESCE(JSON_TYPE({column}, %s), '') = %s", (place, json.dumps(value))
        types = ("text",) if isinstance(value, str) else ("integer", "real")
        marks = ", ".join(["%s"] * len(types))
        sql = f"(COALESCE(JSON_TYPE({column}, %s), '') IN ({marks}) AND JSON_EXTRACT({column}, %s) = %s)"
        return sql, (place, *types, place, value)

    def stored_size(self, column: str) -> str:
        """Return an expression for the size of a column where it is stored, in about bytes."""
        return f"LENGTH({column})"

    def vacuum(self) -> Vacuum:
        """Return what the database knows about the rows of the table of messages."""
        return Vacuum()

    def _moment(self, moment: datetime) -> Any:
        return self.connection.ops.adapt_datetimefield_value(moment)


def _upsert(rows: int) -> str:
    names = ("seconds", "at", "queue", "topic", *Rollup.COUNTS)
    row = f"({', '.join(['%s'] * len(names))})"
    added = ", ".join(f"{name} = delayq_rollup.{name} + excluded.{name}" for name in Rollup.COUNTS)
    return (
        f"INSERT INTO delayq_rollup ({', '.join(names)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
        f" ON CONFLICT (seconds, at, queue, topic) DO UPDATE SET {added}"
    )


Scalar = str | int | float | bool | None


class RollupKey(NamedTuple):
    """The key of one rollup: begin and length in seconds, queue and topic."""

    at: datetime
    seconds: int
    queue: str
    topic: str


class Vacuum(NamedTuple):
    """The state of the message table's storage: how many dead rows it has, when it was last vacuumed, about how many
    rows it has."""

    dead_rows: int | None = None
    at: datetime | None = None
    rows: int | None = None
