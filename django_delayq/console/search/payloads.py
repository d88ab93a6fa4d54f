"""Expressions for querysets that look into payloads."""

from __future__ import annotations

from typing import Any

from django.db.models import BooleanField, Case, F, Func, IntegerField, JSONField, When
from django.db.models.lookups import LessThanOrEqual

from ..statements import console_statements
from ..statements.shapes import Scalar


class PayloadHas(Func):
    """True when the payload has ``value`` under a path of names."""

    output_field = BooleanField()

    def __init__(self, path: tuple[str, ...], value: Scalar) -> None:
        super().__init__(F("payload"))
        self.path = path
        self.value = value

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:  # type: ignore[override]
        column, _none = compiler.compile(self.get_source_expressions()[0])
        return console_statements(connection.alias).payload_has(column, self.path, self.value)


class StoredSize(Func):
    """The size of a column where it is stored, in about bytes."""

    output_field = IntegerField()

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:  # type: ignore[override]
        column, parameters = compiler.compile(self.get_source_expressions()[0])
        return console_statements(connection.alias).stored_size(column), parameters


def small(size: int) -> Case:
    """Return an expression for the payload that is NULL when the payload is larger than ``size`` bytes."""
    return Case(When(LessThanOrEqual(StoredSize(F("payload")), size), then=F("payload")), output_field=JSONField())
