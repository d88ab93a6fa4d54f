"""Writes outcomes to the record, many in one statement, until the database answers; between two, it renews leases."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

from django.db import DataError, IntegrityError
from django.db import Error as DatabaseError
from django.db import connections as django_connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import signals
from ...broker.base import IDS_PER_CALL
from ...core import failpoints
from ...core.outages import Outage
from ...core.outcomes import Ack, GiveUp, Outcome, Recorded, Release, Retry, Unentered
from ...core.own_header import own_part
from ...core.states import State
from ...extensions import Service, WorkerExtensions
from ...models import Transition
from ...project import registry
from ...record import admission, reads, transitions
from ...record.sql import statements
from ...record.sql.rows import Failure, LeaseRenewal, Moved, Success
from ...record.sql.sessions import is_waiting
from ...record.sql.troubles import in_words
from ..shared import connections
from ..shared.due_services import DueServices, backoff
from .delivery import Delivery
from .held import HeldByProcess
from .reporting import OutcomeLog, SignalSender, emit, publish_scheduled, report_failure
from .run_tuning import USUAL, RunTuning

logger = logging.getLogger("django_delayq")


SUCCESS = (Ack, Recorded)
# The reason in the log of a move with which a handler leaves another payload.
PAYLOAD_CHANGED = "payload changed"
UNPRINTABLE = "(the error's text could not be stored)"
UNSTORABLE_PAYLOAD = "InvalidMessage: the database refused the payload that the handler left"


class Ended(NamedTuple):
    """A delivery that ended, and its outcome."""

    delivery: Delivery
    outcome: Outcome
    actor: str

    @property
    def has_run(self) -> bool:
        return bool(self.delivery.started_mono) and not isinstance(self.outcome, Unentered)


class AskedRenewal(NamedTuple):
    """A lease that is to end at ``until`` (monotonic), and the queue on which its handler waits for the answer."""

    delivery: Delivery
    until: float
    answered: SimpleQueue[None]


class Recorder(threading.Thread):
    """Commits outcomes in groups: while one batch is being written the next one gathers, so batches grow with the load.

    Any thread submits: ``_pending`` is a deque to which they append and from which this thread takes, both atomic.
    ``_asked`` is a dict by message in the same way. ``_news`` has an item after that, which this thread removes before
    it takes: to put one there holds no lock that an interrupt of a handler could leave locked. ``_is_idle`` is cleared
    before this thread takes an outcome and set when it finds none. Handlers write ``_extends_late``, which only
    decides on a line of the log. The rest is this thread's own; others only read
    ``delivered``, ``_asking_since``, ``_step`` and ``_connection``.
    """

    def __init__(
        self, using: str, extensions: WorkerExtensions, held: HeldByProcess | None = None, tuning: RunTuning = USUAL
    ) -> None:
        """The recorder renews the leases of the deliveries ``held``."""
        super().__init__(name="delayq-recorder", daemon=True)
        self.using = using
        self.extensions = extensions
        self.held = HeldByProcess() if held is None else held
        self.tuning = tuning
        self.log = OutcomeLog(tuning.counts_interval)
        self.sender = SignalSender(tuning)
        # Services that use the connection of this thread between two batches.
        self.meanwhile = DueServices([LeaseRenewer(using, self.held.all, tuning), self.log])
        # The number of deliveries whose handlers have run, and whose outcomes were written.
        self.delivered = 0
        self._pending: deque[Ended] = deque()
        self._asked: dict[int, AskedRenewal] = {}
        self._locked: list[Ended] = []
        self._asking_since: float | None = None
        # When it made its last step (monotonic), and its connection.
        self._step = 0.0
        self._connection: BaseDatabaseWrapper | None = None
        # The number of outcomes in the last batch.
        self._written = 0
        # True after a handler waited in vain for the extension of its lease (the log says so), until another wait
        # succeeds.
        self._extends_late = False
        self._news: SimpleQueue[None] = SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stopping = False

    def submit(self, delivery: Delivery, outcome: Outcome, actor: str, at: float | None = None) -> None:
        """Have the outcome of a delivery written soon that ended ``at`` (monotonic), or now. Returns at once."""
        if self._is_idle.is_set():
            self._is_idle.clear()
        delivery.ended_mono = time.monotonic() if at is None else at
        self._pending.append(Ended(delivery, outcome, actor))
        if self._news.empty():
            self._news.put(None)

    def extend(self, delivery: Delivery, until: float) -> None:
        """Have the lease of a delivery end at ``until`` (monotonic). Waits for that, for a second at most.

        A handler may be in a transaction on the last connection that a pooler gives to this worker: a second one might
        never come. This thread may have to wait for one, too. Then it extends the lease later.
        """
        answered: SimpleQueue[None] = SimpleQueue()
        self._asked[delivery.id] = AskedRenewal(delivery, until, answered)
        self._news.put(None)
        try:
            answered.get(timeout=self.tuning.renewal_interval)
        except Empty:
            first, self._extends_late = not self._extends_late, True
            if first:
                logger.warning(
                    "The handler of topic %s goes on before its lease is extended: the database has not answered the "
                    "worker for %g s. The lease is extended as soon as it does. Behind a pooler, give each worker "
                    "process a server connection for each handler thread and three more",
                    delivery.topic,
                    self.tuning.renewal_interval,
                )
        else:
            self._extends_late = False

    def flush(self, timeout: float | None) -> bool:
        """Wait until all outcomes are written. Return False when that took longer than ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._pending or not self._is_idle.is_set():
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0 or not self.is_alive():
                return False
            self._is_idle.wait(min(left, 1.0))
            if self._pending:
                time.sleep(0.001)
        return True

    @property
    def behind(self) -> float:
        """Seconds for which the database has not answered this thread, which would write the outcomes."""
        since = self._asking_since
        return 0.0 if since is None else time.monotonic() - since

    def hangs(self) -> bool:
        """Return whether this thread is held up by something other than the database: it records and renews nothing."""
        connection = self._connection
        if connection is None or not self.is_alive() or is_waiting(connection):
            return False
        return time.monotonic() - self._step > self.tuning.hangs_after

    def stop(self) -> None:
        """End the thread as soon as every outcome is written."""
        self._stopping = True
        self._news.put(None)

    def run(self) -> None:
        """Write batches of outcomes as they come."""
        began = 0.0
        self._step = time.monotonic()
        self._connection = django_connections[self.using]
        try:
            # Handlers may take all connections that are left: this thread has its own before they begin.
            with contextlib.suppress(DatabaseError):
                reads.now(self.using)
            while True:
                self._await_news(self._run_meanwhile())
                while self._pending:
                    self._is_idle.clear()
                    began = self._gather(began)
                    # A batch has no more outcomes than one claim has messages.
                    self._write([self._pending.popleft() for _ in range(min(IDS_PER_CALL, len(self._pending)))])
                    self._retry_locked()
                    self._run_meanwhile()
                self._is_idle.set()
                if self._stopping and not self._pending:
                    return
        finally:
            self.log.tick()
            connections.close_all()

    def _await_news(self, timeout: float) -> None:
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout)

    def _gather(self, began: float) -> float:
        """Wait a moment after the last batch ``began``, unless many outcomes wait; return when this batch begins."""
        early = began + self.tuning.gather_time - time.monotonic()
        if early > 0 and self._written > 1 and len(self._pending) < self.tuning.enough_outcomes:
            time.sleep(early)
        return time.monotonic()

    def _write(self, batch: Sequence[Ended]) -> None:
        """Write a batch, and count the deliveries whose handlers have run."""
        self._asking_since, self._written = time.monotonic(), len(batch)
        successes = [ended for ended in batch if isinstance(ended.outcome, SUCCESS)]
        failures = [ended for ended in batch if not isinstance(ended.outcome, SUCCESS)]
        self._record(successes, self.write_successes)
        self._record(failures, self.write_failures)
        self._asking_since = None
        done = batch
        if failures or self._locked:
            done = [e for e in batch if e.has_run and e not in self._locked]
        self.delivered += len(done)
        self.extensions.handled([ended.delivery for ended in done])

    def _run_meanwhile(self) -> float:
        """Renew leases between two batches. Return the seconds until the next renewal."""
        self._asking_since = self._step = time.monotonic()
        try:
            if self._asked:
                self._renew_asked()
            return self.meanwhile.run_due()
        finally:
            self._asking_since = None

    def _renew_asked(self) -> None:
        """Renew the leases whose handlers wait for an answer. Without one from the database they are tried again."""
        asked = dict(self._asked.popitem() for _ in range(len(self._asked)))
        now = time.monotonic()
        renewals = [LeaseRenewal(pk, one.delivery.deliveries, max(0.0, one.until - now)) for pk, one in asked.items()]
        connections.before_task()
        try:
            # The transaction of the handler may have locked the row, as with the next message under its own key: to
            # wait for that would be to wait for ever. A locked row is answered, too.
            answers = statements(self.using).extend(renewals, wait=False)
        except DatabaseError as error:
            connections.note_error(error)
            for pk, one in asked.items():
                # A handler may have asked for a later end meanwhile.
                self._asked.setdefault(pk, one)
            return
        finally:
            connections.after_task()
        for pk, (delivery, until, answered) in asked.items():
            if pk in answers:
                delivery.note_renewal(until - delivery.lease, cancel_requested=answers[pk])
            else:
                delivery.lost = True
            answered.put(None)

    def _retry_locked(self) -> None:
        """Put outcomes of locked rows behind the others, which must not wait for the end of a long transaction."""
        if not self._locked:
            return
        if not self._pending:
            self._await_news(self.tuning.rewrite_locked_after)
        self._pending.extend(self._locked)
        self._locked = []

    def _record(self, batch: Sequence[Ended], write: Callable[[Sequence[Ended], bool], None]) -> None:
        """Write a batch. ``write`` gets the batch and whether an earlier try may have been committed."""
        failures, outage = 0, Outage()
        while batch:
            self._step = time.monotonic()
            connections.before_task()
            try:
                failpoints.reach("before_record")
                write(batch, failures > 0)
                failpoints.reach("after_record")
            except (DataError, IntegrityError):
                self._bisect(batch, write)
                return
            except DatabaseError as error:
                connections.note_error(error)
                failures += 1
                if outage.is_news(error):
                    logger.warning(
                        "Outcomes wait for the database and are tried again until it takes them: %s",
                        in_words(error),
                    )
                time.sleep(backoff(failures, 2.0))
            except BaseException:
                # An extension may raise anything; this thread must outlive it.
                logger.exception("Could not record %d outcomes; their leases will run out", len(batch))
                return
            else:
                if failures:
                    logger.info("Outcomes are being recorded again")
                return
            finally:
                connections.after_task()

    def _bisect(self, batch: Sequence[Ended], write: Callable[[Sequence[Ended], bool], None]) -> None:
        """Write a batch in halves: one outcome that the database refuses must not hold up the others."""
        if len(batch) > 1:
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                self._record(half, write)
            return
        (ended,) = batch
        plain = _without_texts(ended.outcome)
        if plain is None:
            logger.error("The outcome of message %d cannot be stored; its lease will run out", ended.delivery.id)
        else:
            self._record([ended._replace(outcome=plain)], write)

    def write_successes(self, batch: Sequence[Ended], again: bool) -> None:
        """Write deliveries that succeeded, and report them. ``again``: an earlier try may have been committed."""
        acks = [
            Success(delivery.id, delivery.deliveries, actor, outcome.result)
            for delivery, outcome, actor in batch
            if isinstance(outcome, Ack)
        ]
        consumed = transitions.succeed(self.using, acks, wait=False)
        recorded = batch if len(consumed) == len(acks) else self._without_refused(batch, acks, consumed, again)
        deliveries = [ended.delivery for ended in recorded]
        self.extensions.consumed(deliveries)
        self.log.consumed(deliveries)
        for delivery in deliveries if signals.message_succeeded.receivers else ():
            emit(signals.message_succeeded, delivery, self.sender.send, runtime=delivery.runtime)

    def _without_refused(
        self, batch: Sequence[Ended], acks: Sequence[Success], consumed: set[int], again: bool
    ) -> list[Ended]:
        """Return the successes that are recorded. Those of locked rows are kept, and the others are logged."""
        locked = self._live([ack.id for ack in acks if ack.id not in consumed])
        recorded = []
        for ended in batch:
            if ended.delivery.id in locked and isinstance(ended.outcome, Ack):
                self._locked.append(ended)
            # After a lost reply the first try may have been the one that was committed.
            elif again or isinstance(ended.outcome, Recorded) or ended.delivery.id in consumed:
                recorded.append(ended)
            else:
                logger.warning("Outcome refused, the message was ended by another move: %s", ended.delivery)
                self._free_permits(ended.delivery)
        return recorded

    def write_failures(self, batch: Sequence[Ended], again: bool) -> None:
        """Write deliveries that failed or were released, publish what is scheduled again, and report them."""
        failures = [_failure(ended) for ended in batch]
        moved = {m.id: m for m in transitions.fail(self.using, failures, wait=False)}
        if again:
            before = [self._moved_before(ended) for ended in batch if ended.delivery.id not in moved]
            moved |= {m.id: m for m in before if m is not None}
        live = self._live([failure.id for failure in failures if failure.id not in moved])
        counted = {failure.id for failure in failures if failure.counts}
        retried = {m.id: m for m in moved.values() if m.after == State.SCHEDULED and m.id in counted}
        self.extensions.retried(list(retried.values()))
        self.extensions.ended([m for m in moved.values() if m.id not in retried])
        # Not before their permits are noted as free: a message that begins again at once needs one.
        publish_scheduled(self.using, list(moved.values()), self.sender.send)
        for m in moved.values():
            outcome = "retried" if m.id in retried else m.after.value
            self.log.count(m.queue, "released" if outcome == State.SCHEDULED else outcome)
        for ended, failure in zip(batch, failures, strict=True):
            if live.get(failure.id) == (State.RUNNING, failure.delivery):
                self._locked.append(ended)
            else:
                cause = getattr(ended.outcome, "cause", None)
                move = moved.get(failure.id)
                if move is None:
                    self._free_permits(ended.delivery)
                self.sender.send(report_failure, ended.delivery, failure, move, cause)

    def _free_permits(self, delivery: Delivery) -> None:
        """Free the permits that a delivery has kept though an earlier one had ended its message."""
        if _is_limited(delivery):
            # Otherwise they are free when its lease is over.
            with contextlib.suppress(DatabaseError):
                admission.free_permits(self.using, delivery.id, delivery.deliveries)

    def _moved_before(self, ended: Ended) -> Moved | None:
        """Return the move that an earlier try has committed, if its reply was lost: the log has it."""
        d, failure = ended.delivery, _failure(ended)
        log = Transition.objects.using(self.using).filter(
            message_id=d.id, delivery=d.deliveries, from_state=State.RUNNING, actor=failure.actor, error=failure.error
        )
        # The reason of a requested cancel stands before the reason of the failure.
        row = log.filter(reason__endswith=failure.reason).values_list("to_state", "due_at", "reason").first()
        if row is None:
            return None
        return Moved(d.id, d.topic, d.queue, d.priority, State(row[0]), row[1], d.deliveries, row[2])

    def _live(self, ids: list[int]) -> dict[int, tuple[State, int]]:
        return reads.live_deliveries(self.using, ids) if ids else {}


