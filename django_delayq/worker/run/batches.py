"""Batch handlers: deliveries of one topic that wait for a thread begin together, in one call of their handler.

A message that has failed before comes alone, so that a bad one costs its neighbours one attempt at most.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from ... import middleware
from ...core import failpoints
from ...core.exceptions import HandlerTimeout, Superseded
from ...core.outcomes import Ack, Outcome, Recorded, Release
from ...record import transitions
from ...record.sql.rows import Success
from .delivery import Delivery
from .executor import answer, call, call_in_transaction, outcome_of
from .lines import QueueLines

# The weight of the newest delivery in the share of those whose handlers take batches.
SHARE_WEIGHT = 0.1
# The number of further deliveries is rounded up, except where nearly no handlers take batches.
ROUND_UP = 0.95
# A batch that waits for company begins this long before one of its messages would expire. Seconds.
BEFORE_EXPIRY = 0.5


class Gathering:
    """The deliveries of a process that may begin together with others of their topic, in the order in which they came.

    Each of them is in the queue of the lane, too, where a thread finds it, unless it went with another one before, or
    a thread waits for company of its topic.

    The consumer and the due timer add; a handler thread or the main thread takes out. ``_changed`` guards all
    attributes but the share, an estimate, which may miss a delivery.
    """

    def __init__(self, queue: QueueLines, largest: int) -> None:
        """``largest`` is the size of the largest batch that a handler takes."""
        self._queue = queue
        self._largest = largest
        self._share = 0.0
        self._changed = threading.Condition()
        self._waiting: defaultdict[str, dict[Delivery, None]] = defaultdict(dict)
        # The topics of which a thread waits for company, and when it waits no longer (monotonic); and the deliveries of
        # these topics that have left the queue meanwhile.
        self._lingering: dict[str, float] = {}
        self._passed_over: defaultdict[str, list[Delivery]] = defaultdict(list)
        self._has_ended = False

    def note(self, delivery: Delivery) -> None:
        """Take note of a delivery that is about to wait in the queue of the lane."""
        takes_batches = delivery.handler.batch > 1
        self._share += (takes_batches - self._share) * SHARE_WEIGHT
        if takes_batches and not delivery.comes_alone:
            with self._changed:
                waiting = self._waiting[delivery.topic]
                waiting[delivery] = None
                if (until := self._lingering.get(delivery.topic)) is not None:
                    self._lingering[delivery.topic] = ends = min(until, delivery.begins_by - BEFORE_EXPIRY)
                    if len(waiting) >= delivery.handler.batch or ends < until:
                        self._changed.notify_all()

    def withdraw(self, delivery: Delivery) -> bool:
        """Take a delivery out. Return False when it began in the batch of another one, which ends it."""
        if delivery.handler.batch == 1 or delivery.comes_alone:
            return True
        with self._changed:
            return self._waiting[delivery.topic].pop(delivery, delivery) is None

    def company(self, slots: int, most: int) -> int:
        """Return how many more deliveries a lane may hold, so that batches get full where most handlers take them."""
        # The share never quite reaches 1: if it was not rounded up, a full batch would lack its last message.
        return int(min(most, (self._largest - 1) * slots) * self._share + ROUND_UP)

    def expect_none(self) -> None:
        """Hold no more deliveries than slots, until deliveries show again that most handlers here take batches."""
        self._share = 0.0

    def gather(self, first: Delivery) -> list[Delivery]:
        """Return the deliveries that begin with this one, which was found in the queue; none if it went with others.

        With ``linger`` this waits until the batch is full, the time of its first message is over, or one of its
        messages is about to expire.
        """
        if first.comes_alone:
            return [first]
        handler, topic = first.handler, first.topic
        with self._changed:
            waiting = self._waiting[topic]
            if first not in waiting:
                return []
            if topic in self._lingering:
                self._passed_over[topic].append(first)
                return []
            if handler.linger:
                self._await_company(first, waiting)
            taken = list(itertools.islice(waiting, handler.batch))
            if not handler.linger and first not in taken:
                taken[-1] = first
            for delivery in taken:
                del waiting[delivery]
            left = [delivery for delivery in (first, *self._passed_over.pop(topic, ())) if delivery in waiting]
            self._queue.put_all(left)
            return taken

    def _await_company(self, first: Delivery, waiting: Collection[Delivery]) -> None:
        """Wait for the rest of the batch of a delivery, as ``gather`` says."""
        size, topic = first.handler.batch, first.topic
        ends = [delivery.begins_by - BEFORE_EXPIRY for delivery in waiting]
        self._lingering[topic] = min(first.waits_since + first.handler.linger, *ends)
        while len(waiting) < size and not self._has_ended and (left := self._lingering[topic] - time.monotonic()) > 0:
            self._changed.wait(left)
        del self._lingering[topic]

    def end(self) -> None:
        """Have no thread wait for company any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class _Gone(Superseded):
    """Some messages of a transactional batch have other deliveries by now: none of its effects may be committed."""

    def __init__(self, gone: Sequence[Delivery]) -> None:
        super().__init__()
        self.gone = gone


