"""Writes outcomes down, many in one statement, until the database answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.db import DataError, IntegrityError
from django.db import Error as DatabaseError

from .. import failpoints, publisher, signals, transitions
from ..broker.base import Entry
from ..extensions import WorkerExtensions
from ..models import Message
from ..outcomes import Ack, DeadLetter, Outcome, Recorded, Release, Retry
from ..sql.rows import Failure, Moved, Success
from ..states import State
from . import connections
from .delivery import Delivery
from .service import backoff

logger = logging.getLogger("django_delayq")

# Outcomes in one statement.
BATCH = 500
# Batches begin no more often than this, unless they are large: each costs a commit, and claims wait for the disk behind
# it. An outcome after a pause is written at once. Seconds.
GATHER = 0.005
MANY = 100
# Outcomes of rows that somebody else's transaction has locked are tried again after this time. Seconds.
LOCKED = 0.1

SUCCESS = (Ack, Recorded)


class Ended(NamedTuple):
    delivery: Delivery
    outcome: Outcome
    actor: str
    at: float


class Recorder(threading.Thread):
    """Group commit: while one batch is being written the next one gathers, so batches grow with the load.

    ``done`` is called with the number of deliveries that are off the worker's hands.
    """

    def __init__(self, using: str, done: Callable[[int], None], extensions: WorkerExtensions) -> None:
        super().__init__(name="delayq-recorder", daemon=True)
        self.using = using
        self.extensions = extensions
        self._done = done
        self._pending: deque[Ended] = deque()
        self._locked: list[Ended] = []
        self._writing_since: float | None = None
        self._some = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stopping = False

    def submit(self, delivery: Delivery, outcome: Outcome, actor: str) -> None:
        if self._idle.is_set():
            self._idle.clear()
        self._pending.append(Ended(delivery, outcome, actor, time.monotonic()))
        # The thread clears it before it looks at what is pending.
        if not self._some.is_set():
            self._some.set()

    def flush(self, timeout: float | None) -> bool:
        """Wait until everything submitted is written; False when that took too long."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._pending or not self._idle.is_set():
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0 or not self.is_alive():
                return False
            self._idle.wait(min(left, 1.0))
            if self._pending:
                time.sleep(0.001)
        return True

    @property
    def behind(self) -> float:
        """For how many seconds the database has not taken what it was given."""
        since = self._writing_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        self._stopping = True
        self._some.set()

    def run(self) -> None:
        began = 0.0
        try:
            while True:
                self._some.wait()
                self._some.clear()
                while self._pending:
                    self._idle.clear()
                    began = self._gather(began)
                    batch = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
                    self._writing_since = time.monotonic()
                    self._record([e for e in batch if isinstance(e.outcome, SUCCESS)], self._successes)
                    self._record([e for e in batch if not isinstance(e.outcome, SUCCESS)], self._failures)
                    self._writing_since = None
                    self._done(sum(not isinstance(e.outcome, Release) and e not in self._locked for e in batch))
                    self._try_locked_again()
                self._idle.set()
                if self._stopping and not self._pending:
                    return
        finally:
            connections.close_all()

    def _gather(self, began: float) -> float:
        """Let outcomes gather since the last batch ``began``, unless there are many; when this one begins."""
        early = began + GATHER - time.monotonic()
        if early > 0 and len(self._pending) < MANY:
            time.sleep(early)
        return time.monotonic()

    def _try_locked_again(self) -> None:
        """They stand behind the others, which must not wait for the end of somebody's long transaction."""
        if not self._locked:
            return
        if not self._pending:
            self._some.wait(LOCKED)
            self._some.clear()
        self._pending.extend(self._locked)
        self._locked = []

    def _record(self, batch: Sequence[Ended], write: Callable[[Sequence[Ended], bool], None]) -> None:
        failures = 0
        while batch:
            connections.before_task()
            try:
                failpoints.reach("before_record")
                write(batch, failures > 0)
                failpoints.reach("after_record")
            except (DataError, IntegrityError):
                self._bisect(batch, write)
                return
            except DatabaseError as error:
                failures += 1
                if failures == 1:
                    logger.warning("Outcomes wait for the database: %s: %s", type(error).__name__, error)
                time.sleep(backoff(failures, 2.0))
            except BaseException:
                # A receiver of a signal may raise anything; this thread must outlive it.
                logger.exception("Could not record %d outcomes; their leases will run out", len(batch))
                return
            else:
                if failures:
                    logger.info("Outcomes are being recorded again")
                return
            finally:
                connections.after_task()

    def _bisect(self, batch: Sequence[Ended], write: Callable[[Sequence[Ended], bool], None]) -> None:
        """One outcome that the database refuses must not hold up the others."""
        if len(batch) > 1:
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                self._record(half, write)
            return
        ended = batch[0]
        plain: Outcome | None = None
        if isinstance(ended.outcome, Retry) and ended.outcome.error != UNPRINTABLE:
            plain = Retry(ended.outcome.delay, UNPRINTABLE, counts=ended.outcome.counts)
        elif isinstance(ended.outcome, DeadLetter) and ended.outcome.error != UNPRINTABLE:
            plain = DeadLetter(UNPRINTABLE)
        if plain is None:
            logger.error("The outcome of message %d cannot be stored; its lease will run out", ended.delivery.id)
        else:
            self._record([ended._replace(outcome=plain)], write)

    def _successes(self, batch: Sequence[Ended], again: bool) -> None:
        acks = [ended for ended in batch if isinstance(ended.outcome, Ack)]
        consumed = transitions.succeed(
            self.using, [Success(e.delivery.id, e.delivery.deliveries, e.actor) for e in acks], wait=False
        )
        locked = self._live([e.delivery.id for e in acks if e.delivery.id not in consumed])
        told = []
        for ended in batch:
            if ended.delivery.id in locked and isinstance(ended.outcome, Ack):
                self._locked.append(ended)
            # After a lost reply the first try may have been the one that was committed.
            elif again or isinstance(ended.outcome, Recorded) or ended.delivery.id in consumed:
                told.append(ended)
            else:
                logger.warning("Outcome refused, somebody else ended this message: %s", ended.delivery)
        self.extensions.consumed([ended.delivery for ended in told])
        if logger.isEnabledFor(logging.INFO) or signals.message_succeeded.receivers:
            for ended in told:
                _tell_success(self.using, ended)

    def _failures(self, batch: Sequence[Ended], again: bool) -> None:
        failures = [_failure(ended) for ended in batch]
        moved = {m.id: m for m in transitions.fail(self.using, failures, wait=False)}
        live = self._live([failure.id for failure in failures if failure.id not in moved])
        publisher.put(
            self.using,
            [(m.queue, Entry.at(m.id, m.due_at, m.priority)) for m in moved.values() if m.after == State.SCHEDULED],
        )
        self.extensions.ended(list(moved.values()))
        retried = [m for f in failures if f.counts and (m := moved.get(f.id)) and m.after == State.SCHEDULED]
        self.extensions.retried(retried)
        for ended, failure in zip(batch, failures, strict=True):
            if live.get(failure.id) == (State.RUNNING, failure.delivery):
                self._locked.append(ended)
            else:
                _tell_failure(self.using, ended, failure, moved.get(failure.id))

    def _live(self, ids: list[int]) -> dict[int, tuple[State, int]]:
        return transitions.live_deliveries(self.using, ids) if ids else {}


