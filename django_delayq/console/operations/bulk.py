"""Bulk actions: cancel, reschedule, run now, requeue and purge, on many messages."""

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
from .work import COUNT_TIMEOUT_MS, MESSAGES_PER_STEP, OperationWork, Step, register

# Ids that one step searches at most, so that a search which finds little takes no longer than one that finds much.
IDS_PER_STEP = 100_000
# The total of an operation on more messages than this is not known.
TOTAL_CAP = 1_000_000


@dataclass(frozen=True, slots=True)
class Scope:
    """The messages of an action: those with these ids, or all that ``search`` finds up to the id ``upto``."""

    ids: tuple[int, ...] = ()
    search: str | None = None
    upto: int = 0

    @classmethod
    def of_search(cls, using: str, found: Search) -> Scope:
        """Return the scope of all that a search finds now.

        Messages that are scheduled later do not belong to it, and its relative times become absolute. Raises
        ``ValueError`` for a search that cannot be read.
        """
        newest = Message.objects.using(using).order_by("-pk").values_list("pk", flat=True).first()
        return cls(search=_checked(found).frozen, upto=newest or 0)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scope:
        """Read a scope that ``to_json`` wrote."""
        if "ids" in value:
            return cls(ids=tuple(sorted(map(int, value["ids"]))))
        return cls(search=str(value["search"]), upto=int(value["upto"]))

    def to_json(self) -> dict[str, Any]:
        """Return the scope for ``Operation.scope``."""
        if self.search is None:
            return {"ids": list(self.ids)}
        return {"search": self.search, "upto": self.upto}

    def condition(self) -> Q:
        """Return a condition for the messages. Raises ``ValueError`` for a search that cannot be read."""
        if self.search is None:
            return Q(pk__in=self.ids)
        return _checked(language.parse(self.search, now=timezone.now())).condition() & Q(pk__lte=self.upto)


def _checked(found: Search) -> Search:
    if found.problems:
        raise ValueError("; ".join(found.problems))
    return found


@dataclass(frozen=True, slots=True)
class SpreadShare:
    """The part of a spread that belongs to one batch: it begins after ``start`` and lasts for ``width``."""

    start: timedelta = timedelta(0)
    width: timedelta = timedelta(0)


class BulkAction(OperationWork):
    """An action on many messages. ``arguments`` may have "spread", in seconds, and what the subclass says."""

    # The states of the messages that it applies to.
    states: ClassVar[frozenset[State]]

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.messages = Scope.from_json(scope)
        self.spread = timedelta(seconds=arguments.get("spread") or 0)
        self.messages.condition()

    @abstractmethod
    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        """Do the action to these messages, and return how many had which outcome."""

    def at_once(self, using: str, reason: str) -> Counter[str]:
        """Do the action to all messages of a scope of ids."""
        return self.act(using, self.messages.ids, SpreadShare(width=self.spread), reason)

    def count(self, using: str) -> int | None:
        if self.messages.search is None:
            return len(self.messages.ids)
        rows = Message.objects.using(using).filter(self.messages.condition(), state__in=sorted(self.states))
        try:
            with statement_timeout(using, COUNT_TIMEOUT_MS):
                number = rows.order_by().values("pk")[: TOTAL_CAP + 1].count()
        except TooSlow:
            return None
        return number if number <= TOTAL_CAP else None

    def step(self, using: str, operation: Operation) -> Step:
        begin = int(operation.position or 0)
        ids, end, finished = self._page(using, begin)
        outcomes = self.act(using, ids, self._share(operation, begin, end, len(ids)), operation.reason)
        return Step(len(ids), outcomes, str(end), finished)

    def _page(self, using: str, begin: int) -> tuple[list[int], int, bool]:
        """Return the next ids after ``begin``, the last id that was searched, and whether that was the end."""
        if self.messages.search is None:
            rest = [pk for pk in self.messages.ids if pk > begin]
            page = rest[:MESSAGES_PER_STEP]
            return page, page[-1] if page else begin, len(rest) <= MESSAGES_PER_STEP
        upto = self.messages.upto
        rows = Message.objects.using(using).filter(pk__lte=upto)
        first = rows.filter(pk__gt=begin).order_by("pk").values_list("pk", flat=True).first()
        if first is None:
            return [], begin, True
        end = min(first + IDS_PER_STEP - 1, upto)
        matching = rows.filter(self.messages.condition(), state__in=sorted(self.states), pk__gte=first, pk__lte=end)
        page = list(matching.order_by("pk").values_list("pk", flat=True)[:MESSAGES_PER_STEP])
        if len(page) == MESSAGES_PER_STEP:
            end = page[-1]
        return page, end, end >= upto

    def _share(self, operation: Operation, begin: int, end: int, size: int) -> SpreadShare:
        """Return a batch's share of the spread: by messages where their total is known, else by ids."""
        done, more, total = begin, end - begin, self.messages.upto
        if operation.total is not None:
            done, more, total = operation.done, size, operation.total
        total = max(total, 1)
        return SpreadShare(self.spread * min(1.0, done / total), self.spread * min(1.0, more / total))


def _publish(using: str, answers: Iterable[Answer]) -> Counter[str]:
    answers = list(answers)
    actions.publish_moves(using, answers)
    return Counter(str(answer.verdict.value) for answer in answers)


@register
class Cancel(BulkAction):
    verb = "cancel"
    permission = "cancel_message"
    states = frozenset({State.SCHEDULED, State.RUNNING})

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        return _publish(using, transitions.cancel(using, ids, reason=reason))


@register
class Reschedule(BulkAction):
    """Reschedules to "due" (ISO 8601), or by "shift" (seconds from each message's own due time)."""

    verb = "reschedule"
    permission = "reschedule_message"
    states = frozenset({State.SCHEDULED})

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.due = datetime.fromisoformat(arguments["due"]) if arguments.get("due") else None
        self.shift = timedelta(seconds=arguments["shift"]) if arguments.get("shift") else None
        if (self.due is None) == (self.shift is None):
            raise ValueError("reschedule needs either due or shift")

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        due = None if self.due is None else self.due + share.start
        answers = transitions.reschedule(using, ids, due=due, shift=self.shift, spread=share.width, reason=reason)
        return _publish(using, answers)


@register
class RunNow(BulkAction):
    verb = "run"
    permission = "run_message"
    states = frozenset({State.SCHEDULED})

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        answers = transitions.reschedule(using, ids, delay=share.start, spread=share.width, reason=reason or "run now")
        return _publish(using, answers)


@register
class Requeue(BulkAction):
    verb = "requeue"
    permission = "requeue_message"
    states = REQUEUEABLE

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        answers = transitions.requeue(using, ids, delay=share.start, spread=share.width, reason=reason)
        return _publish(using, answers)


@register
class Purge(BulkAction):
    """Deletes finished messages, with their log."""

    verb = "purge"
    permission = "purge_message"
    states = FINAL

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        gone = len(purge.purge_ids(using, ids))
        return Counter({"purged": gone, "too late": len(ids) - gone})
