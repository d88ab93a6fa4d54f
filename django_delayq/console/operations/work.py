"""The work of operations: bulk actions, the consistency check, and restores, also of commands and loaders."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.db import DatabaseError, InterfaceError
from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThan, LessThanOrEqual

from ...api import actions, pausing
from ...api.actions import Action
from ...broker import RedisBroker, index
from ...core import actors
from ...core.bounds import LENGTHS
from ...core.clock import NO_TIME
from ...core.exceptions import BrokerUnavailable
from ...core.outcomes import storable
from ...core.states import State
from ...extensions import RestoreObserver, RestoreStart
from ...inspector.consistency import ConsistencyCheck, Mismatch, queues, stuck
from ...models import Message
from ...models.messages import LogRow
from ...project import conf
from ...record import reads
from ...record.sql.moves import locked
from ...record.sql.sessions import own_transaction
from ...record.transitions import DueTimes, times_before
from ...restore.engine import Restore, without_redis
from ...restore.selection import Overdue, Selection, Tally
from ..console_tuning import timeouts, tuning
from ..id_lists import packed, unpacked
from ..models import Operation, OperationState
from ..search import language
from ..search.conditions import of_states
from ..statements import in_time

logger = logging.getLogger("django_delayq")

# The columns of an operation that no worker has.
FREE: dict[str, Any] = {"worker": "", "leased_until": None}


def lease_from(now: datetime) -> datetime:
    """Return until when a lease lasts that begins or is renewed now."""
    return now + timedelta(seconds=tuning.lease)


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was done: how many messages, their outcomes, where to go on, and whether it was the last."""

    done: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    position: str = ""
    finished: bool = False


