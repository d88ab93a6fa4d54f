"""Expressions for querysets that Django has no words for, or no fast ones."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import Any

from django.db import connections
from django.db.models import BigIntegerField, BooleanField, DateTimeField, F, Func, QuerySet, Value

from ..clock import to_us
from ..models import Message


class After(Func):
    """``(due_at, id) > (…, …)``: a comparison of rows, which an index answers even where many have one due time."""

    output_field = BooleanField()

    def __init__(self, due: datetime, pk: int) -> None:
        super().__init__(F("due_at"), F("id"), Value(due, output_field=DateTimeField()), Value(pk))

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        parts = [compiler.compile(part) for part in self.get_source_expressions()]
        sql = "({}, {}) > ({}, {})".format(*(part for part, _parameters in parts))
        return sql, [value for _part, parameters in parts for value in parameters]


class _Microseconds(Func):
    """Since 1970, as a whole number."""

    output_field = BigIntegerField()
    template = "(extract(epoch FROM %(expressions)s) * 1000000)::bigint"


def places(using: str, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
    """Id, due time (microseconds since 1970) and priority of rows.

    From PostgreSQL just as its driver reads them: Django's time for each row, and that for times, are saved.
    """
    if connections[using].vendor != "postgresql":
        return ((pk, to_us(due), priority) for pk, due, priority in rows.values_list("id", "due_at", "priority"))
    compiler = rows.values_list("id", _Microseconds("due_at"), "priority").query.get_compiler(using)
    found: Iterable[tuple[int, int, int]] = chain.from_iterable(compiler.execute_sql())
    return found
