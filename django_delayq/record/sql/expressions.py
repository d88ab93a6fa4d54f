"""Expressions for querysets that Django lacks, or has only in a slower form, and SQL that all vendors share."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import cache
from typing import Any

from django.db.models import BigIntegerField, BooleanField, DateTimeField, F, Func, Q, Value

from ...models import Message
from .rows import Reference

# The queues that hold scheduled messages: one search in the index for each, where DISTINCT would read every row.
QUEUES = """
    WITH RECURSIVE q(queue) AS (
        SELECT (SELECT queue FROM delayq_message WHERE state = 'scheduled' ORDER BY queue LIMIT 1)
        UNION ALL
        SELECT (SELECT m.queue FROM delayq_message m
                 WHERE m.state = 'scheduled' AND m.queue > q.queue ORDER BY m.queue LIMIT 1)
          FROM q WHERE q.queue IS NOT NULL
    )
    SELECT queue FROM q WHERE queue IS NOT NULL
    """

# The name under which limits of its topic count a message ``m``: see ``core/limits.py``.
OF_TOPIC = "'topic ' || m.topic || coalesce(' key ' || m.limit_key, '')"
# The name of a topic that may not begin with any key: see ``limits.any_key``.
ANY_KEY = "'topic ' || m.topic || ' *'"


def is_open(names: str) -> str:
    """Return the condition that a message ``m`` stands under none of the limits whose names this subquery selects."""
    return f"{OF_TOPIC} NOT IN ({names}) AND 'queue ' || m.queue NOT IN ({names})"


@cache
def text_of(condition: Q, using: str) -> str:
    """Return a condition on columns and states of a message as SQL without parameters, for statements in SQL."""
    rows = Message._base_manager.using(using).filter(condition).values("pk")
    sql, states = rows.query.get_compiler(using).as_sql()
    where: str = sql.partition(" WHERE ")[2] % tuple([f"'{state}'" for state in states])
    # ON CONFLICT takes no table's name before a column's.
    return "(" + where.replace(f'"{Message._meta.db_table}".', "") + ")"


def _compiled(expression: Func, compiler: Any, sql: str) -> tuple[str, list[Any]]:
    """Return SQL with the parts of an expression in its places, and their parameters."""
    parts = [compiler.compile(part) for part in expression.get_source_expressions()]
    return sql.format(*(part for part, _parameters in parts)), [value for _part, some in parts for value in some]


class After(Func):
    """``(due_at, id) > (…, …)``: a comparison of rows, which an index answers even where many have one due time."""

    output_field = BooleanField()
    operator = ">"

    def __init__(self, due: datetime, pk: int) -> None:
        super().__init__(F("due_at"), F("id"), Value(due, output_field=DateTimeField()), Value(pk))

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return _compiled(self, compiler, f"({{}}, {{}}) {self.operator} ({{}}, {{}})")


class UpTo(After):
    """``(due_at, id) <= (…, …)``."""

    operator = "<="


class Microseconds(Func):
    """The time since 1970 in microseconds, as a whole number (PostgreSQL)."""

    output_field = BigIntegerField()
    template = "(extract(epoch FROM %(expressions)s) * 1000000)::bigint"


class ReferredTo(Func):
    """Whether a row of another table refers to the message by this foreign key."""

    output_field = BooleanField()
    template = "EXISTS (SELECT 1 FROM {} r WHERE r.{} = {})"

    def __init__(self, reference: Reference) -> None:
        super().__init__(F("pk"))
        self._reference = reference

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        # The names are quoted. A percent sign would stand for a parameter.
        table, column = (name.replace("%", "%%") for name in self._reference)
        message, parameters = compiler.compile(self.get_source_expressions()[0])
        return self.template.format(table, column, message), parameters


class UnderLimits(Func):
    """Whether a message stands under one of these limits, whose names ``core/limits.py`` makes."""

    output_field = BooleanField()

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(F("topic"), F("limit_key"), F("queue"))
        self._names = tuple(names)

    def names(self, using: str) -> Collection[str]:
        """Return the names of the limits. A subclass may ask the database ``using`` for them."""
        return self._names

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        names = [*self.names(connection.alias)]
        if not names:
            return "(1 = 0)", []
        topic, key, queue = (compiler.compile(part)[0] for part in self.get_source_expressions())
        marks = ", ".join(["%s"] * len(names))
        of_topic = f"'topic ' || {topic} || coalesce(' key ' || {key}, '') IN ({marks})"
        any_key = f"'topic ' || {topic} || ' *' IN ({marks})"
        return f"({of_topic} OR {any_key} OR 'queue ' || {queue} IN ({marks}))", names * 3


class HasKey(Func):
    """Whether a message has one of these keys. To PostgreSQL they travel as one array: as a parameter each, a thousand
    keys take longer than their query.
    """

    output_field = BooleanField()

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(F("key"))
        self._keys = [*keys]

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return _compiled(self, compiler, f"({{}} IN ({', '.join(['%s'] * len(self._keys))}))")[0], self._keys

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:
        return _compiled(self, compiler, "({} = ANY(%s::text[]))")[0], [self._keys]


class HoldsKeyAt(Func):
    """``finished_at`` plus the seconds in ``key_for`` > a moment: then a finished message still holds its key."""

    output_field = BooleanField()

    def __init__(self, at: datetime) -> None:
        super().__init__(F("finished_at"), F("key_for"), Value(at, output_field=DateTimeField()))

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return _compiled(self, compiler, "({} + {} * interval '1 second' > {})")

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return _compiled(self, compiler, "(julianday({}) + {} / 86400.0 > julianday({}))")