class OperationWork(ABC):
    """Base class of the work of one operation on the messages of its scope.

    A step begins at ``operation.position`` (empty: at the beginning), and does a limited number of messages, or
    about a second's worth. A step may be done again after a worker was killed before it could write the position.
    """

    # The name of this kind of work, as in ``Operation.action``.
    name: ClassVar[str]
    # The verbs that take the permissions to start, stop and resume it, whatever its arguments are.
    verbs: ClassVar[tuple[str, ...]]
    # True when a step writes to the record only: then its changes and its bookkeeping are one transaction.
    atomic: ClassVar[bool] = True

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.scope = scope
        self.arguments = arguments

    @classmethod
    def needed(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the verbs that take the permissions for an operation with these arguments."""
        return cls.verbs

    def count(self, using: str) -> int | None:
        """Return the number of messages to be handled now; None when it is not known, or too large to count."""
        return None

    def queued(self, using: str, operation: Operation) -> None:  # noqa: B027
        """Prepare the operation, in the transaction that has just queued it, for the first time or again."""

    @classmethod  # noqa: B027
    def ended(cls, using: str, operation: Operation) -> None:
        """Clean up: the operation is done, stopped or failed. It may be called more than once."""

    @abstractmethod
    def step(self, using: str, operation: Operation) -> Step:
        """Do one batch."""


class RedisWork(OperationWork):
    """Base class of work on the ids in Redis, which needs a Redis."""

    verbs = ("restore",)
    atomic = False

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        if conf.get().REDIS is None:
            raise ValueError(f"DELAYQ['REDIS'] is None: a {self.name} has nothing to do")

    @staticmethod
    def redis(using: str) -> AbstractContextManager[RedisBroker]:
        """Connect to Redis for the time of a context."""
        broker = index(using)
        assert broker is not None
        return closing(broker)


def holder(operation: Operation) -> str:
    """Return the name in which an operation pauses queues."""
    return f"{operation.action} #{operation.pk}"


# --- bulk actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scope:
    """The messages of an action: those with these ids, or all that ``search`` finds, as they are at the moment ``at``.

    A question previews them. ``frozen`` then turns the scope into the ids of the messages that the question has counted
    and that have not changed since; an operation gets nothing but ids. While a search finds few, the question passes
    their ids on, and the answer searches no more.
    """

    ids: tuple[int, ...] = ()
    search: str | None = None
    upto: int = 0
    at: datetime | None = None
    # The ids of messages whose due time is still to come: a requeue may leave it as it is.
    later: tuple[int, ...] = ()
    # How often each of the ids had moved at that moment, or -1.
    moves: tuple[int, ...] = ()

    def renewed(self, using: str) -> Scope:
        """Return the scope as it is now; messages that are scheduled later do not belong to it."""
        at = reads.now(using)
        if self.search is None:
            found = dict(Message.objects.using(using).filter(pk__in=self.ids).values_list("pk", "moves"))
            return replace(self, at=at, moves=tuple(found.get(pk, -1) for pk in self.ids))
        newest = Message.objects.using(using).order_by("-pk").values_list("pk", flat=True).first()
        return replace(self, ids=(), upto=newest or 0, at=at)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scope:
        """Read a scope that ``to_json`` wrote."""
        at = datetime.fromisoformat(value["at"]) if value.get("at") else None
        if "ids" in value:
            ids, later, moves = (unpacked(value.get(name, "")) for name in ("ids", "later", "moves"))
            return cls(ids=ids, at=at, later=later, moves=moves)
        return cls(search=str(value["search"]), upto=int(value["upto"]), at=at)

    def to_json(self) -> dict[str, Any]:
        """Return the scope for ``Operation.scope`` and for a token."""
        at = {} if self.at is None else {"at": self.at.isoformat()}
        if self.search is None:
            return {"ids": packed(self.ids), "later": packed(self.later), "moves": packed(self.moves), **at}
        return {"search": self.search, "upto": self.upto, **at}

    def condition(self) -> Q:
        """Return a condition for the messages: for none, if the search cannot be read any more."""
        if self.search is None or self.ids:
            return Q(pk__in=self.ids)
        assert self.at is not None
        return language.parse(self.search, now=self.at).condition() & Q(pk__lte=self.upto)

    def frozen(self, rows: QuerySet[Message], action: Action) -> Scope:
        """Return the scope of those messages that the action changes and that have not changed since the question.

        A scope of given ids keeps those for which the action comes too late: its answer says so.
        """
        assert self.at is not None
        found = rows.filter(self.condition())
        if self.search is None:
            then = dict(zip(self.ids, self.moves, strict=False))
            read = found.values_list("pk", "moves", "state")
            found = rows.filter(pk__in=[pk for pk, n, state in read if then.get(pk) == n or state not in action.states])
        else:
            found = found.filter(_unchanged_since(self.at, reads.now(rows.db)), of_states(action.states))
        later = found.filter(due_at__gt=self.at) if action.verb.keeps_due_times else found.none()
        ids, to_come = (tuple(actions.selected(each[: tuning.most_messages + 1])) for each in (found, later))
        return Scope(ids=ids, later=to_come)


def _unchanged_since(at: datetime, now: datetime) -> Q:
    """Return the condition that a message has not moved after ``at``, by its own row and by the last row of its log.

    These rows have the time of a move, and not that of its commit. A time in the future was written by a clock that was
    ahead: it does not tell whether the message moved after the question.

    The view of the whole log cannot answer this: joined to the messages, it reads all of them for each one.
    """
    # The subquery returns a value: the planner may turn an EXISTS into a join, which reads the log from end to end.
    logged = Subquery(LogRow.objects.filter(message_id=OuterRef("pk")).order_by("-number").values("at")[:1])
    moved = Coalesce(logged, F("created_at"))
    return Q(
        *(~Q(**{f"{name}__gt": at, f"{name}__lte": now}) for name in ("created_at", "claimed_at", "finished_at")),
        LessThanOrEqual(moved, at) | GreaterThan(moved, now),
    )


class BulkAction(OperationWork):
    """An action on many messages. ``arguments`` give the due times, and say what happens when all is done.

    Due times: "due" (ISO 8601), or "shift" (seconds from each message's own due time), for a reschedule; "now" for a
    requeue that gives up due times which are still to come; "spread" (seconds). A move has a "queue", a "priority", or
    both. "resume" names a queue whose pause the
    operation took over: it is resumed when all is done. "undoes" is the id of an operation, whose moves are taken back
    where they are the last ones of their messages.
    """

    action: ClassVar[Action]

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        self.ids = unpacked(scope["ids"])
        self.times = DueTimes(
            due_at=datetime.fromisoformat(arguments["due"]) if arguments.get("due") else None,
            delay=NO_TIME if arguments.get("now") else None,
            shift=timedelta(seconds=arguments["shift"]) if arguments.get("shift") is not None else None,
            spread=timedelta(seconds=arguments.get("spread") or 0),
            queue=arguments.get("queue"),
            priority=arguments.get("priority"),
        )
        # The messages that a spread leaves out.
        self.keeping = unpacked(scope.get("later", "")) if self.times.name_none else ()
        is_timed = "shift" in self.action.verb.options and not arguments.get("undoes")
        if is_timed and (self.times.due_at is None) == (self.times.shift is None):
            raise ValueError(f"{self.name} needs either due or shift")

    @classmethod
    def needed(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return (*cls.verbs, "resume") if arguments.get("resume") else cls.verbs

    def act(self, using: str, ids: Sequence[int], times: DueTimes, reason: str) -> Counter[str]:
        """Do the action to these messages, and return the number of messages by outcome."""
        answers = self.action.apply(using, ids, times=times, reason=reason)
        return Counter(str(answer.verdict.value) for answer in answers)

    def count(self, using: str) -> int | None:
        return len(self.ids)

    def step(self, using: str, operation: Operation) -> Step:
        place = bisect_right(self.ids, int(operation.position or 0))
        page = self.ids[place : place + tuning.step_messages]
        if self.arguments.get("undoes"):
            outcomes = self._undo(using, page, operation)
        else:
            times = actions.spread_among(self.times, self.ids, self.keeping)
            outcomes = self.act(using, page, times, operation.reason)
        is_finished = place + len(page) >= len(self.ids)
        if is_finished and self.arguments.get("resume"):
            pausing.release(using, holder(operation))
        return Step(len(page), outcomes, str(page[-1]) if page else operation.position, is_finished)

    def _undo(self, using: str, ids: Sequence[int], operation: Operation) -> Counter[str]:
        """Give each message the times that it had before the operation that is undone."""
        undone = Operation.objects.using(using).filter(pk=self.arguments["undoes"]).first()
        former = [] if undone is None else before(using, undone, ids)
        outcomes = Counter({"changed": len(ids) - sum(len(some) for _times, some in former)})
        for times, some in former:
            outcomes += self.act(using, some, times, operation.reason)
        return outcomes


def before(using: str, operation: Operation, ids: Sequence[int]) -> list[tuple[DueTimes, list[int]]]:
    """Lock messages, and return for those that have not moved since what takes back the move of an operation.

    Messages that go back to one queue and priority are together, and so are all that get their due times back.
    """
    locks = locked(using, Message.objects.using(using).filter(pk__in=ids).order_by("pk"), wait=True)
    moves = dict(locks.values_list("pk", "moves"))
    log = LogRow.objects.using(using)
    rows = log.filter(
        message_id__in=ids,
        actor=operation.started_by,
        from_state=State.SCHEDULED,
        to_state=State.CANCELLED if operation.action == "cancel" else State.SCHEDULED,
        at__gte=operation.created_at,
        at__lte=operation.finished_at or reads.now(using),
    )
    read = rows.values_list("message_id", "number", "reason")
    last = {pk: reason for pk, number, reason in read if number == moves.get(pk)}
    if operation.action == actions.MOVE.name:
        alike: defaultdict[DueTimes, list[int]] = defaultdict(list)
        for pk, reason in last.items():
            if (times := times_before(reason, operation.reason)) is not None:
                alike[times].append(pk)
        return [*alike.items()]
    now, own = reads.now(using), [pk for pk, reason in last.items() if reason == operation.reason]
    former = log.filter(message_id__in=own).values_list("message_id", "number", "due_at")
    dues = {pk: max(due, now) for pk, number, due in former if number == moves[pk] - 1}
    return [(DueTimes(dues=dues), sorted(dues))]


# The action that undoes another one.
UNDONE_BY = {"cancel": "requeue", "reschedule": "reschedule", "run": "reschedule", "move": "move"}


def _bulk(action: Action) -> type[BulkAction]:
    """Return the work of an action."""
    return type(
        action.name.capitalize(), (BulkAction,), {"action": action, "name": action.name, "verbs": (action.name, "bulk")}
    )


# --- the consistency check --------------------------------------------------------------------------------------------


class CheckWork(RedisWork):
    """Compares the record with Redis and changes nothing. The position of the operation keeps the results."""

    name = "check"

    def step(self, using: str, operation: Operation) -> Step:
        results = results_of(operation)
        mine = Operation.objects.using(using).filter(pk=operation.pk, worker=operation.worker)
        renewed = time.monotonic()

        def renew(_done: int) -> None:
            """Renew the lease while a long step goes on."""
            nonlocal renewed
            if time.monotonic() - renewed >= 1.0:
                renewed = time.monotonic()
                mine.update(leased_until=lease_from(reads.now(using)))

        with self.redis(using) as broker:
            left = [queue for queue in queues(using, broker) if queue not in results]
            if not left:
                return Step(position=operation.position, finished=True)
            # Nothing renews the lease during the pause between the two looks.
            check = ConsistencyCheck(using, broker, left[0], pause=min(conf.get().GRACE, tuning.lease / 2))
            found = check.run(renew)
        counts = {mismatch.value: found.counts[mismatch] for mismatch in Mismatch}
        results[left[0]] = {"compared": found.compared, **counts, "stuck": stuck(using, left[:1]).count}
        outcomes = {word: number for word, number in counts.items() if number}
        return Step(found.compared, outcomes, json.dumps(results), finished=len(left) == 1)


def results_of(operation: Operation) -> dict[str, dict[str, int]]:
    """Return the results of a check so far, by queue: the numbers of messages compared, and of each mismatch."""
    results: dict[str, dict[str, int]] = json.loads(operation.position or "{}")
    return results


# --- restores ---------------------------------------------------------------------------------------------------------


def scope_of(selection: Selection) -> dict[str, Any]:
    """Return the selection for ``Operation.scope``."""
    times = {"due_after": _iso(selection.due_after), "due_before": _iso(selection.due_before)}
    return {**selection._asdict(), **times}


def arguments_of(overdue: Overdue, spread: float, *, no_expired: bool) -> dict[str, Any]:
    """Return the options of a restore for ``Operation.arguments``."""
    return {"overdue": overdue.value, "spread": spread, "no_expired": no_expired}


def outcomes_of(tally: Tally) -> dict[str, int]:
    """Return the counts of a restore for ``Operation.outcomes``."""
    words = {
        "put": tally.put,
        "there already": tally.present,
        "given up": tally.dead,
        "cancelled": tally.cancelled,
        "spread": tally.spread,
        "beyond": tally.later,
        "expired": tally.expired,
    }
    return {word: number for word, number in words.items() if number}


class RestoreWork(RedisWork):
    """Restores in steps of about a second. It clears nothing, and a step that is done twice changes nothing."""

    name = "restore"

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        chosen: dict[str, Any] = {name: tuple(scope.get(name, ())) for name in ("queues", "topics", "ids")}
        chosen |= {name: datetime.fromisoformat(at) for name in ("due_after", "due_before") if (at := scope.get(name))}
        self.selection = Selection(**chosen)
        self.options: dict[str, Any] = {
            "overdue": Overdue(arguments.get("overdue", Overdue.RUN)),
            "spread": float(arguments.get("spread", 0.0)),
            "no_expired": bool(arguments.get("no_expired", False)),
        }

    def restore(self, using: str, broker: RedisBroker, position: str = "", holder: str = "") -> Restore:
        """Return the restore itself, from a position on."""
        return Restore(using, broker, self.selection, **self.options, resume=position or None, holder=holder)

    def queued(self, using: str, operation: Operation) -> None:
        """Hold the queues until a worker has changed their overdue messages, so that nobody claims one before that."""
        with self.redis(using) as broker:
            restore = self.restore(using, broker, operation.position, holder(operation))
            restore.hold(until_release=True)
        if restore.stood_still:
            # Messages that fell due meanwhile are overdue, too: the restore begins again.
            Operation.objects.using(using).filter(pk=operation.pk).update(position="")

    @classmethod
    def ended(cls, using: str, operation: Operation) -> None:
        pausing.release(using, holder(operation))

    def count(self, using: str) -> int | None:
        expected = None
        # The overdue messages come first, and need no Redis.
        with self.redis(using) as broker, without_redis():
            expected = in_time(using, timeouts.count, lambda: self.restore(using, broker).preview().expected())
        return expected  # noqa: RET504 (None while Redis is away)

    def step(self, using: str, operation: Operation) -> Step:
        batches: list[int] = []
        with self.redis(using) as broker:
            restore = self.restore(using, broker, operation.position, holder(operation))
            restore.prepare()
            end = time.monotonic() + tuning.step_seconds
            # Each step does at least one batch, or a restore with slow batches would never end.
            try:
                restore.run(should_stop=lambda: bool(batches) and time.monotonic() >= end, progress=batches.append)
            except BrokerUnavailable:
                # The batches that were done until then count. If Redis stays away, the next step raises.
                if not batches:
                    raise
            report = restore.report
        done, outcomes = sum(batches), outcomes_of(report.total())
        if report.position is None and operation.total is not None:
            counts = Counter(outcomes) + Counter(operation.outcomes)
            gone = _gone(counts, operation.done + done, operation.total)
            outcomes, done = outcomes | gone, max(done, operation.total - operation.done)
        return Step(done, outcomes, report.position or "", report.position is None)


def _gone(outcomes: Mapping[str, int], done: int, total: int) -> dict[str, int]:
    """Return the outcome of the messages that a complete restore had counted, and that it found no more.

    They ran, or were cancelled or rescheduled, before their turn came; or a step of this restore changed them, and its
    worker died before it could write the outcomes. Messages that expired have an outcome of their own.
    """
    number = total - done - outcomes.get("expired", 0)
    return {"no longer scheduled": number} if number > 0 else {}


class RestoreOperation(RestoreObserver):
    """Shows a restore of a command or a loader among the operations, and updates it once a second.

    Its methods do not raise database errors: the restore goes on when its operation cannot be written. When the
    process dies, a worker finishes the operation after its lease has run out.
    """

    def __init__(self, start: RestoreStart) -> None:
        self.using = start.using
        self.worker = f"{start.who}/{os.getpid()}/{secrets.token_hex(3)}"[: LENGTHS.actor]
        self._stop_requested = False
        self._done = 0
        self._total = start.total
        self._written = time.monotonic()
        # None: there is no operation yet, or it could not be written.
        self._operation: Operation | None = None

        def write(now: datetime) -> None:
            self._operation = Operation.objects.using(start.using).create(
                action=RestoreWork.name,
                scope=scope_of(start.selection),
                arguments=arguments_of(start.overdue, start.spread, no_expired=start.no_expired),
                described=storable(start.described),
                started_by=actors.current(),
                state=OperationState.RUNNING,
                total=start.total,
                worker=self.worker,
                created_at=now,
                started_at=now,
                leased_until=lease_from(now),
            )

        self._try(write)

    def progress(self, messages: int, tally: Tally, position: str | None) -> bool:
        self._done += messages
        if time.monotonic() - self._written >= 1.0:
            self._write(outcomes=outcomes_of(tally), position=position or "")
        return self._stop_requested

    def ended(self, tally: Tally, position: str | None, error: str) -> None:
        state = OperationState.DONE if position is None else OperationState.STOPPED
        if error:
            state = OperationState.FAILED
        outcomes = outcomes_of(tally)
        if state == OperationState.DONE and self._total is not None:
            outcomes |= _gone(outcomes, self._done, self._total)
            self._done = max(self._done, self._total)
        self._write(outcomes=outcomes, position=position or "", state=state, error=storable(error), **FREE)
        self._operation = None

    def _write(self, **values: Any) -> None:
        """Write what is known, and renew the lease; with a state, the restore has ended."""
        self._written = time.monotonic()
        if self._operation is None:
            return
        rows = Operation.objects.using(self.using).filter(pk=self._operation.pk, worker=self.worker)

        def write(now: datetime) -> None:
            times = {"finished_at": now} if "state" in values else {"leased_until": lease_from(now)}
            rows.update(**{"done": self._done, **values, **times})
            if "state" not in values:
                self._stop_requested = rows.filter(stop_requested=True).exists()

        self._try(write)

    def _try(self, write: Callable[[datetime], None]) -> None:
        try:
            with own_transaction(self.using):
                write(reads.now(self.using))
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The operation that shows this restore could not be written; the restore goes on: %s", error)


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat()


_KINDS: list[type[OperationWork]] = [*map(_bulk, actions.ACTIONS.values()), CheckWork, RestoreWork]
WORKS = {kind.name: kind for kind in _KINDS}
