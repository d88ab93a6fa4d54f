"""Delivers messages in the thread and the transaction of a test, by the steps of a worker: claim, execute, record."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches

from django.db import DatabaseError, connections
from django.db.models import Q

from ..api import pausing
from ..core import actors
from ..core.clock import from_us
from ..core.exceptions import DelayqError, HandlerTimeout, MessageCancelled
from ..core.outcomes import Outcome, Retry
from ..core.states import State
from ..extensions import WorkerExtensions
from ..models import Message, Transition
from ..project import conf, pulled, registry, validation
from ..project.answers import Reject, RetryLater
from ..record import crashes, reads, transitions
from ..record.sql import statements
from ..record.sql.moves import clock
from ..record.sql.rows import ALL_CHANGES, LeaseRenewal, Span, Ticket
from ..worker.run.batches import execute_batch
from ..worker.run.delivery import MAY_COME_TOGETHER, Delivery
from ..worker.run.executor import answer, execute
from ..worker.run.recorder import SUCCESS, Ended, Recorder
from ..worker.run.reporting import report_delivered, report_moves
from .transactions import as_without_transaction, call_on_commit_functions, is_in_own_transaction

# One drain, or one call, makes this many deliveries at most: a handler that schedules its own message would go on for
# ever.
MOST = 1000


class UnknownTopic(DelayqError, LookupError):
    """No handler receives this topic."""


def check_topic(topic: str, elsewhere: Collection[str] = ()) -> str:
    """Return the topic. Raises ``UnknownTopic``, with the nearest names, when no handler here or elsewhere has it."""
    known = {*registry.handlers(), *elsewhere}
    if topic in known:
        return topic
    if callable(topic):
        validation.topic(topic)
    near = get_close_matches(str(topic), sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no app registers one like it."
    raise UnknownTopic(
        f"no handler receives the topic {topic!r}; {hint}"
        " If another project handles it, say so: delayq.handled_elsewhere(topic)"
    )


# A handler ends a delivery by these on purpose: they are its answers, not its errors.
ANSWERS = (RetryLater, Reject, MessageCancelled)


@dataclass(frozen=True, slots=True)
class Ran:
    """One delivery that was made in a test.

    ``outcome`` is *consumed*, *retried*, *released*, *dead* or *cancelled*. ``error`` is what the handler raised, also
    ``RetryLater`` and ``Reject``. ``message`` is the message after the delivery.
    """

    message: Message
    attempt: int
    outcome: str
    error: BaseException | None = None

    def __str__(self) -> str:
        error = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        return f"{self.message}, attempt {self.attempt}, {self.outcome}{error}"


class LocalDelivery(Delivery):
    """A delivery whose handler runs in the transaction of a test. It keeps what the handler raised."""

    __slots__ = ("_is_cancelled", "error", "is_outermost")

    error: BaseException | None
    is_outermost: bool
    _is_cancelled: bool

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel was requested. No other thread tells the handler here, so this asks the record.

        It does not ask in the thread of an event loop, which must not wait for a query: there ``extend`` tells of a
        cancel. Nor does it ask in a transaction in which a statement has failed, since that answers nothing.
        """
        if not self._is_cancelled and not _is_on_loop():
            with suppress(DatabaseError):
                answer = statements(self.using).extend([LeaseRenewal(self.id, self.deliveries, 0)])
                self._is_cancelled = answer.get(self.id, False)
        return self._is_cancelled

    @cancel_requested.setter
    def cancel_requested(self, value: bool) -> None:
        self._is_cancelled = value

    def note_error(self, error: BaseException) -> None:
        self.error = error


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _AtWork(threading.local):
    """The deliverer that is at work in this thread."""

    deliverer: Deliverer | None = None


_here = _AtWork()


def at_work() -> Deliverer | None:
    """Return the deliverer that is at work in this thread: a handler runs, and asks for further deliveries."""
    return _here.deliverer


