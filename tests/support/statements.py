"""Counts the statements that the database gets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from django.db import connection
from django.test.utils import CaptureQueriesContext


def count_statements(run: Callable[[], object]) -> int:
    """Return how many statements a call sends, also those that PostgreSQL gets without a cursor of Django."""
    connection.ensure_connection()
    if connection.vendor != "postgresql":
        with CaptureQueriesContext(connection) as captured:
            run()
        return len(captured)
    with tempfile.TemporaryFile() as trace:
        connection.connection.pgconn.trace(trace.fileno())
        try:
            run()
        finally:
            connection.connection.pgconn.untrace()
        trace.seek(0)
        return sum(b"\tF\t" in line and line.split(b"\t")[3] in {b"Query", b"Execute"} for line in trace)
