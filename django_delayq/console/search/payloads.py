"""Looking into payloads by query."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import BooleanField, Case, F, Func, IntegerField, JSONField, When
from django.db.models.lookups import LessThanOrEqual

Scalar = str | int | float | bool | None

_TYPES: dict[type, tuple[str, ...]] = {
    str: ("text",),
    int: ("integer", "real"),
    float: ("integer", "real"),
}


class PayloadHas(Func):
    """Whether the payload has ``value`` under a path of names: containment, so that a GIN index can answer it."""

    output_field = BooleanField()

    def __init__(self, path: tuple[str, ...], value: Scalar) -> None:
        super().__init__(F("payload"))
        self.path = path
        self.value = value

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, tuple[Any, ...]]:  # type: ignore[override]
        column, _none = compiler.compile(self.get_source_expressions()[0])
        if connection.vendor == "postgresql":
            contained: Any = self.value
            for name in reversed(self.path):
                contained = {name: contained}
            return f"{column} @> %s::jsonb", (json.dumps(contained),)
        path = "$" + "".join(f'."{name}"' for name in self.path)
        if self.value is None or isinstance(self.value, bool):
            return f"COALESCE(JSON_TYPE({column}, %s), '') = %s", (path, json.dumps(self.value))
        types = _TYPES[type(self.value)]
        marks = ", ".join(["%s"] * len(types))
        sql = f"(COALESCE(JSON_TYPE({column}, %s), '') IN ({marks}) AND JSON_EXTRACT({column}, %s) = %s)"
        return sql, (path, *types, path, self.value)


class StoredSize(Func):
    """How large a column is where it is stored, in about bytes; it need not be read for that."""

    function = "LENGTH"
    output_field = IntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, function="pg_column_size", **extra)


def small(size: int) -> Case:
    """The payload, if it is no larger than that; else NULL."""
    return Case(When(LessThanOrEqual(StoredSize(F("payload")), size), then=F("payload")), output_field=JSONField())