class Deliverer:
    """Makes deliveries one by one. It finds messages by query, as a worker without Redis does."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.worker = actors.worker_name("testing", os.getpid(), actors.new_run())
        self.extensions = WorkerExtensions(using, self.worker)
        # This thread writes outcomes by the recorder's statements; the recorder's own thread never starts.
        self._recorder = Recorder(using, self.extensions)
        # The messages that an immediate delivery made due: the alias and the id of each.
        self.waiting: list[tuple[str, int]] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Be the deliverer of this thread, and end in order."""
        _here.deliverer = self
        try:
            yield
        finally:
            _here.deliverer = None
            self.extensions.stop()

    def expire(self) -> bool:
        """Expire messages that did not start in time. Return whether there were any."""
        if not crashes.anything_expired(self.using)[1]:
            return False
        moved = transitions.expire(self.using, actor=f"worker:{self.worker}")
        report_moves(self.using, moved, self.extensions)
        call_on_commit_functions()
        return bool(moved)

    def claim_next(self, queue: str | None, most: int) -> list[LocalDelivery]:
        """Claim the message that a worker would take next, and up to ``most`` together for a batch handler.

        Returns none when none is due in this queue (None: in any).
        """
        due, now = self._due_times(queue), clock(self.using)
        first = conf.get().QUEUES
        order = {name: place for place, name in enumerate(first)}
        for name in sorted(due, key=lambda name: (order.get(name, len(first)), due[name])):
            if due[name] > now:
                continue
            # In the transaction of a test nobody else claims the message meanwhile.
            is_alone = connections[self.using].in_atomic_block
            with nullcontext() if is_alone else transitions.exclusively(self.using):
                found = self._start(statements(self.using).due(name, registry.handlers(), 1), name)
                if found and not found[0].comes_alone and (size := min(most, found[0].handler.batch)) > 1:
                    found += self._start(self._company(found[0], size - 1), name)
            if found:
                return found
        return []

    def _company(self, first: LocalDelivery, most: int) -> list[Ticket]:
        """Return due messages that may begin together with one of a batch handler: those that need not come alone."""
        found = statements(self.using).due(first.queue, [first.topic], most)
        rows = Message.objects.using(self.using).filter(MAY_COME_TOGETHER, pk__in=[ticket.id for ticket in found])
        ids = set(rows.values_list("pk", flat=True))
        return [ticket for ticket in found if ticket.id in ids]

    def start(self, message_id: int) -> LocalDelivery | None:
        """Claim one message; None when it is not due, or may not start for another reason."""
        return next(iter(self._start([Ticket(message_id)], None)), None)

    def _start(self, tickets: Sequence[Ticket], queue: str | None) -> list[LocalDelivery]:
        """Claim messages as a worker does, except those that programs pull."""
        if conf.get().PULL_QUEUES is not None:
            served = {
                pk
                for pk, row in statements(self.using).facts([t.id for t in tickets]).items()
                if pulled.without([row.queue])
            }
            tickets = [ticket for ticket in tickets if ticket.id in served]
        handlers = registry.handlers()
        leases = {topic: handler.lease for topic, handler in handlers.items()}
        claimed = transitions.claim(self.using, tickets, leases, self.worker, queue=queue, known=ALL_CHANGES)
        self.extensions.claimed(claimed)
        return [LocalDelivery(row, handlers[row.topic], self.using) for row in claimed]

    def next_event(self, queue: str | None, until: datetime) -> datetime | None:
        """Return when the next message falls due or its pause ends; None when nothing happens ``until`` then."""
        now = reads.now(self.using)
        pauses = pausing.paused(self.using)
        moments = []
        for name, due in self._due_times(queue).items():
            resumes = pauses[name].resumes_at if name in pauses else now
            if resumes is not None:
                moments.append(max(due, resumes))
        return min((moment for moment in moments if now < moment <= until), default=None)

    def _due_times(self, queue: str | None) -> dict[str, datetime]:
        """Return when the next message of each queue falls due that a handler receives."""
        queues = pulled.without(statements(self.using).queues() if queue is None else [queue])
        if not queues:
            return {}
        received = list(registry.handlers())
        heads = statements(self.using).heads(queues, Span(None, limit=1, topics=received))
        return {name: from_us(due_us) for name, _id, due_us, _priority in heads}

    def check_topics(self, queue: str | None, elsewhere: Collection[str]) -> None:
        """Raise ``UnknownTopic`` when a message is due that no handler receives."""
        known = {*registry.handlers(), *elsewhere}
        where = Q(state=State.SCHEDULED, due_at__lte=reads.now(self.using))
        if queue is not None:
            where &= Q(queue=queue)
        rows = Message.objects.using(self.using).filter(where).exclude(topic__in=known).order_by("due_at", "id")
        # Programs take those of pulled queues, which need no handler.
        for queue_of, topic in rows.values_list("queue", "topic").iterator():
            if pulled.terms(queue_of) is None:
                check_topic(topic, elsewhere)

    def run(self, deliveries: Sequence[LocalDelivery]) -> list[Ran]:
        """Run the handler of a delivery, or of a batch of them, and record the outcomes."""
        actor = f"worker:{self.worker}"
        for delivery in deliveries:
            delivery.error = None
            # Nobody takes back a delivery here, and a frozen clock that ticks by itself may be past any lease by now.
            delivery.leased_mono = math.inf
            delivery.is_outermost = not is_in_own_transaction(connections[self.using])
        with actors.acting_as(actor):
            context = contextvars.copy_context()
            for delivery in deliveries:
                context.run(report_delivered, delivery)
            with as_without_transaction():
                outcomes = context.run(_execute, deliveries, actor)
            outcomes = _committed(deliveries, outcomes)
            for delivery, outcome in zip(deliveries, outcomes, strict=True):
                self._record(delivery, outcome, actor)
            call_on_commit_functions()
        return [self._ran(*ended) for ended in zip(deliveries, outcomes, strict=True)]

    def _ran(self, delivery: LocalDelivery, outcome: Outcome) -> Ran:
        message = Message.objects.using(self.using).get(pk=delivery.id)
        return Ran(message, delivery.attempt, self._word(message, delivery, outcome), delivery.error)

    def _record(self, delivery: Delivery, outcome: Outcome, actor: str) -> None:
        """Write the end of a delivery to the record."""
        delivery.ended_mono = time.monotonic()
        ended = Ended(delivery, outcome, actor)
        write = self._recorder.write_successes if isinstance(outcome, SUCCESS) else self._recorder.write_failures
        write([ended], False)
        if ended.has_run:
            self.extensions.handled([delivery])

    def _word(self, message: Message, delivery: Delivery, outcome: Outcome) -> str:
        """Return the word for the outcome. Receivers of signals may have moved the message on since."""
        if message.state == State.CONSUMED:
            return State.CONSUMED.value
        moves = Transition.objects.using(self.using).filter(message_id=delivery.id, delivery=delivery.deliveries)
        state = moves.filter(from_state=State.RUNNING).values_list("to_state", flat=True).last()
        if state != State.SCHEDULED:
            return str(state or message.state)
        return "retried" if isinstance(outcome, Retry) and outcome.counts else "released"


