"""Bulk actions: cancel, reschedule, run now, requeue and purge, on many messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.db.models import Q
from django.utils import timezone

from ... import actions
from ...actions import Action, Times
from ...models import Message
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
    """An action on many messages. ``arguments`` may have "spread" in seconds, and what a subclass reads."""

    action: ClassVar[Action]

    def __init_subclass__(cls, *, action: Action) -> None:
        super().__init_subclass__()
        cls.action, cls.name, cls.permission = action, action.name, f"{action.name}_message"

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.messages = Scope.from_json(scope)
        self.spread = timedelta(seconds=arguments.get("spread") or 0)
        # A search that cannot be read is refused here.
        self.messages.condition()

    def times(self, share: SpreadShare) -> Times:
        """Return the due times for the messages of one batch."""
        return Times(delay=share.start, spread=share.width)

    def act(self, using: str, ids: Sequence[int], share: SpreadShare, reason: str) -> Counter[str]:
        """Do the action to these messages, and return how many had which outcome."""
        answers = self.action.apply(using, ids, times=self.times(share), reason=reason)
        return Counter(str(answer.verdict.value) for answer in answers)

    def at_once(self, using: str, reason: str) -> Counter[str]:
        """Do the action to all messages of a scope of ids."""
        return self.act(using, self.messages.ids, SpreadShare(width=self.spread), reason)

    def count(self, using: str) -> int | None:
        if self.messages.search is None:
            return len(self.messages.ids)
        rows = Message.objects.using(using).filter(self.messages.condition(), state__in=sorted(self.action.states))
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
        within = Q(pk__gte=first, pk__lte=end)
        matching = rows.filter(self.messages.condition(), within, state__in=sorted(self.action.states))
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


@register
class Cancel(BulkAction, action=actions.CANCEL):
    """Cancels messages."""


@register
class Reschedule(BulkAction, action=actions.RESCHEDULE):
    """Reschedules to "due" (ISO 8601), or by "shift" (seconds from each message's own due time)."""

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.due = datetime.fromisoformat(arguments["due"]) if arguments.get("due") else None
        self.shift = timedelta(seconds=arguments["shift"]) if arguments.get("shift") else None
        if (self.due is None) == (self.shift is None):
            raise ValueError("reschedule needs either due or shift")

    def times(self, share: SpreadShare) -> Times:
        due = None if self.due is None else self.due + share.start
        return Times(due=due, shift=self.shift, spread=share.width)


@register
class RunNow(BulkAction, action=actions.RUN_NOW):
    """Makes messages due now."""


@register
class Requeue(BulkAction, action=actions.REQUEUE):
    """Schedules finished messages again."""


@register
class Purge(BulkAction, action=actions.PURGE):
    """Deletes finished messages, with their log."""
