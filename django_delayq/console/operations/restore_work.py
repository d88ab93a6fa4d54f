"""Restores as operations: those that people start in the admin, and those that commands and loaders do themselves."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.db import DatabaseError, InterfaceError

from ...api import pausing
from ...broker import RedisBroker
from ...core import actors
from ...core.exceptions import BrokerUnavailable
from ...core.outcomes import storable
from ...extensions import RestoreObserver, RestoreStart
from ...record import transitions
from ...record.sql.sessions import own_transaction
from ...restore.engine import Restore, without_redis
from ...restore.selection import Overdue, Selection, Tally
from ..models import Operation, OperationState
from ..statements import in_time
from .lifecycle import FREE, lease_from
from .work import COUNT_TIMEOUT_MS, RedisWork, Step, holder, register

logger = logging.getLogger("django_delayq")

# The duration of a step.
STEP_SECONDS = 1.0


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


@register
class RestoreWork(RedisWork):
    """Restores in steps of about a second. It clears nothing, and a step that is done twice changes nothing."""

    name = "restore"

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        chosen: dict[str, Any] = {name: tuple(scope.get(name, ())) for name in ("queues", "topics", "ids")}
        chosen |= {name: _moment(scope.get(name)) for name in ("due_after", "due_before")}
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
        """Hold the queues until a worker has changed their overdue messages: it could claim some before that."""
        with self.redis(using) as broker:
            restore = self.restore(using, broker, operation.position, holder(operation))
            restore.hold(None)
        if restore.stood_still:
            # What fell due meanwhile is overdue, too: it begins again.
            Operation.objects.using(using).filter(pk=operation.pk).update(position="")

    @classmethod
    def ended(cls, using: str, operation: Operation) -> None:
        pausing.release(using, holder(operation))

    def count(self, using: str) -> int | None:
        expected = None
        # The overdue messages come first, and need no Redis.
        with self.redis(using) as broker, without_redis():
            expected = in_time(using, COUNT_TIMEOUT_MS, lambda: self.restore(using, broker).preview().expected())
        return expected  # noqa: RET504 (None while Redis is away)

    def step(self, using: str, operation: Operation) -> Step:
        batches: list[int] = []
        with self.redis(using) as broker:
            restore = self.restore(using, broker, operation.position, holder(operation))
            restore.prepare()
            end = time.monotonic() + STEP_SECONDS
            # At least one batch is done, or a restore with slow batches would never end.
            try:
                restore.run(should_stop=lambda: bool(batches) and time.monotonic() >= end, progress=batches.append)
            except BrokerUnavailable:
                # What was done until then counts. The next step raises.
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

    They ran, or were cancelled or rescheduled, before their turn came; or by a step of this restore whose worker died
    before it could write its outcomes. Those that expired have an outcome of their own.
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
        self.worker = f"{start.who}/{os.getpid()}/{secrets.token_hex(3)}"[: actors.LENGTH]
        self._stop_requested = False
        self._done = 0
        self._total = start.total
        self._written = time.monotonic()
        self._operation: Operation | None = None
        values = {
            "action": RestoreWork.name,
            "scope": scope_of(start.selection),
            "arguments": arguments_of(start.overdue, start.spread, no_expired=start.no_expired),
            "described": storable(start.described),
            "started_by": actors.current(),
            "state": OperationState.RUNNING,
            "total": start.total,
            "worker": self.worker,
        }
        self._try(lambda now: self._begin(now, values))

    def progress(self, messages: int, tally: Tally, position: str | None) -> bool:
        self._done += messages
        if time.monotonic() - self._written >= 1.0:
            self._write(tally, position, {})
        return self._stop_requested

    def ended(self, tally: Tally, position: str | None, error: str) -> None:
        state = OperationState.DONE if position is None else OperationState.STOPPED
        if error:
            state = OperationState.FAILED
        values: dict[str, Any] = {"state": state, "error": storable(error), **FREE}
        if state == OperationState.DONE and self._total is not None:
            outcomes = outcomes_of(tally)
            values["outcomes"] = outcomes | _gone(outcomes, self._done, self._total)
            self._done = max(self._done, self._total)
        self._write(tally, position, values, ended=True)
        self._operation = None

    def _begin(self, now: datetime, values: dict[str, Any]) -> None:
        rows = Operation.objects.using(self.using)
        self._operation = rows.create(**values, created_at=now, started_at=now, leased_until=lease_from(now))

    def _write(self, tally: Tally, position: str | None, values: dict[str, Any], *, ended: bool = False) -> None:
        self._written = time.monotonic()
        operation = self._operation
        if operation is None:
            return
        rows = Operation.objects.using(self.using).filter(pk=operation.pk, worker=self.worker)

        def write(now: datetime) -> None:
            times = {"finished_at": now} if ended else {"leased_until": lease_from(now)}
            counted = {"done": self._done, "outcomes": outcomes_of(tally), "position": position or ""}
            rows.update(**{**counted, **values, **times})
            if not ended:
                self._stop_requested = rows.filter(stop_requested=True).exists()

        self._try(write)

    def _try(self, write: Any) -> None:
        try:
            with own_transaction(self.using):
                write(transitions.now(self.using))
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The operation that shows this restore could not be written; the restore goes on: %s", error)


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat()


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