UNPRINTABLE = "(the error's text could not be stored)"


def _failure(ended: Ended) -> Failure:
    delivery, outcome = ended.delivery, ended.outcome
    base = Failure(delivery.id, delivery.deliveries, ended.actor)
    match outcome:
        case Retry():
            return base._replace(
                delay=outcome.delay, counts=outcome.counts, error=outcome.error, traceback=outcome.traceback
            )
        case DeadLetter():
            return base._replace(dead=True, error=outcome.error, traceback=outcome.traceback)
        case Release():
            return base._replace(delay=outcome.delay, counts=False, reason=outcome.reason)
        case _:
            raise AssertionError(outcome)


def _tell_success(using: str, ended: Ended) -> None:
    delivery = ended.delivery
    runtime = ended.at - delivery.started_mono
    if logger.isEnabledFor(logging.INFO):
        log(
            logging.INFO,
            "consumed",
            delivery,
            lateness_ms=delivery.lateness * 1000,
            runtime_ms=runtime * 1000,
        )
    if signals.message_succeeded.receivers:
        facts = signals.message_arguments(delivery, using)
        signals.emit(signals.message_succeeded, Message, delivery=delivery.deliveries, runtime=runtime, **facts)


def _tell_failure(using: str, ended: Ended, failure: Failure, moved: Moved | None) -> None:
    delivery = ended.delivery
    if moved is None:
        logger.warning("Outcome refused, another delivery is the current one: %s", delivery)
        return
    signals.emit_end(Message, moved, using, error=failure.error)
    if moved.after == State.DEAD:
        log(logging.ERROR, "dead", delivery, error=failure.error.split(":")[0][:80])
    elif moved.after == State.CANCELLED:
        log(logging.INFO, "cancelled", delivery)
    elif failure.counts:
        log(logging.WARNING, "retried", delivery, due=moved.due_at, error=failure.error.split(":")[0][:80])
        signals.emit(
            signals.message_retried,
            Message,
            delivery=delivery.deliveries,
            due_at=moved.due_at,
            error=failure.error,
            **signals.message_arguments(delivery, using),
        )
    else:
        log(logging.INFO, "released", delivery, reason=failure.reason or failure.error.split(":")[0][:80])


def log(level: int, event: str, delivery: Delivery, **facts: Any) -> None:
    """One line per event, with the facts as ``extra`` too.

    Never the payload, a key or the text of an error: they may hold secrets. The record has them.
    """
    facts = {"id": delivery.id, "topic": delivery.topic, "delivery": delivery.deliveries, **facts}
    line = " ".join(f"{name}={_shown(value)}" for name, value in facts.items())
    logger.log(level, "message %s %s", event, line, extra={"delayq_event": event, "delayq": facts})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    # Error texts are data: no line of the log may be forged with them.
    return repr(text) if " " in text or not text.isprintable() else text