def _execute(deliveries: Sequence[LocalDelivery], actor: str) -> list[Outcome]:
    if deliveries[0].handler.batch == 1:
        return [execute(delivery, actor) for delivery in deliveries]
    return execute_batch(deliveries, actor)


def _committed(deliveries: Sequence[LocalDelivery], outcomes: list[Outcome]) -> list[Outcome]:
    """Call the functions on commit of a handler. Return its outcomes, which an error in one of them may change.

    In production they are called where its transactions end: in the handler, or after a transactional one.
    """
    try:
        with as_without_transaction():
            call_on_commit_functions()
    except BaseException as error:  # noqa: BLE001
        answers = [answer(delivery, error) for delivery in deliveries]
        # The answers of a transactional batch are committed, as its effects are.
        return outcomes if deliveries[0].handler.transactional else answers
    return outcomes


def raise_error(ran: Ran) -> None:
    """Raise the error of a delivery, with a note that says which delivery it was; the answers of a handler are none."""
    error = ran.error
    if error is None or isinstance(error, ANSWERS):
        return
    error.add_note(f"The handler of {ran.message} raised this in attempt {ran.attempt}; the message is {ran.outcome}.")
    raise error


def must_be_raised(error: BaseException | None) -> bool:
    """Return whether an error is for the runner of the tests, such as Ctrl-C: a handler does not raise it."""
    return error is not None and not isinstance(error, Exception | SystemExit | HandlerTimeout | MessageCancelled)