def _without_texts(outcome: Outcome) -> Outcome | None:
    """Return what can be stored of an outcome that the database refused; None: nothing."""
    if not isinstance(outcome, Retry | GiveUp) or outcome.error == UNPRINTABLE:
        return None
    if outcome.payload is not None:
        # No further attempt with the old payload: it would do again what the new one says is done.
        return GiveUp(UNSTORABLE_PAYLOAD, exception=outcome.exception)
    return replace(outcome, error=UNPRINTABLE, traceback="", cause=None)


def _failure(ended: Ended) -> Failure:
    """Return what is to be recorded: all that the outcome says of a failure."""
    delivery, outcome = ended.delivery, ended.outcome
    said = {name: getattr(outcome, name) for name in Failure._fields if hasattr(outcome, name)}
    if said.get("payload") is not None:
        said["reason"] = PAYLOAD_CHANGED
    said["dead"] = isinstance(outcome, GiveUp)
    said["leads_on"] = said["dead"] and _leads_on(delivery)
    counts = not isinstance(outcome, Release)
    return Failure(delivery.id, delivery.deliveries, ended.actor, **{"counts": counts, **said})


def _leads_on(delivery: Delivery) -> bool:
    """Return whether a message follows when this one is dead."""
    return registry.follows(State.DEAD, delivery.topic, own_part(delivery.claimed.headers)) is not None


