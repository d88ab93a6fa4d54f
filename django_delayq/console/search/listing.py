"""Pages of what a search finds, and counts of it, in times that do not grow with the table.

Rows are read along an index, in the order in which they are shown. No index has the live messages of all queues in that
order: they are merged from the heads of the queues. Counts read only the first rows of each index. The database stops
statements that no index can answer, after a time: they raise ``TooSlow``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, reduce
from typing import Any

from django.db import connections
from django.db.models import (
    BigIntegerField,
    Case,
    CharField,
    Count,
    IntegerField,
    OrderBy,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
    When,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from ...core.states import FINAL, LIVE, REQUEUEABLE, State
from ...inspector.numbers import Capped, capped
from ...inspector.waiting import first_ids
from ...models import Message, Queue
from ...models.queue import in_paused_queue
from ...record.sql import statements
from ...record.sql.expressions import QUEUES
from ..console_tuning import timeouts, tuning
from ..statements import TooSlow, answering_within, in_time, is_late, statement_timeout
from .conditions import SCHEDULED, of_states, parts
from .language import Search

# The parts of the scheduled messages that are counted beside the states: those that are due, and all of them.
_DUE_PARTS = ("overdue", "paused", "limited")
PARTS = (*_DUE_PARTS, "retrying")
_COUNTED = (*State.values, *PARTS)
_SOONEST = ("due_at", "id")
_LAST = ("-finished_at", "-id")


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Rows that an index, or a part of it, has in order."""

    rows: QuerySet[Message]
    order: tuple[str, ...]
    # The states that are searched among the rows; ``mixed`` when the rows have other states too.
    states: frozenset[State]
    # The column whose range the index can limit too, and the queue that all rows are in.
    range_column: str = ""
    queue: str = ""
    mixed: bool = False
    # True when the index has the rows of each queue in order, but not the rows of all queues.
    by_queue: bool = False

    def limited(self, search: Search) -> tuple[QuerySet[Message], Q]:
        """Return the rows within the search's range of the column, and the condition that remains for each row."""
        known = [t for t in search.terms if self.range_column and t.range_column == self.range_column]
        rest = [t.condition for t in search.terms if t not in known and t.exactly != ("queue", self.queue)]
        rows = self.rows.filter(*(term.condition for term in known)).order_by(*self.order)
        return rows, reduce(Q.__and__, rest, Q())

    def first(self, rows: QuerySet[Message], most: int) -> QuerySet[Message]:
        """Return the first of these rows of the part in its order: those of each queue, merged."""
        if self.by_queue:
            of_each = rows.filter(queue=_QUEUE).order_by(*self.order).values("due_at", "id")[:most]
            rows = self.rows.filter(pk__in=_FirstOfQueues(of_each, most, self.order))
        return rows.order_by(*self.order)[:most]


class _FirstOfQueues(Subquery):
    """The ids of the first messages among the first ones of each queue, which a slice has for the queue ``_QUEUE``."""

    template = f"""(SELECT x.id FROM ({QUEUES}) q CROSS JOIN LATERAL (%(subquery)s) x
                    ORDER BY x.due_at %(way)s, x.id %(way)s LIMIT %(most)d)"""  # noqa: S608
    output_field = BigIntegerField()

    def __init__(self, rows: QuerySet[Any, Any], most: int, order: tuple[str, ...]) -> None:
        super().__init__(rows, most=most, way="ASC" if order == _SOONEST else "DESC")


_QUEUE = RawSQL("q.queue", (), CharField())


def _scheduled(rows: QuerySet[Message], queue: str | None) -> IndexPart:
    """Return the scheduled messages of a queue; with None those of all."""
    rows = rows.filter(state=State.SCHEDULED)
    if queue is None:
        return IndexPart(rows, _SOONEST, SCHEDULED, "due_at", by_queue=True)
    return IndexPart(rows.filter(queue=queue), _SOONEST, SCHEDULED, "due_at", queue)


def _running(rows: QuerySet[Message]) -> IndexPart:
    return IndexPart(rows.filter(state=State.RUNNING), _SOONEST, frozenset({State.RUNNING}))


def _unconsumed(rows: QuerySet[Message], states: frozenset[State]) -> Iterator[IndexPart]:
    for state in sorted(states):
        one = frozenset({state})
        yield IndexPart(rows.filter(of_states(one)), _LAST, one, "finished_at")


def _finished(rows: QuerySet[Message]) -> IndexPart:
    return IndexPart(rows.filter(finished_at__isnull=False), _LAST, FINAL, "finished_at")


def _backwards(order: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name[1:] if name.startswith("-") else f"-{name}" for name in order)


