"""Has statements fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import OperationalError, connection


@contextmanager
def broken(text: str) -> Iterator[None]:
    """Have the statements that Django runs with this text in them fail as when the connection breaks."""

    def execute(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if text in sql:
            raise OperationalError("the connection is broken")
        return run(sql, params, many, context)

    with connection.execute_wrapper(execute):
        yield


@contextmanager
def no_claims_of(queue: str) -> Iterator[None]:
    """Have the database refuse claims of the messages of a queue."""
    refuse = f"ALTER TABLE delayq_message ADD CONSTRAINT no_claims CHECK (queue <> '{queue}' OR state <> 'running')"
    allow = "ALTER TABLE delayq_message DROP CONSTRAINT no_claims"
    if connection.vendor == "sqlite":
        refuse = (
            f"CREATE TRIGGER no_claims BEFORE UPDATE ON delayq_message WHEN NEW.queue = '{queue}' "
            "BEGIN SELECT RAISE(ABORT, 'no claims'); END"
        )
        allow = "DROP TRIGGER no_claims"
    with connection.cursor() as cursor:
        cursor.execute(refuse)
        try:
            yield
        finally:
            cursor.execute(allow)
