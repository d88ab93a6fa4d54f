"""The console's statements on PostgreSQL, where they differ from the portable ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ...record.sql.limited import LOCKS, STRIPES
from ...record.sql.sessions import own_transaction
from .portable_console import PortableConsole, Scalar, Vacuum


class PostgreSQLConsole(PortableConsole):
    """Statements that only PostgreSQL has: estimates of the planner, containment in JSON."""

    def wait_for_other_starts(self) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [LOCKS, STRIPES])

    def estimate_due(self, spans: Sequence[tuple[datetime | None, datetime]]) -> Mapping[int, int]:
        """Ask for the due time alone.

        The planner assumes that state and due time are independent. They are not: most finished rows were due in the
        past, and most rows with a future due time are scheduled. So no span may begin before now.
        """
        if not spans:
            return {}
        part = "SELECT {} FROM delayq_message WHERE due_at >= %s AND due_at < %s"
        union = " UNION ALL ".join(part.format(place) for place in range(len(spans)))
        values = [moment for span in spans for moment in span]
        with own_transaction(self.using), self.connection.cursor() as cursor:
            # A parallel plan would say how many rows each worker reads.
            cursor.execute("SELECT set_config('max_parallel_workers_per_gather', '0', true)")
            cursor.execute(f"EXPLAIN (VERBOSE, FORMAT JSON) {union}", values)
            plan = cursor.fetchone()[0]
        found = json.loads(plan) if isinstance(plan, str) else plan
        scans = (node for node in _nodes(found[0]["Plan"]) if "Relation Name" in node)
        return {int(scan["Output"][0]): scan["Plan Rows"] for scan in scans}

    def payload_has(self, column: str, path: Sequence[str], value: Scalar) -> tuple[str, tuple[object, ...]]:
        """Return a containment, which a GIN index can answer."""
        contained: Any = value
        for name in reversed(path):
            contained = {name: contained}
        return f"{column} @> %s::jsonb", (json.dumps(contained),)

    def stored_size(self, column: str) -> str:
        """Return the size in the table, which is known without reading the value."""
        return f"pg_column_size({column})"

    def vacuum(self) -> Vacuum:
        with self.connection.cursor() as cursor:
            cursor.execute(
                # -1 tuples: never analysed.
                "SELECT n_dead_tup, greatest(last_vacuum, last_autovacuum), nullif(reltuples, -1)::bigint"
                " FROM pg_stat_user_tables JOIN pg_class c ON c.oid = relid WHERE relid = 'delayq_message'::regclass"
            )
            return Vacuum(*(cursor.fetchone() or ()))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