class LeaseRenewer(Service):
    """Renews leases: one query a second while handlers run for long, and none otherwise.

    It runs in the recorder's thread, on its connection: neither waits for a locked row, so neither keeps the other
    waiting for longer than a statement takes.
    """

    name = "lease renewer"
    longest_backoff = 1.0

    def __init__(self, using: str, held: Callable[[], list[Delivery]], tuning: RunTuning = USUAL) -> None:
        """``held`` returns the deliveries that the process holds."""
        self.using = using
        self.held = held
        self.tuning = tuning
        self._renew_at = 0.0

    def tick(self) -> float:
        """Renew the leases of long-running handlers once a second, and at once when a lease is half over."""
        now = time.monotonic()
        held = [d for d in self.held() if not d.lost or _is_limited(d)]
        # A lease of one or two seconds cannot wait for a second.
        if now >= self._renew_at or any(_is_half_over(d, now) for d in held):
            self._renew_at = now + self.tuning.renewal_interval
            due = [d for d in held if now - d.claimed_mono > self.tuning.renewal_interval or _is_half_over(d, now)]
            self._renew([d for d in due if not d.lost])
            self._keep_permits([d for d in due if d.lost])
        return self.tuning.check_interval

    def _renew(self, deliveries: list[Delivery]) -> None:
        """Renew the leases of these deliveries, and tell them of requested cancels and of lost leases."""
        if not deliveries:
            return
        now = time.monotonic()
        holdings = [
            # A lease is renewed in its last two thirds; before that, if it is over by a clock that was set ahead.
            LeaseRenewal(d.id, d.deliveries, d.lease if now - d.leased_mono > d.lease / 3 else -d.lease)
            for d in deliveries
        ]
        # A row that somebody's long transaction has locked must cost neither the others nor its delivery their leases.
        answers = statements(self.using).extend(holdings, wait=False)
        for delivery, holding in zip(deliveries, holdings, strict=True):
            cancel_requested = answers.get(delivery.id)
            if cancel_requested is not None:
                delivery.note_renewal(now if holding.lease > 0 else None, cancel_requested=cancel_requested)
            else:
                self._note_lost(delivery)

    def _keep_permits(self, lost: list[Delivery]) -> None:
        """Keep the permits of deliveries that lost their leases because an earlier delivery has succeeded."""
        if lost:
            now = time.monotonic()
            admission.keep_permits(self.using, [LeaseRenewal(d.id, d.deliveries, d.lease) for d in lost])
            for delivery in lost:
                delivery.note_renewal(now, cancel_requested=False)

    def _note_lost(self, delivery: Delivery) -> None:
        # A delivery that has ended meanwhile has no lease to lose.
        if delivery in self.held():
            delivery.lost = True
            logger.warning("The lease of %r is lost; its failure will be refused, its success accepted", delivery)


def _is_limited(delivery: Delivery) -> bool:
    return bool(admission.limits_of(delivery.topic, delivery.queue, delivery.claimed.limit_key, delivery.using))


def _is_half_over(delivery: Delivery, now: float) -> bool:
    return now - delivery.leased_mono > delivery.lease / 2
