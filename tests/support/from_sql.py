"""The functions by which other programs schedule and cancel in SQL."""

from __future__ import annotations

from typing import Any

from django.db import connections
from psycopg.types.json import Jsonb


def schedule(topic: str | None, payload: Any = None, *, using: str = "default", **options: Any) -> int:
    """Call ``delayq_schedule`` with these arguments, and return the id."""
    given = {"topic": topic, **options} if payload is None else {"topic": topic, "payload": payload, **options}
    values: list[Any] = [
        Jsonb(given[name]) if name in ("payload", "headers", "retry") else given[name] for name in given
    ]
    named = ", ".join(f'"{name}" => %s' for name in given)
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT delayq_schedule({named})", values)
        return int(cursor.fetchone()[0])


def cancel(id_: int | None = None, *, using: str = "default", **options: Any) -> str:
    """Call ``delayq_cancel``, and return its answer."""
    given = options if id_ is None else {"id": id_, **options}
    named = ", ".join(f"{name} => %s" for name in given)
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT delayq_cancel({named})", list(given.values()))
        return str(cursor.fetchone()[0])