class Listing:
    """The messages that a search finds among ``rows``, which are those that the reader may see.

    ``order``: another order than the search's, which ends with the id.
    """

    def __init__(self, rows: QuerySet[Message], search: Search, order: tuple[str, ...] = ()) -> None:
        self.using = rows.db
        self.rows = rows.order_by()
        self.search = search
        self.order = order or search.order
        # True when no index has the order, forwards or backwards: only the nearest rows are sorted by it.
        self.is_sorted_apart = not search.selective and search.order not in (self.order, _backwards(self.order))

    def ids(self, limit: int, offset: int = 0, *, milliseconds: int | None = None) -> list[int]:
        """Return the ids of one page, in the search's order. Raises ``TooSlow``; ``timeouts.rows`` is the default."""
        if self._is_empty():
            return []
        if self.is_sorted_apart:
            return self.nearest(limit, offset)
        with statement_timeout(self.using, milliseconds or timeouts.rows):
            return [row[-1] for row in self._first(offset + limit)[offset:]]

    def nearest(self, limit: int, offset: int = 0) -> list[int]:
        """Return the ids of one page found among the first rows of each index. Raises ``TooSlow``."""
        if self._is_empty():
            return []
        most, found = offset + limit, []
        for part in self._parts():
            nearest = part.first(part.limited(self.search)[0], tuning.nearest_rows).values("pk")
            found.append(self.rows.filter(self.search.condition(), pk__in=nearest).order_by(*self.order)[:most])
        with statement_timeout(self.using, timeouts.rows):
            return [row[-1] for row in _merged(found, most, self.order)[offset:]]

    def count(self) -> Capped | None:
        """Count the messages up to the cap; None when that takes longer than the number is worth."""
        if self._is_empty():
            return Capped(0)
        found = in_time(self.using, timeouts.beside // 2, self._first(tuning.counted + 1).count)
        return None if found is None else capped(found, tuning.counted)

    def _is_empty(self) -> bool:
        return bool(self.search.problems) or not self.search.states

    def _parts(self) -> list[IndexPart]:
        """Return all rows that can match, in parts that an index has in the search's order."""
        search, rows = self.search, self.rows
        if search.selective:
            return [IndexPart(rows, search.order, frozenset(State))]
        merges = connections[self.using].features.supports_slicing_ordering_in_compound
        if search.states <= REQUEUEABLE and (merges or len(search.states) == 1):
            return list(_unconsumed(rows, search.states))
        if search.states <= FINAL:
            return [_finished(rows)]
        if not search.states <= LIVE:
            return [IndexPart(rows, search.order, frozenset(State))]
        if not merges:
            return [IndexPart(rows.filter(of_states(search.states)), search.order, search.states)]
        scheduled, running = _scheduled(rows, search.only("queue")), _running(rows)
        return [part for part in (scheduled, running) if part.states & search.states]

    def _first(self, most: int) -> QuerySet[Message, tuple[Any, ...]]:
        """Return the order columns, the id last, of the first rows that match."""
        order = self.search.order if self.is_sorted_apart else self.order
        if self.search.has_partial_index:
            rows = self.rows.filter(self.search.condition()).order_by(*_unindexed(order))
            return _merged([rows[:most]], most, order)
        parts = [replace(piece, order=order) for part in self._parts() for piece in self._pieces(part)]
        # The part by itself has rows of other states, too.
        matches = self.search.condition() if len(parts) == 1 else self.search.filters()
        return _merged([part.first(part.rows.filter(matches), most) for part in parts], most, order)

    def _pieces(self, part: IndexPart) -> Iterator[IndexPart]:
        """Yield the part, or one part for each queue while these are few."""
        if part.by_queue and len(self._queues) <= tuning.merged_queues:
            # No queue has an empty name: nothing is found.
            yield from (_scheduled(self.rows, queue) for queue in self._queues or [""])
        else:
            yield part

    @cached_property
    def _queues(self) -> list[str]:
        """The queues that hold messages which can match: the rows and the count of a page need them.

        Overdue messages are in no paused queue: none of its many rows is read in vain.
        """
        found, wanted = statements(self.using).queues(), {term.in_paused for term in self.search.terms} - {None}
        if not wanted:
            return found
        paused = set(Queue.objects.using(self.using).filter(Queue.PAUSED).values_list("name", flat=True))
        return [queue for queue in found if {queue in paused} == wanted]


def _merged(found: list[QuerySet[Message]], most: int, order: tuple[str, ...]) -> QuerySet[Message, tuple[Any, ...]]:
    """Return the order columns, the id last, of the first of these rows, which are in this order."""
    first, *others = (rows.values_list(*(name.removeprefix("-") for name in order)) for rows in found)
    return first.union(*others, all=True).order_by(*order)[:most] if others else first


def _unindexed(order: tuple[str, ...]) -> list[OrderBy | str]:
    """Return the same order in words that no index has, so that the planner takes the index of the filter."""
    first = order[0].removeprefix("-")
    return [OrderBy(Coalesce(first, first), descending=order[0].startswith("-")), *order[1:]]


# The messages that a search finds in each state, whatever states it names; and in ``PARTS`` of the
# scheduled ones.
StateCounts = dict[str, Capped]


def counts(rows: QuerySet[Message], search: Search, now: datetime) -> StateCounts:
    """Count per state, without regard to the states that the search names, for a short time.

    Only the first rows of each index are read: ``more`` says that there are others behind them, or may be.
    """
    if search.problems:
        return dict.fromkeys(_COUNTED, Capped(0))
    found, more, cap = Counter[str](), set(_COUNTED), tuning.counted
    with answering_within(timeouts.beside):
        in_time(rows.db, timeouts.beside, _count, rows.order_by(), search, now, found, more)
    return {name: Capped(min(found[name], cap), found[name] > cap or name in more) for name in _COUNTED}


def _count(rows: QuerySet[Message], search: Search, now: datetime, found: Counter[str], more: set[str]) -> None:
    """Add to the counts, and take states out of ``more`` whose rows were all counted."""
    most = tuning.counted if search.selective else tuning.counted_of_index
    for part in _counted(rows, search):
        if is_late():
            raise TooSlow
        tallies = list(_tallies(part, search, most, now))
        found.update(sum(map(Counter, tallies), Counter()))
        if all(tally["rows"] <= most for tally in tallies):
            more -= {*part.states, *(PARTS if State.SCHEDULED in part.states else ())}
        elif State.SCHEDULED in part.states:
            # What is due in a paused queue is not overdue, and nothing else is paused.
            beyond = {tally.get("is_paused") for tally in tallies if tally["due_rows"] > most}
            if not beyond:
                more -= {*_DUE_PARTS}
            elif beyond == {1}:
                more.discard("overdue")
            elif beyond == {0}:
                more.discard("paused")


def _counted(rows: QuerySet[Message], search: Search) -> Iterator[IndexPart]:
    """Yield the parts of the indexes in which the messages of a search are counted."""
    if search.selective:
        found = rows.filter(search.filters())
        # Scheduled rows are counted apart: only their due times are read, and no index of the other states has due
        # times.
        yield IndexPart(found.exclude(state=State.SCHEDULED), (), frozenset(State) - {State.SCHEDULED})
        yield IndexPart(found.filter(state=State.SCHEDULED), (), frozenset({State.SCHEDULED}))
        return
    yield _scheduled(rows, search.only("queue"))
    yield _running(rows)
    yield from _unconsumed(rows, REQUEUEABLE)
    yield replace(_finished(rows), states=frozenset({State.CONSUMED}), mixed=True)


class _Hits(Subquery):
    """Counts the rows of a slice that have a value in its column ``hit``."""

    template = "(SELECT count(x.hit) FROM (%(subquery)s) x)"
    output_field = IntegerField()


def _tallies(part: IndexPart, search: Search, most: int, now: datetime) -> Iterator[Mapping[str, int]]:
    """Yield the numbers of the first rows of an index: once, or for each queue."""
    first, rest = part.limited(search)
    wanted = _wanted(part, rest, now)
    if not part.by_queue:
        numbers = {name: Count("pk", filter=hit) if hit else Count("pk") for name, hit in wanted.items()}
        yield first[: most + 1].aggregate(**numbers)
        return
    if not rest:
        # If every row matches, the same rows are not counted twice.
        del wanted["rows"]
    first = first.filter(queue=OuterRef("queue"))
    # The first ones are due: of those that are not, no row is read for what only due ones are.
    due = dict.fromkeys((*_DUE_PARTS, "due_rows"), first.filter(due_at__lte=now))
    hits = {
        name: _Hits(
            due.get(name, first).annotate(hit=Case(When(hit, then=1)) if hit else Value(1)).values("hit")[: most + 1]
        )
        for name, hit in wanted.items()
    }
    queues: QuerySet[Any, Any] = Message.objects.using(part.rows.db).filter(pk__in=first_ids(part.rows.db))
    is_paused = Case(When(in_paused_queue(), then=1), default=0, output_field=IntegerField())
    for row in queues.values(is_paused=is_paused, **hits):
        yield {"rows": row[State.SCHEDULED.value], **row}


def _wanted(part: IndexPart, rest: Q, now: datetime) -> dict[str, Q]:
    """Return the conditions of the rows to count: those that match, all of them, and all that are due."""
    mixed = part.mixed or len(part.states) > 1
    wanted = {state.value: rest & (Q(state=state) if mixed else Q()) for state in part.states}
    wanted["rows"] = Q()
    if State.SCHEDULED in part.states:
        wanted |= {name: rest & condition for name, condition in parts(now).items()}
        wanted["due_rows"] = Q(due_at__lte=now)
    return wanted