def execute_batch(batch: Sequence[Delivery], actor: str) -> list[Outcome]:
    """Run the handler of a batch once, and return the outcome of each delivery."""
    late: dict[Delivery, Outcome] = {}
    try:
        for delivery in batch:
            try:
                delivery.begin()
            except Superseded as error:
                late[delivery] = outcome_of(delivery, error)
        begun = [delivery for delivery in batch if delivery not in late]
        outcomes = late | (_execute(begun, actor) if begun else {})
        for delivery in begun:
            if delivery.on_end is not None:
                delivery.on_end(outcomes[delivery])
        return [outcomes[delivery] for delivery in batch]
    finally:
        for delivery in batch:
            delivery.close()


class _Call:
    """One call of the handler of a batch, inside of its middleware, which surrounds it once for each message."""

    def __init__(self, batch: list[Delivery], actor: str) -> None:
        self.batch = batch
        self._actor = actor
        # The message whose middleware is being entered.
        self._entering: Delivery | None = None

    def perform(self) -> None:
        """Call the handler, and note the outcome of each delivery. Raises the last error."""
        chain = middleware.chain()
        if chain:
            middleware.run_inside(self._contexts(chain), partial(_perform, self.batch, self._actor), self.decide)
        else:
            _perform(self.batch, self._actor)

    def _contexts(self, chain: Sequence[middleware.Middleware]) -> Iterator[AbstractContextManager[None]]:
        for delivery in self.batch:
            self._entering = delivery
            yield from (one.handling(delivery) for one in chain)
        self._entering = None

    def decide(self, error: BaseException) -> None:
        """Let what was raised decide the outcome of each message whose success is not recorded.

        What the middleware of a message raises on entry is the failure of that one. The others come alone after that:
        the same message could keep them waiting again.
        """
        refused = None if isinstance(error, HandlerTimeout) else self._entering
        for delivery in self.batch:
            if refused is None or delivery is refused:
                _decide(self.batch[0], delivery, error)
            elif delivery.decided is None:
                reason = "middleware refused another message of its batch"
                delivery.decided, delivery.raised = Release(reason, conflict=True), error


def _execute(batch: list[Delivery], actor: str) -> dict[Delivery, Outcome]:
    """Run the handler of a batch inside of its middleware, and decide on the outcome of each delivery."""
    Delivery.join(batch)
    run, error = _Call(batch, actor), None
    try:
        try:
            run.perform()
        except BaseException as raised:  # noqa: BLE001
            # SystemExit and KeyboardInterrupt too: a handler does not end the worker.
            error = raised
        finally:
            batch[0].stop_clock()
    except HandlerTimeout as late:
        # It came when the handler had ended.
        error = error or late
    if error is not None:
        run.decide(error)
    return {delivery: delivery.decided or Ack() for delivery in batch}


def _perform(batch: list[Delivery], actor: str) -> None:
    """Call the handler, and record its successes if it is transactional. Note the answer to each message."""
    first = batch[0]
    with ExitStack() as stack:
        if first.handler.transactional:
            stack.enter_context(first.transaction())
            call_in_transaction(first, [*batch])
            failpoints.reach("before_succeed")
            _succeed(first.using, [delivery for delivery in batch if delivery.answered is None], actor)
            failpoints.reach("after_succeed")
        else:
            call(first, [*batch])
    for delivery in batch:
        if delivery.answered is not None:
            _answer(delivery, delivery.answered)
        else:
            delivery.decided = Recorded() if first.handler.transactional else Ack()


def _succeed(using: str, done: Sequence[Delivery], actor: str) -> None:
    """Record the successes in the transaction of the handler, as its last statement."""
    found = transitions.succeed(using, (Success(delivery.id, delivery.deliveries, actor, None) for delivery in done))
    gone = [delivery for delivery in done if delivery.id not in found]
    if gone:
        raise _Gone(gone)


def _decide(first: Delivery, delivery: Delivery, error: BaseException) -> None:
    """Let an error decide the outcome of a delivery; ``first`` has the transaction of its batch."""
    delivery.cancel_reason, delivery.entry_error = first.cancel_reason, first.entry_error
    # What happens after the commit changes no answer: the effects that the handler wrote for it are committed.
    own = delivery.answered if first.is_committed else None
    if isinstance(error, _Gone) and delivery not in error.gone:
        delivery.decided, delivery.raised = Release("another message of its batch was taken over"), error
    else:
        _answer(delivery, error if own is None else own)


def _answer(delivery: Delivery, error: BaseException) -> None:
    delivery.decided, delivery.raised = answer(delivery, error), error
