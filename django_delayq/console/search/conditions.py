"""Conditions on messages in the words that the indexes know, and conditions on the contents of payloads."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import BooleanField, Case, F, Func, IntegerField, JSONField, Q, When
from django.db.models.lookups import LessThanOrEqual

from ...core import bounds, limits
from ...core.states import FINAL, State
from ...models.queue import in_paused_queue
from ...project import pulled
from ...record import admission
from ...record.sql.expressions import UnderLimits
from ..id_lists import unpacked
from ..models import Operation
from ..statements import console_statements
from ..statements.portable_console import Scalar

ALL_STATES = frozenset(State)
SCHEDULED = frozenset({State.SCHEDULED})
NOTHING = Q(pk__in=[])


class _WaitsForLimit(UnderLimits):
    """True when a message is under a limit that is full as the first statement is made: one of this name, or any.

    ``other``: under a full limit of a topic that has another name. A message waits for the limit of its topic first,
    and else for that of its queue.
    """

    def __init__(self, name: str, *, whole: bool, other: bool = False) -> None:
        super().__init__(())
        self._name, self._whole, self._other = name, whole, other
        # The names by database. A statement has a copy of this expression for each queue, and all copies share this
        # dict.
        self._found: dict[str, list[str]] = {}

    def names(self, using: str) -> Collection[str]:
        """Return the names of the full limits."""
        if using not in self._found:
            self._found[using] = [
                each
                for each in admission.full_lately(using)
                if (each == self._name if self._whole else each.startswith(self._name)) != self._other
                and (not self._other or limits.parts(each)[0] == "topic")
            ]
        return self._found[using]


def limited(now: datetime, name: str = "", *, whole: bool = False) -> Q:
    """Return the condition that a scheduled message waits for a limit, whose name is ``name`` or begins with it."""
    waits = Q(_WaitsForLimit(name, whole=whole), due_at__lte=now) & ~pulled.rows()
    return waits & ~Q(_WaitsForLimit(name, whole=whole, other=True)) if name else waits


def parts(now: datetime) -> dict[str, Q]:
    """Return the conditions of the parts of the scheduled messages that searches and tabs name."""
    is_limited = limited(now)
    is_late = Q(due_at__lt=now - bounds.OVERDUE_AFTER) & ~Q(_WaitsForLimit("", whole=False)) & ~pulled.rows()
    return {
        "overdue": is_late & ~in_paused_queue(),
        "paused": Q(due_at__lte=now) & in_paused_queue() & ~is_limited,
        "limited": is_limited,
        "retrying": Q(attempts__gt=0),
    }


def of_states(states: frozenset[State]) -> Q:
    """Return a condition on the states in the words that the partial indexes know."""
    if states >= ALL_STATES:
        return Q()
    if not states:
        return NOTHING
    # An OR, not an IN: each side has a partial index.
    chosen = reduce(or_, (Q(state=state) for state in State if state in states))
    if states <= FINAL:
        finished = Q(finished_at__isnull=False)
        return finished if states == FINAL else finished & chosen
    return chosen


class OfOperation(Func):
    """True for the messages that an operation was to change; for none, when there is no such operation."""

    output_field = BooleanField()

    def __init__(self, number: int) -> None:
        super().__init__(F("pk"))
        self._number = number

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:  # type: ignore[override]
        rows = Operation.objects.using(connection.alias).filter(pk=self._number)
        ids = unpacked((rows.values_list("scope", flat=True).first() or {}).get("ids", ""))
        column, _none = compiler.compile(self.get_source_expressions()[0])
        # Whole numbers need no parameters, of which SQLite takes some thousand.
        return f"({column} IN ({', '.join(map(str, ids)) or 'NULL'}))", []


class JsonHas(Func):
    """True when a column of JSON, such as the payload, has ``value`` under a path of names."""

    output_field = BooleanField()

    def __init__(self, column: str, path: tuple[str, ...], value: Scalar) -> None:
        super().__init__(F(column))
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
