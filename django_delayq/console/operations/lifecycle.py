"""The life of an operation: started, taken by a worker under a lease, done in steps, stopped, resumed, failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Q, QuerySet

from ... import actors, transitions
from ...outcomes import storable
from ...sql.moves import writing
from ..models import Operation
from .work import WORKS, Step, Work

# A worker that did not finish a step, or say anything, for this long has lost the operation. Seconds.
LEASE = 10.0

OPEN = ("queued", "running")


class LostLease(Exception):
    """Somebody else works on the operation now, or it was stopped: what this step did is rolled back."""


def start(
    using: str,
    verb: str,
    scope: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    described: str,
    reason: str,
    started_by: str,
) -> Operation:
    """Queue an operation; a worker begins within seconds. ``scope`` and ``arguments`` are what the verb's work reads.

    ``described`` is the scope in words, ``started_by`` an actor such as "user:anna".
    """
    # An unknown verb, or a scope that it cannot read, is refused here and not in the worker.
    WORKS[verb](scope, arguments)
    return Operation.objects.using(using).create(
        verb=verb,
        scope=dict(scope),
        arguments=dict(arguments),
        described=storable(described),
        reason=storable(reason),
        started_by=started_by[: actors.LENGTH],
        created_at=transitions.now(using),
    )


def stop(operation: Operation) -> bool:
    """Ask for a stop: it comes between two steps, or at once when nobody works on it. False: it has ended already."""
    using = _db(operation)
    now = transitions.now(using)
    rows = Operation.objects.using(using).filter(pk=operation.pk, state__in=OPEN)
    if not rows.update(stop_requested=True):
        return False
    idle = rows.filter(_free(now))
    idle.update(state=Operation.State.STOPPED, finished_at=now, worker="", leased_until=None)
    return True


def is_resumable(operation: Operation) -> bool:
    """Whether it was ended before it was through."""
    return operation.state in (Operation.State.STOPPED, Operation.State.FAILED)


def resume(operation: Operation) -> bool:
    """Let it go on where it ended. False: it has nothing to go on with, or goes on already."""
    using = _db(operation)
    ended = (Operation.State.STOPPED, Operation.State.FAILED)
    rows = Operation.objects.using(using).filter(pk=operation.pk, state__in=ended)
    return bool(
        rows.update(
            state=Operation.State.QUEUED,
            stop_requested=False,
            finished_at=None,
            error="",
            worker="",
            leased_until=None,
        )
    )


def has_open(using: str) -> bool:
    """Whether there is any operation to do, or being done: one cheap look."""
    return Operation.objects.using(using).filter(state__in=OPEN).exists()


def take(using: str, worker: str) -> Operation | None:
    """The oldest operation that nobody works on, taken for ``worker``; None when there is none."""
    for operation in (
        Operation.objects.using(using).filter(_free(transitions.now(using)), state__in=OPEN).order_by("id")
    ):
        if _lease(using, operation, worker):
            return operation
    return None


def give_back(using: str, worker: str) -> None:
    """The worker ends in order: somebody else may go on at once."""
    rows = Operation.objects.using(using).filter(state=Operation.State.RUNNING, worker=worker)
    free: dict[str, Any] = {"worker": "", "leased_until": None}
    stopped = rows.filter(stop_requested=True)
    stopped.update(state=Operation.State.STOPPED, finished_at=transitions.now(using), **free)
    rows.update(state=Operation.State.QUEUED, **free)


def fail(using: str, operation: Operation, worker: str, error: str) -> bool:
    """It cannot go on. False: the lease was lost."""
    rows = _held(using, operation, worker)
    now = transitions.now(using)
    return bool(
        rows.update(state=Operation.State.FAILED, error=storable(error), finished_at=now, worker="", leased_until=None)
    )


def run_step(using: str, operation: Operation, worker: str) -> bool:
    """Do one step of an operation under a lease, and write down what came of it. Returns whether there is more to do.

    Only who holds the lease writes: should it be lost, False, and a step that only writes to the record is undone.
    Whatever the step raises comes through.
    """
    if not _lease(using, operation, worker):
        return False
    if operation.stop_requested:
        _finish(using, operation, worker, Operation.State.STOPPED)
        return False
    work = WORKS[operation.verb](operation.scope, operation.arguments)
    if operation.started_at is None:
        _begin(using, operation, worker, work)
    try:
        with _acting(operation, worker), writing(using) if work.atomic else nullcontext():
            step = work.step(using, operation)
            _write(using, operation, worker, step)
    except LostLease:
        return False
    return not step.finished


def _acting(operation: Operation, worker: str) -> AbstractContextManager[None]:
    return actors.acting_as(operation.started_by or f"worker:{worker}")


def _free(now: datetime) -> Q:
    return Q(leased_until__isnull=True) | Q(leased_until__lt=now)


def _db(operation: Operation) -> str:
    return operation._state.db or "default"


def _held(using: str, operation: Operation, worker: str) -> QuerySet[Operation]:
    return Operation.objects.using(using).filter(pk=operation.pk, state=Operation.State.RUNNING, worker=worker)


def _lease(using: str, operation: Operation, worker: str) -> bool:
    """Take it, or hold it longer; the object then is as the row. One conditional UPDATE decides."""
    now = transitions.now(using)
    rows = Operation.objects.using(using).filter(_free(now) | Q(worker=worker), pk=operation.pk, state__in=OPEN)
    if not rows.update(state=Operation.State.RUNNING, worker=worker, leased_until=now + timedelta(seconds=LEASE)):
        return False
    operation.refresh_from_db(using=using)
    return operation.worker == worker


def _begin(using: str, operation: Operation, worker: str, work: Work) -> None:
    held = _held(using, operation, worker)
    operation.started_at = transitions.now(using)
    # To count may outlast the lease: whoever takes it over meanwhile goes on without, or they would count for ever.
    held.update(started_at=operation.started_at)
    try:
        operation.total = work.count(using)
    except BaseException:
        operation.started_at = None
        held.update(started_at=None)
        raise
    held.update(total=operation.total)


def _write(using: str, operation: Operation, worker: str, step: Step) -> None:
    now = transitions.now(using)
    values: dict[str, Any] = {
        "done": F("done") + step.done,
        "outcomes": dict(Counter(operation.outcomes) + Counter(dict(step.outcomes))),
        "position": step.position,
        "leased_until": now + timedelta(seconds=LEASE),
    }
    if step.finished:
        values |= {"state": Operation.State.DONE, "finished_at": now, "worker": "", "leased_until": None}
    if not _held(using, operation, worker).update(**values):
        raise LostLease


def _finish(using: str, operation: Operation, worker: str, state: Operation.State) -> None:
    now = transitions.now(using)
    _held(using, operation, worker).update(state=state, finished_at=now, worker="", leased_until=None)
