"""The verbs on messages: cancel, reschedule, run now, requeue, purge."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.db.models import Q
from django.utils import timezone

from ... import actions, purge, transitions
from ...models import Message
from ...states import FINAL, REQUEUEABLE, State
from ...transitions import Answer
from ..models import Operation
from ..search import language
from ..search.language import Search
from ..statements import TooSlow, statement_timeout
from .work import BATCH, Step, Work, register

# Ids that one step looks through at most, so that a search which finds little takes no longer than one that finds much.
WINDOW = 100_000
# What is more is not counted.
COUNT_CAP = 1_000_000
# How long the database may count. Milliseconds.
COUNTING = 5000

NOTHING = timedelta(0)


@dataclass(frozen=True, slots=True)
class Scope:
    """Which messages: those with these ids, or all that ``search`` finds up to the id ``upto``."""

    ids: tuple[int, ...] = ()
    search: str | None = None
    upto: int = 0

    @classmethod
    def of_search(cls, using: str, found: Search) -> Scope:
        """All that a search finds now: what is scheduled later does not belong to it, and its times stand still.

        Raises ``ValueError`` for a search that cannot be read.
        """
        newest = Message.objects.using(using).order_by("-pk").values_list("pk", flat=True).first()
        return cls(search=_checked(found).frozen, upto=newest or 0)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scope:
        """Read what ``to_json`` wrote."""
        if "ids" in value:
            return cls(ids=tuple(sorted(map(int, value["ids"]))))
        return cls(search=str(value["search"]), upto=int(value["upto"]))

    def to_json(self) -> dict[str, Any]:
        """For ``Operation.scope``."""
        if self.search is None:
            return {"ids": list(self.ids)}
        return {"search": self.search, "upto": self.upto}

    def condition(self) -> Q:
        """The messages of it. Raises ``ValueError`` for a search that cannot be read."""
        if self.search is None:
            return Q(pk__in=self.ids)
        return _checked(language.parse(self.search, now=timezone.now())).condition() & Q(pk__lte=self.upto)


def _checked(found: Search) -> Search:
    if found.problems:
        raise ValueError("; ".join(found.problems))
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the time to spread over that falls to one batch: from ``start`` on, for ``width``."""

    start: timedelta = NOTHING
    width: timedelta = NOTHING


class BulkAction(Work):
    """A verb on messages. What it may find in ``arguments``: "spread", in seconds, and what the verb says."""

    states: ClassVar[frozenset[State]]

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.messages = Scope.from_json(scope)
        self.spread = timedelta(seconds=arguments.get("spread") or 0)
        self.messages.condition()

    @abstractmethod
    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        """Do it to messages, and say what came of it to how many."""

    def at_once(self, using: str, reason: str) -> Counter[str]:
        """Do it to all that are named by their ids."""
        return self.act(using, self.messages.ids, Share(width=self.spread), reason)

    def count(self, using: str) -> int | None:
        if self.messages.search is None:
            return len(self.messages.ids)
        rows = Message.objects.using(using).filter(self.messages.condition(), state__in=sorted(self.states))
        try:
            with statement_timeout(using, COUNTING):
                number = rows.order_by().values("pk")[: COUNT_CAP + 1].count()
        except TooSlow:
            return None
        return number if number <= COUNT_CAP else None

    def step(self, using: str, operation: Operation) -> Step:
        begin = int(operation.position or 0)
        ids, end, finished = self._page(using, begin)
        outcomes = self.act(using, ids, self._share(operation, begin, end, len(ids)), operation.reason)
        return Step(len(ids), outcomes, str(end), finished)

    def _page(self, using: str, begin: int) -> tuple[list[int], int, bool]:
        """The next ids after ``begin``, how far that is, and whether there are no more."""
        if self.messages.search is None:
            rest = [pk for pk in self.messages.ids if pk > begin]
            page = rest[:BATCH]
            return page, page[-1] if page else begin, len(rest) <= BATCH
        upto = self.messages.upto
        rows = Message.objects.using(using).filter(pk__lte=upto)
        first = rows.filter(pk__gt=begin).order_by("pk").values_list("pk", flat=True).first()
        if first is None:
            return [], begin, True
        end = min(first + WINDOW - 1, upto)
        matching = rows.filter(self.messages.condition(), state__in=sorted(self.states), pk__gte=first, pk__lte=end)
        page = list(matching.order_by("pk").values_list("pk", flat=True)[:BATCH])
        if len(page) == BATCH:
            end = page[-1]
        return page, end, end >= upto

    def _share(self, operation: Operation, begin: int, end: int, size: int) -> Share:
        """By the number of messages where it is known, else by their ids."""
        done, more, total = begin, end - begin, self.messages.upto
        if operation.total is not None:
            done, more, total = operation.done, size, operation.total
        total = max(total, 1)
        return Share(self.spread * min(1.0, done / total), self.spread * min(1.0, more / total))


def _told(using: str, answers: Iterable[Answer]) -> Counter[str]:
    answers = list(answers)
    actions.publish_moves(using, answers)
    return Counter(str(answer.verdict.value) for answer in answers)


@register
class Cancel(BulkAction):
    verb = "cancel"
    permission = "cancel_message"
    states = frozenset({State.SCHEDULED, State.RUNNING})

    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        return _told(using, transitions.cancel(using, ids, reason=reason))


@register
class Reschedule(BulkAction):
    """``arguments``: "due" (ISO 8601), or "shift" in seconds from each message's own due time."""

    verb = "reschedule"
    permission = "reschedule_message"
    states = frozenset({State.SCHEDULED})

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.due = datetime.fromisoformat(arguments["due"]) if arguments.get("due") else None
        self.shift = timedelta(seconds=arguments["shift"]) if arguments.get("shift") else None
        if (self.due is None) == (self.shift is None):
            raise ValueError("reschedule needs either due or shift")

    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        due = None if self.due is None else self.due + share.start
        answers = transitions.reschedule(using, ids, due=due, shift=self.shift, spread=share.width, reason=reason)
        return _told(using, answers)


@register
class Run(BulkAction):
    verb = "run"
    permission = "run_message"
    states = frozenset({State.SCHEDULED})

    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        answers = transitions.reschedule(using, ids, delay=share.start, spread=share.width, reason=reason or "run now")
        return _told(using, answers)


@register
class Requeue(BulkAction):
    verb = "requeue"
    permission = "requeue_message"
    states = REQUEUEABLE

    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        answers = transitions.requeue(using, ids, delay=share.start, spread=share.width, reason=reason)
        return _told(using, answers)


@register
class Purge(BulkAction):
    """Deletes finished messages, with their log."""

    verb = "purge"
    permission = "purge_message"
    states = FINAL

    def act(self, using: str, ids: Sequence[int], share: Share, reason: str) -> Counter[str]:
        gone = len(purge.purge_ids(using, ids))
        return Counter({"purged": gone, "too late": len(ids) - gone})
