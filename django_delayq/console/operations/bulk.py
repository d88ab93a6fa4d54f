"""Bulk actions: cancel, reschedule, run now, requeue and purge, on many messages."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.db.models.lookups import LessThanOrEqual

from ...api import actions, pausing, targets
from ...api.actions import Action
from ...core.clock import NO_TIME
from ...models import Message
from ...models.messages import LogRow
from ...record import transitions
from ...record.transitions import DueTimes
from ..models import Operation
from ..search import language
from ..search.conditions import of_states
from .work import MESSAGES_PER_STEP, OperationWork, Step, holder, register

# An operation keeps the ids of its messages: so many at most.
MOST_MESSAGES = 1_000_000


@dataclass(frozen=True, slots=True)
class Scope:
    """The messages of an action: those with these ids, or all that ``search`` finds, as they are at the moment ``at``.

    A question previews them. ``frozen`` then turns the scope into the ids of the messages that the question has counted
    and that have not changed since; an operation gets nothing but ids.
    """

    ids: tuple[int, ...] = ()
    search: str | None = None
    upto: int = 0
    at: datetime | None = None
    # Those of the ids whose due time is still to come: a requeue may leave it as it is.
    later: tuple[int, ...] = ()
    # How often each of the ids had moved at that moment, or -1.
    moves: tuple[int, ...] = ()

    def renewed(self, using: str) -> Scope:
        """Return the scope as it is now; messages that are scheduled later do not belong to it."""
        at = transitions.now(using)
        if self.search is None:
            found = dict(Message.objects.using(using).filter(pk__in=self.ids).values_list("pk", "moves"))
            return replace(self, at=at, moves=tuple(found.get(pk, -1) for pk in self.ids))
        newest = Message.objects.using(using).order_by("-pk").values_list("pk", flat=True).first()
        return replace(self, upto=newest or 0, at=at)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scope:
        """Read a scope that ``to_json`` wrote."""
        at = datetime.fromisoformat(value["at"]) if value.get("at") else None
        if "ids" in value:
            ids, later, moves = (_unpacked(value.get(name, "")) for name in ("ids", "later", "moves"))
            return cls(ids=ids, at=at, later=later, moves=moves)
        return cls(search=str(value["search"]), upto=int(value["upto"]), at=at)

    def to_json(self) -> dict[str, Any]:
        """Return the scope for ``Operation.scope`` and for a token."""
        at = {} if self.at is None else {"at": self.at.isoformat()}
        if self.search is None:
            return {"ids": _packed(self.ids), "later": _packed(self.later), "moves": _packed(self.moves), **at}
        return {"search": self.search, "upto": self.upto, **at}

    def condition(self) -> Q:
        """Return a condition for the messages: for none, if the search cannot be read any more."""
        if self.search is None:
            return Q(pk__in=self.ids)
        assert self.at is not None
        return language.parse(self.search, now=self.at).condition() & Q(pk__lte=self.upto)

    def frozen(self, rows: QuerySet[Message], action: Action) -> Scope:
        """Return the scope of those messages that the action changes and that have not changed since the question.

        Ids that were given keep those for which the action comes too late: its answer says so.
        """
        assert self.at is not None
        found = rows.filter(self.condition())
        if self.search is None:
            then = dict(zip(self.ids, self.moves, strict=False))
            read = found.values_list("pk", "moves", "state")
            found = rows.filter(pk__in=[pk for pk, n, state in read if then.get(pk) == n or state not in action.states])
        else:
            found = found.filter(_unchanged_since(self.at), of_states(action.states))
        later = found.filter(due_at__gt=self.at) if action is actions.REQUEUE else found.none()
        ids, to_come = (tuple(targets.selected(each[: MOST_MESSAGES + 1])) for each in (found, later))
        return Scope(ids=ids, later=to_come)


def _unchanged_since(at: datetime) -> Q:
    """Return the condition that a message has not moved after ``at``, by its own row and by the last row of its log.

    These have the time of a move, and not that of its commit.

    The view of the whole log cannot answer this: joined to the messages, it reads all of them for each one.
    """
    # A value, and no EXISTS: the planner may turn that into a join, which reads the log from end to end.
    logged = Subquery(LogRow.objects.filter(message_id=OuterRef("pk")).order_by("-number").values("at")[:1])
    return Q(
        Q(claimed_at__isnull=True) | Q(claimed_at__lte=at),
        Q(finished_at__isnull=True) | Q(finished_at__lte=at),
        LessThanOrEqual(Coalesce(logged, F("created_at")), at),
        created_at__lte=at,
    )


def _packed(ids: Sequence[int]) -> str:
    """Return ids, or other numbers, as a short text: the differences between them, compressed."""
    differences = ",".join(str(after - before) for before, after in pairwise((0, *ids)))
    return base64.b85encode(zlib.compress(differences.encode())).decode()


def _unpacked(text: str) -> tuple[int, ...]:
    differences = zlib.decompress(base64.b85decode(text)).decode() if text else ""
    return tuple(accumulate(map(int, differences.split(",")))) if differences else ()


class BulkAction(OperationWork):
    """An action on many messages. ``arguments`` give the due times, and say what happens when all is done.

    Due times: "due" (ISO 8601), or "shift" (seconds from each message's own due time), for a reschedule; "now" for a
    requeue that gives up due times which are still to come; "spread" (seconds). "resume" names a queue whose pause the
    operation took over: it is resumed when all is done.
    """

    action: ClassVar[Action]

    def __init_subclass__(cls, *, action: Action) -> None:
        super().__init_subclass__()
        cls.action, cls.name, cls.verbs = action, action.name, (action.name, "bulk")

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.ids = _unpacked(scope["ids"])
        self.times = DueTimes(
            due_at=datetime.fromisoformat(arguments["due"]) if arguments.get("due") else None,
            delay=NO_TIME if arguments.get("now") else None,
            shift=timedelta(seconds=arguments["shift"]) if arguments.get("shift") is not None else None,
            spread=timedelta(seconds=arguments.get("spread") or 0),
        )
        # Those over which no spread goes.
        self.keeping = _unpacked(scope.get("later", "")) if self.times.name_none else ()
        if self.action is actions.RESCHEDULE and (self.times.due_at is None) == (self.times.shift is None):
            raise ValueError("reschedule needs either due or shift")

    @classmethod
    def needed(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return (*cls.verbs, "resume") if arguments.get("resume") else cls.verbs

    def act(self, using: str, ids: Sequence[int], times: DueTimes, reason: str) -> Counter[str]:
        """Do the action to these messages, and return how many had which outcome."""
        answers = self.action.apply(using, ids, times=times, reason=reason)
        return Counter(str(answer.verdict.value) for answer in answers)

    def at_once(self, using: str, reason: str) -> Counter[str]:
        """Do the action to all messages."""
        return self.act(using, self.ids, self.times, reason)

    def count(self, using: str) -> int | None:
        return len(self.ids)

    def step(self, using: str, operation: Operation) -> Step:
        place = bisect_right(self.ids, int(operation.position or 0))
        page = self.ids[place : place + MESSAGES_PER_STEP]
        times = replace(self.times, place=actions.place_among(self.ids, self.keeping))
        outcomes = self.act(using, page, times, operation.reason)
        is_finished = place + len(page) >= len(self.ids)
        if is_finished and self.arguments.get("resume"):
            pausing.release(using, holder(operation))
        return Step(len(page), outcomes, str(page[-1]) if page else operation.position, is_finished)


for _action in actions.ACTIONS.values():
    register(type(_action.name.capitalize(), (BulkAction,), {}, action=_action))
