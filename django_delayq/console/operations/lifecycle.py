"""The life of an operation: started, leased by a worker, done in steps, stopped, resumed, failed; and who does it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import Any

from django.db import router
from django.db.models import DateTimeField, F, Q, QuerySet, Value

from ...core import actors
from ...core.exceptions import BrokerUnavailable
from ...core.outcomes import storable
from ...extensions import Service
from ...record import reads
from ...record.sql.moves import writing
from ...record.sql.troubles import Trouble, trouble
from ..console_tuning import tuning
from ..models import Operation, OperationState
from ..statements import console_statements
from .work import FREE, WORKS, OperationWork, Step, lease_from

# The beginning of the name under which a worker loads Redis by itself.
LOADER = "loader:"

OPEN = (OperationState.QUEUED, OperationState.RUNNING)
# The states in which an operation may be resumed: it ended before all was done.
ENDED_EARLY = (OperationState.STOPPED, OperationState.FAILED)


class LostLease(Exception):
    """Another worker has the operation now, or it was stopped: what this step did is rolled back."""


def start(
    using: str,
    action: str,
    scope: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    described: str,
    reason: str,
    outcomes: Mapping[str, int] | None = None,
) -> Operation:
    """Queue an operation of the current actor; a worker begins within seconds.

    The work of the action reads ``scope`` and ``arguments``. ``described`` is the scope in words, ``outcomes`` those
    that are known before it begins.
    """
    # An unknown action, or a scope that its work cannot read, is refused here and not in the worker.
    work = WORKS[action](scope, arguments)
    with writing(using):
        operation = Operation.objects.using(using).create(
            action=action,
            scope=dict(scope),
            arguments=dict(arguments),
            described=storable(described),
            reason=storable(reason),
            started_by=actors.current(),
            created_at=reads.now(using),
            outcomes=dict(outcomes or {}),
        )
        work.queued(using, operation)
    return operation


def stop(operation: Operation) -> bool:
    """Stop an operation between two steps, or at once when no worker has it.

    Return False when it has ended already, or is the load of a worker, which nobody stops: another one would begin it.
    """
    using = _db(operation)
    now = reads.now(using)
    rows = Operation.objects.using(using).filter(pk=operation.pk, state__in=OPEN)
    rows = rows.exclude(worker__startswith=LOADER, leased_until__gt=now)
    if not rows.update(stop_requested=True):
        return False
    idle = rows.filter(_free(now))
    if idle.update(state=OperationState.STOPPED, finished_at=now, **FREE):
        _ended(using, operation)
    return True


def resume(operation: Operation) -> bool:
    """Queue an operation again; it goes on where it stopped. Return False when it is done, or open already."""
    using = _db(operation)
    rows = Operation.objects.using(using).filter(pk=operation.pk, state__in=ENDED_EARLY)
    with writing(using):
        # The duration of the operation does not include the time for which it stood still.
        started_at = F("started_at") + (Value(reads.now(using), DateTimeField()) - F("finished_at"))
        queued = {"state": OperationState.QUEUED, "stop_requested": False, "error": "", **FREE}
        is_queued = rows.update(**queued, started_at=started_at, finished_at=None)
        if is_queued:
            _work(operation).queued(using, operation)
    return bool(is_queued)


def newest(using: str, action: str, *ended: OperationState) -> tuple[Operation | None, Operation | None]:
    """Return the operation of an action that ended last, in one of these states if any is given, and the open one."""
    rows = Operation.objects.using(using).filter(action=action)
    is_last = Q(state__in=ended) if ended else Q(finished_at__isnull=False)
    last = rows.filter(is_last).order_by("-finished_at", "-pk").values("pk")[:1]
    found = {row.state in OPEN: row for row in rows.filter(Q(pk__in=last) | Q(state__in=OPEN)).order_by("pk")}
    return found.get(False), found.get(True)


@contextmanager
def starting(using: str) -> Iterator[None]:
    """Open a transaction in which no other process starts what ``newest`` does not find open."""
    with writing(using):
        console_statements(using).wait_for_other_starts()
        yield


def waiting(using: str) -> QuerySet[Operation]:
    """Find the open operations that no worker has, the oldest first.

    While no operation is open, which is nearly always, this is one small query.
    """
    rows = Operation.objects.using(using).filter(state__in=OPEN)
    return rows.filter(_free(reads.now(using))).order_by("id") if rows.exists() else rows.none()


def lease_next(using: str, worker: str) -> Operation | None:
    """Lease the oldest open operation that no worker has, and return it; None when there is none."""
    for operation in waiting(using):
        if _lease(using, operation, worker):
            return operation
    return None


def release(using: str, worker: str) -> None:
    """Give up the lease of a worker that stops in order, so that another worker can go on at once."""
    rows = Operation.objects.using(using).filter(state=OperationState.RUNNING, worker=worker)
    for operation in rows.filter(stop_requested=True):
        _finish(using, operation, worker, OperationState.STOPPED)
    rows.update(state=OperationState.QUEUED, **FREE)


def fail(using: str, operation: Operation, worker: str, error: str) -> bool:
    """End an operation with an error. Return False when the lease was lost."""
    return _finish(using, operation, worker, OperationState.FAILED, error=storable(error))


def run_step(using: str, operation: Operation, worker: str) -> bool:
    """Do one step of an operation under a lease, and save its result. Return whether there is more to do.

    Only the holder of the lease saves: when the lease was lost, the answer is False, and a step that only writes to
    the record is rolled back. What the step raises is not caught.
    """
    if not _lease(using, operation, worker):
        return False
    if operation.stop_requested:
        _finish(using, operation, worker, OperationState.STOPPED)
        return False
    work = _work(operation)
    if operation.started_at is None:
        _begin(using, operation, worker, work)
    try:
        with (
            actors.acting_as(operation.started_by or f"worker:{worker}"),
            writing(using) if work.atomic else nullcontext(),
        ):
            step = work.step(using, operation)
            _write(using, operation, worker, step)
    except LostLease:
        return False
    return not step.finished


def _free(now: datetime) -> Q:
    # A lease that ends later was written by a clock that was ahead.
    longest = lease_from(now) + timedelta(minutes=1)
    return Q(leased_until__isnull=True) | Q(leased_until__lt=now) | Q(leased_until__gt=longest)


def _db(operation: Operation) -> str:
    # The operation may have been read from a replica.
    return router.db_for_write(Operation, instance=operation)


def _held(using: str, operation: Operation, worker: str) -> QuerySet[Operation]:
    return Operation.objects.using(using).filter(pk=operation.pk, state=OperationState.RUNNING, worker=worker)


def _lease(using: str, operation: Operation, worker: str) -> bool:
    """Get or renew the lease by one conditional UPDATE, and refresh the object. Return whether the worker has it."""
    now = reads.now(using)
    rows = Operation.objects.using(using).filter(_free(now) | Q(worker=worker), pk=operation.pk, state__in=OPEN)
    if not rows.update(state=OperationState.RUNNING, worker=worker, leased_until=lease_from(now)):
        return False
    operation.refresh_from_db(using=using)
    return operation.worker == worker


def _begin(using: str, operation: Operation, worker: str, work: OperationWork) -> None:
    """Note that the operation has started, and count the messages it is about."""
    held = _held(using, operation, worker)
    operation.started_at = reads.now(using)
    # Counting may take longer than the lease. A worker that takes over meanwhile must not count again, or nobody would
    # ever finish.
    held.update(started_at=operation.started_at)
    try:
        operation.total = work.count(using)
    except BaseException:
        operation.started_at = None
        held.update(started_at=None)
        raise
    held.update(total=operation.total)


def _write(using: str, operation: Operation, worker: str, step: Step) -> None:
    """Write what a step did, and renew the lease of the operation."""
    now = reads.now(using)
    values: dict[str, Any] = {
        "done": F("done") + step.done,
        "outcomes": dict(Counter(operation.outcomes) + Counter(dict(step.outcomes))),
        "position": step.position,
        "leased_until": lease_from(now),
    }
    if step.finished:
        values |= {"state": OperationState.DONE, "finished_at": now, **FREE}
    if not _held(using, operation, worker).update(**values):
        raise LostLease
    if step.finished:
        _ended(using, operation)


def _finish(using: str, operation: Operation, worker: str, state: OperationState, error: str = "") -> bool:
    now = reads.now(using)
    ended = _held(using, operation, worker).update(state=state, error=error, finished_at=now, **FREE)
    if ended:
        _ended(using, operation)
    return bool(ended)


def _ended(using: str, operation: Operation) -> None:
    # The work of an operation may be gone with the app that registered it.
    if operation.action in WORKS:
        WORKS[operation.action].ended(using, operation)


def _work(operation: Operation) -> OperationWork:
    return WORKS[operation.action](operation.scope, operation.arguments)


logger = logging.getLogger("django_delayq")


# --- the service in a worker ------------------------------------------------------------------------------------------


class OperationLook(Service):
    """Looks for operations, for a runner: the thread of the upkeep has a connection already."""

    name = "operation look"
    is_shared = True
    interval = 5.0

    def __init__(self, runner: OperationRunner) -> None:
        self._runner = runner

    def tick(self) -> float:
        if waiting(self._runner.using).exists():
            self._runner.may_find.set()
        return self.interval


class OperationRunner(Service):
    """Does one operation at a time. While there is none, its thread has no connection: ``OperationLook`` looks."""

    # The name of the role, too.
    name = "operator"
    thread = "operator"
    # The time between two looks at ``may_find``. Seconds.
    interval = 1.0

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        # Set while an operation may wait, also in the thread of the upkeep.
        self.may_find = threading.Event()
        self.may_find.set()
        self._current: Operation | None = None
        self._failures = 0

    @property
    def uses_database(self) -> bool:  # type: ignore[override]
        return self.may_find.is_set()

    def tick(self) -> float:
        operation = self._current or self._next()
        if operation is None:
            return self.interval
        try:
            more = run_step(self.using, operation, self.worker)
        except Exception as error:
            self._failed(operation, error)
            raise
        self._failures = 0
        if not more:
            self._current = None
        return 0.0

    def _next(self) -> Operation | None:
        """Lease the next operation, if one may wait."""
        if self.may_find.is_set():
            self._current = lease_next(self.using, self.worker)
            if self._current is None:
                self.may_find.clear()
            else:
                logger.info("Working on operation %s", self._current)
        return self._current

    def release(self) -> None:
        """Release the operation, if there is one, when the process stops in order: another worker goes on at once."""
        if self._current is not None:
            release(self.using, self.worker)

    def _failed(self, operation: Operation, error: Exception) -> None:
        """Fail the operation after some failures in a row; those while the database or Redis is away do not count."""
        if isinstance(error, BrokerUnavailable):
            # Meanwhile an operation that needs no Redis may begin. This one is leased again when its lease has run out.
            self._current = None
            return
        if trouble(error) == Trouble.AWAY:
            return
        self._failures += 1
        if self._failures >= tuning.step_failures:
            text = f"{type(error).__name__}: {error}"
            logger.error("Operation %s failed after %d tries of a step: %s", operation, self._failures, text)
            fail(self.using, operation, self.worker, text)
            self._failures, self._current = 0, None
