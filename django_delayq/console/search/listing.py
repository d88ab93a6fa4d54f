"""A page of what a search finds, and how much there is of it, in times that do not grow with the table.

Rows are read along an index in the order they are shown in. The live ones of all queues have no index of their own:
they are merged from the heads of the queues. Counts look at the first rows of each index only. Whatever has no index
is ended by the database after a time: ``TooSlow``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

from django.db import connections
from django.db.models import Count, OrderBy, Q, QuerySet
from django.db.models.functions import Coalesce

from ... import conf, transitions
from ...inspector.numbers import Capped
from ...models import Message
from ...states import FINAL, LIVE, REQUEUEABLE, State
from ..statements.timeout import TooSlow, statement_timeout
from .language import Search, of_states

# Rows that are counted at most.
CAP = 10_000
# Rows of each index that are looked at for the numbers beside a page: each may cost a read of the table.
LOOK = 2_000
# Rows of each index that are looked at in place of all of them, when that would take too long.
NEAREST = 5_000
# How long the database may think about the rows of a page, and about the numbers beside it. Milliseconds.
PATIENCE = 500
PATIENCE_FOR_COUNTS = 150

_SOONEST = ("due_at", "id")
_LAST = ("-finished_at", "-id")


@dataclass(frozen=True, slots=True)
class Head:
    """Rows in the order of an index."""

    rows: QuerySet[Message]
    order: tuple[str, ...]
    # What is looked for among them, and whether there are rows of other states too.
    states: frozenset[State]
    # The column whose limits the index knows too, and the queue that all of them are in.
    along: str = ""
    queue: str = ""
    mixed: bool = False

    def limited(self, search: Search) -> tuple[QuerySet[Message], Q]:
        """The rows within what the search says of the column, and what remains to be asked of each."""
        known = [t for t in search.terms if self.along and t.along == self.along]
        rest = [t.condition for t in search.terms if t not in known and not (self.queue and t.queue == self.queue)]
        rows = self.rows.filter(*(term.condition for term in known)).order_by(*self.order)
        return rows, reduce(Q.__and__, rest, Q())


def _scheduled(rows: QuerySet[Message], search: Search) -> Iterator[Head]:
    queues = transitions.queues(rows.db) if search.queue is None else [search.queue]
    for queue in queues:
        head = rows.filter(state=State.SCHEDULED, queue=queue)
        yield Head(head, _SOONEST, frozenset({State.SCHEDULED}), "due_at", queue)


def _running(rows: QuerySet[Message]) -> Head:
    return Head(rows.filter(state=State.RUNNING), _SOONEST, frozenset({State.RUNNING}))


def _unconsumed(rows: QuerySet[Message], states: frozenset[State]) -> Iterator[Head]:
    for state in sorted(states):
        one = frozenset({state})
        yield Head(rows.filter(of_states(one)), _LAST, one, "finished_at")


def _finished(rows: QuerySet[Message]) -> Head:
    return Head(rows.filter(finished_at__isnull=False), _LAST, FINAL, "finished_at")


class Listing:
    """The messages among ``rows`` (all that the reader may see) that a search finds."""

    def __init__(self, rows: QuerySet[Message], search: Search) -> None:
        self.using = rows.db
        self.rows = rows.order_by()
        self.search = search

    def ids(self, limit: int, offset: int = 0, *, milliseconds: int | None = None) -> list[int]:
        """The ids of one page, in the search's order. Raises ``TooSlow``, by default after ``PATIENCE``."""
        if self._is_empty():
            return []
        with statement_timeout(self.using, milliseconds or PATIENCE):
            return [row[-1] for row in self._ordered(self._branches(), offset + limit)[offset:]]

    def nearest(self, limit: int, offset: int = 0) -> list[int]:
        """The same, but only among the first ``NEAREST`` rows of each index. Raises ``TooSlow``."""
        if self._is_empty():
            return []
        branches = []
        for head in self._heads():
            rows, _rest = head.limited(self.search)
            branches.append(self.rows.filter(self.search.condition(), pk__in=rows.values("pk")[:NEAREST]))
        with statement_timeout(self.using, PATIENCE):
            return [row[-1] for row in self._ordered(branches, offset + limit)[offset:]]

    def count(self) -> Capped:
        """How many there are, counted up to the cap. Raises ``TooSlow``, and soon: it is not worth a wait."""
        if self._is_empty():
            return Capped(0)
        with statement_timeout(self.using, PATIENCE_FOR_COUNTS // 2):
            count = self._ordered(self._branches(), CAP + 1).count()
        return Capped(min(count, CAP), count > CAP)

    def _is_empty(self) -> bool:
        return bool(self.search.problems) or not self.search.states

    def _branches(self) -> list[QuerySet[Message]]:
        heads = self._heads()
        if len(heads) == 1:
            return [self.rows.filter(self.search.condition())]
        return [head.rows.filter(self.search.filters()) for head in heads]

    def _heads(self) -> list[Head]:
        """All that can match, in parts that an index has in the right order."""
        search, rows = self.search, self.rows
        if search.few:
            return [Head(rows, search.order, frozenset(State))]
        merges = connections[self.using].features.supports_slicing_ordering_in_compound
        if search.states <= REQUEUEABLE and (merges or len(search.states) == 1):
            return list(_unconsumed(rows, search.states))
        if search.states <= FINAL:
            return [_finished(rows)]
        if not search.states <= LIVE:
            return [Head(rows, search.order, frozenset(State))]
        if not merges:
            return [Head(rows.filter(of_states(search.states)), search.order, search.states)]
        heads = list(_scheduled(rows, search)) if State.SCHEDULED in search.states else []
        return [*heads, _running(rows)] if State.RUNNING in search.states or not heads else heads

    def _ordered(self, branches: list[QuerySet[Message]], most: int) -> QuerySet[Message, tuple[Any, ...]]:
        """Order columns and id of the first rows."""
        order = self.search.order
        columns = [name.removeprefix("-") for name in order]
        if self.search.narrow:
            (only,) = branches
            return only.order_by(*_unindexed(order)).values_list(*columns)[:most]
        found = [branch.order_by(*order).values_list(*columns) for branch in branches]
        if len(found) == 1:
            return found[0][:most]
        first, *others = (branch[:most] for branch in found)
        return first.union(*others, all=True).order_by(*order)[:most]


def _unindexed(order: tuple[str, ...]) -> list[OrderBy | str]:
    """The same order in words that no index knows, so that the planner takes the one of the filter."""
    first = order[0].removeprefix("-")
    return [OrderBy(Coalesce(first, first), descending=order[0].startswith("-")), *order[1:]]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of what a search finds, whatever its state, are in which state."""

    states: dict[State, Capped]
    overdue: Capped

    def of(self, states: frozenset[State]) -> Capped:
        chosen = [self.states[state] for state in states]
        count = sum(each.count for each in chosen)
        return Capped(min(count, CAP), count > CAP or any(each.more for each in chosen))


def counts(rows: QuerySet[Message], search: Search, now: datetime) -> Counts | None:
    """Count per state, without regard to the states that the search names. None: it would take too long.

    Only the rows at the head of each index are looked at: ``more`` says that there are others behind them.
    """
    if search.problems:
        return Counts(dict.fromkeys(State, Capped(0)), Capped(0))
    try:
        with statement_timeout(rows.db, PATIENCE_FOR_COUNTS):
            return _count(rows.order_by(), search, now)
    except TooSlow:
        return None


def _count(rows: QuerySet[Message], search: Search, now: datetime) -> Counts:
    late = now - timedelta(seconds=conf.get().OVERDUE_AFTER)
    found: Counter[State] = Counter()
    more: set[State] = set()
    overdue, more_overdue = 0, False
    deadline = time.monotonic() + PATIENCE_FOR_COUNTS / 1000
    for head in _counted(rows, search):
        if time.monotonic() > deadline:
            raise TooSlow
        limited, rest = head.limited(search)
        most = CAP if search.few else LOOK
        tally = limited[: most + 1].aggregate(**_questions(head, rest, late))
        found.update({state: tally[state.value] for state in head.states})
        overdue += tally.get("overdue", 0)
        more |= head.states if tally["looked"] > most else set()
        more_overdue |= tally.get("looked_overdue", 0) > most
    capped = {state: Capped(min(found[state], CAP), found[state] > CAP or state in more) for state in State}
    return Counts(capped, Capped(min(overdue, CAP), overdue > CAP or more_overdue))


def _counted(rows: QuerySet[Message], search: Search) -> Iterator[Head]:
    if search.few:
        found = rows.filter(search.filters())
        # Apart: only for the scheduled ones the due times are read, which no index of the others has.
        yield Head(found.exclude(state=State.SCHEDULED), (), frozenset(State) - {State.SCHEDULED})
        yield Head(found.filter(state=State.SCHEDULED), (), frozenset({State.SCHEDULED}))
        return
    yield from _scheduled(rows, search)
    yield _running(rows)
    yield from _unconsumed(rows, REQUEUEABLE)
    yield replace(_finished(rows), states=frozenset({State.CONSUMED}), mixed=True)


def _questions(head: Head, rest: Q, late: datetime) -> dict[str, Count]:
    def number(condition: Q) -> Count:
        return Count("pk", filter=condition) if condition else Count("pk")

    mixed = head.mixed or len(head.states) > 1
    asked = {state.value: number(rest & (Q(state=state) if mixed else Q())) for state in head.states}
    asked["looked"] = number(Q())
    if State.SCHEDULED in head.states:
        is_late = Q(due_at__lt=late) & (Q(state=State.SCHEDULED) if mixed else Q())
        asked["overdue"] = number(rest & is_late)
        asked["looked_overdue"] = number(is_late)
    return asked
