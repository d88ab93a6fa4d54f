"""The threads that run handlers: sync ones, and transactional ones of both kinds."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from ...core import actors
from ...core.durations import brief
from ...core.outcomes import Outcome, Unentered
from ...extensions import Service
from ...project import registry
from ..shared import connections
from ..shared.lifetime import Budget
from ..shared.shared_state import SharedState
from .batches import Gathering, execute_batch
from .delivery import Delivery
from .executor import execute, not_entered
from .pool import Lane
from .recorder import Recorder
from .reporting import report_delivered
from .run_tuning import RunTuning

logger = logging.getLogger("django_delayq")


class Baton:
    """Lets one thread at a time take deliveries, and run them one after another while handlers are quick.

    If several threads took deliveries, Python would switch between them at each call to the system, which costs more
    than a quick handler itself. Before any other handler the thread passes the baton on, so that all threads run
    handlers that wait. When a handler that was quick so far takes long, the watch, a thread of its own, passes the
    baton on.

    ``_guard`` guards ``_owner``, which any thread reads. The owner writes ``_begun`` and ``_running``. Each handler
    thread writes ``_means``: they are estimates, which may miss a run.
    """

    def __init__(self, deliveries: SimpleQueue[Any], threads: int, tuning: RunTuning) -> None:
        self._deliveries = deliveries
        self.tuning = tuning
        self._baton = threading.Lock()
        self._guard = threading.Lock()
        self._owner: int | None = None
        # The number of quick handlers that were begun, and the thread that runs one now, with the baton.
        self._begun = 0
        self._running: int | None = None
        self._means: defaultdict[str, float] = defaultdict(float)
        # Set while deliveries wait for a quick handler: only then the watch is awake.
        self._is_waited_for = threading.Event()
        self._stopping = threading.Event()
        # A single thread always has the baton.
        self.members: Sequence[threading.Thread] = ()
        if threads > 1:
            self.members = [threading.Thread(target=self._watch, name="delayq-baton-watch", daemon=True)]

    def acquire(self, thread: int, timeout: float = -1) -> bool:
        """Wait for the baton, up to ``timeout`` seconds (-1: for ever), and return whether the thread has it."""
        if self._baton.acquire(timeout=timeout):
            self._owner = thread
        return self._owner == thread

    def has(self, thread: int) -> bool:
        """Return whether the thread still has the baton."""
        return self._owner == thread

    def pass_on(self, thread: int) -> None:
        """Let another thread have the baton, unless one has it already."""
        with self._guard:
            if self._owner == thread:
                self._owner = self._running = None
                self._baton.release()

    def begin(self, thread: int, topic: str) -> None:
        """Keep the baton during a handler that is quick by its earlier runs; else pass it on."""
        if self._means[topic] >= self.tuning.quick:
            self.pass_on(thread)
            return
        # The watch may have passed the baton on just before this thread got its delivery.
        if self.has(thread):
            self._begun += 1
            self._running = thread
            self.note_waiting()

    def end(self, thread: int, topic: str, seconds: float) -> None:
        """Take note of the run time of a handler."""
        if self._running == thread:
            self._running = None
        mean, tuning = self._means[topic], self.tuning
        self._means[topic] = mean + (min(seconds, tuning.longest_run) - mean) * tuning.run_weight

    def note_waiting(self) -> None:
        """Wake the watch if a delivery waits for a quick handler. Call this after each change that can lead to that."""
        if self._running is not None and not (self._is_waited_for.is_set() or self._deliveries.empty()):
            self._is_waited_for.set()

    def stop(self) -> None:
        """End the watch."""
        self._stopping.set()
        self._is_waited_for.set()

    def _watch(self) -> None:
        """Pass the baton on when a handler keeps it for too long while deliveries wait. This is a thread."""
        while self._is_waited_for.wait() and not self._stopping.is_set():
            begun = self._begun
            time.sleep(self.tuning.longest_baton)
            running = self._running
            if running is None or self._deliveries.empty():
                self._is_waited_for.clear()
                # Before the flag was cleared a quick handler may have begun, a delivery may have come, or ``stop`` been
                # called.
                self.note_waiting()
                if self._stopping.is_set():
                    return
            elif begun == self._begun:
                self.pass_on(running)


class HandlerThreads(Lane):
    """A fixed number of threads, each of which runs one handler at a time.

    Each thread owns its number in ``_refusals``, which the others read. It adds itself to ``_resting`` and takes itself
    out, each by one operation of a set; the others only count that. Any thread adds to ``_dirtying``. ``_stopping`` is
    only ever set.
    """

    def __init__(self, threads: int, recorder: Recorder, worker: str, shared: SharedState, budget: Budget) -> None:
        super().__init__(threads, recorder, worker, shared, budget)
        self.baton = Baton(self._queue, threads, self.tuning)
        largest = registry.largest_batch()
        # None: no handler takes batches.
        self.gathering = None if largest == 1 else Gathering(self._queue, largest)
        # How often in a row the database gave each thread no transaction.
        self._refusals = [0] * threads
        # The threads that are offered nothing for a while because of that.
        self._resting: set[int] = set()
        self._stopping = threading.Event()
        # The topics whose handlers have left a connection in a transaction.
        self._dirtying: set[str] = set()
        workers = [
            threading.Thread(target=self._work, args=(number,), name=f"delayq-handler-{number}", daemon=True)
            for number in range(threads)
        ]
        self.members = [*self.baton.members, *workers]
        self.services = [ThreadsWatch(self)]

    @property
    def slots(self) -> int:
        """The number of deliveries that may run at once: one in each thread that does not rest."""
        return self._all_slots - len(self._resting)

    @property
    def size(self) -> int:
        """The number of deliveries that may be held: more when handlers are quick, or take batches."""
        more = 0 if self.gathering is None else self.gathering.company(self.slots, self.tuning.most_queued)
        return super().size + more

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Have held deliveries run as soon as threads are free."""
        if self.gathering is not None:
            for delivery in deliveries:
                self.gathering.note(delivery)
        super().enqueue(deliveries)
        self.baton.note_waiting()

    def release_all_queued(self) -> None:
        """Release deliveries that have not begun, at once and from now on."""
        super().release_all_queued()
        if self.gathering is not None:
            self.gathering.end()

    def _queued(self) -> Iterator[Delivery]:
        queued, gathering = super()._queued(), self.gathering
        if gathering is None:
            return queued
        gathering.expect_none()
        return (one for one in queued if gathering.withdraw(one))

    def stop(self) -> None:
        """End each thread after the delivery that it runs."""
        self._stopping.set()
        for _number in range(self._all_slots):
            self._queue.put(None)
        self.baton.stop()

    def _work(self, number: int) -> None:
        """Take deliveries and run their handlers, until the end. This is a handler thread."""
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._next(number)) is not None:
                batch = None if delivery.handler.batch == 1 else self._gather(delivery, number)
                if batch is not None and not batch:
                    # It has begun in the batch of another delivery.
                    continue
                began = time.monotonic()
                self.baton.begin(number, delivery.topic)
                try:
                    if batch is None:
                        self._run(delivery, actor, number)
                    else:
                        self._run_batch(batch, actor, number)
                except BaseException as error:  # noqa: BLE001
                    self._note_failure(delivery, error, actor)
                finally:
                    for one in batch or (delivery,):
                        self.held.remove(one)
                    self.baton.end(number, delivery.topic, time.monotonic() - began)
                self._note_freed()
                if number in self._resting:
                    self._rest(number)
        self.baton.pass_on(number)
        connections.close_all()

    def _next(self, number: int) -> Delivery | None:
        """Return the next delivery, which only the thread with the baton takes; None at the end."""
        closed_after = self.tuning.short_closed_after if any(self._refusals) else self.tuning.idle_closed_after
        if not (self.baton.has(number) or self.baton.acquire(number, closed_after)):
            connections.close_all()
            self.baton.acquire(number)
        return connections.wait_for(self._queue, closed_after)

    def _rest(self, number: int) -> None:
        """Take nothing for a while. Others take what is waiting."""
        self.baton.pass_on(number)
        self._stopping.wait(self.tuning.rest(self._refusals[number]))
        self._resting.discard(number)
        self._note_freed()

    def _run(self, delivery: Delivery, actor: str, number: int) -> None:
        """Run the handler of a delivery in this thread, and hand its outcome to the recorder."""
        if self._refuse(delivery, actor):
            return
        connections.before_task()
        outcome = self._execute(delivery, actor, number) if delivery.enter() else not_entered(delivery)
        self._check_connections(delivery.topic)
        self._note_entry(delivery, outcome, number)
        self._note_outcome(delivery, outcome, actor)

    def _gather(self, delivery: Delivery, number: int) -> list[Delivery]:
        """Return the deliveries of a batch handler that begin together with one that was found in the queue."""
        if self.gathering is None:
            # The handler was registered when the process ran already.
            return [delivery]
        if delivery.handler.linger:
            self.baton.pass_on(number)
        return self.gathering.gather(delivery)

    def _run_batch(self, gathered: list[Delivery], actor: str, number: int) -> None:
        """Run the handler of a batch in this thread, and hand the outcome of each delivery to the recorder."""
        batch = [delivery for delivery in gathered if not self._refuse(delivery, actor)]
        if not batch:
            return
        connections.before_task()
        first = batch[0]
        try:
            outcomes = self._execute_batch(batch, actor, number) if first.enter() else [not_entered(first)] * len(batch)
        except BaseException as error:  # noqa: BLE001
            for delivery in batch:
                self._note_failure(delivery, error, actor)
            return
        self._check_connections(first.topic)
        self._note_entry(first, next((one for one in outcomes if isinstance(one, Unentered)), outcomes[0]), number)
        for delivery, outcome in zip(batch, outcomes, strict=True):
            self._note_outcome(delivery, outcome, actor, among=len(batch))

    def _execute_batch(self, batch: list[Delivery], actor: str, number: int) -> list[Outcome]:
        # Whatever follows may kill the process.
        for delivery in batch:
            self.shared.note_begun(number, delivery.id)
        context = contextvars.copy_context()
        for delivery in batch:
            context.run(report_delivered, delivery)
        return context.run(execute_batch, batch, actor)

    def _check_connections(self, topic: str) -> None:
        """Close the connections that a handler left dirty, and log that it left one in a transaction: once a topic."""
        if connections.after_task() == connections.IN_TRANSACTION and topic not in self._dirtying:
            self._dirtying.add(topic)
            logger.warning(
                "The handler of %s left a database connection in a transaction; that connection is closed, and what "
                "the handler did not commit is undone",
                topic,
            )

    def _execute(self, delivery: Delivery, actor: str, number: int) -> Outcome:
        # Whatever follows may kill the process.
        self.shared.note_begun(number, delivery.id)
        delivery.thread_number = number
        # A time zone or language that a handler, or a receiver before it, activates ends with it.
        context = contextvars.copy_context()
        context.run(report_delivered, delivery)
        return context.run(execute, delivery, actor)

    def _note_entry(self, delivery: Delivery, outcome: Outcome, number: int) -> None:
        """Take the slot of this thread out of the lane if the database gave it no transaction.

        That comes before the delivery is no longer held: otherwise another one would be claimed for this thread.
        """
        if isinstance(outcome, Unentered):
            self._refusals[number] += 1
            self._resting.add(number)
            logger.warning(
                "The database gave handler thread %d no transaction; the thread takes no message for %g s: %s",
                number,
                self.tuning.rest(self._refusals[number]),
                outcome.reason,
            )
        elif delivery.handler.transactional:
            self._refusals[number] = 0


class ThreadsWatch(Service):
    """Notices that all threads are with handlers that run for long, and logs their topics: each topic once."""

    name = "handler threads watch"
    thread = "timeout-watch"

    def __init__(self, lane: HandlerThreads) -> None:
        self.lane = lane
        self.tuning = lane.tuning
        self._told: set[str] = set()

    def tick(self) -> float:
        """Log the topics when no thread has become free for a while."""
        since = time.monotonic() - self.tuning.all_taken_for
        topics = [d.topic for d in self.lane.held.all() if 0 < d.started_mono < since and d.has_clock]
        if len(topics) >= self.lane.slots and not self._told.issuperset(topics):
            self._told.update(topics)
            logger.warning(
                "All %d handler threads of this process have been running the same handlers for %s, and nothing else "
                "begins in them. Topics: %s. Give them a timeout, a queue with workers of its own, or more --threads",
                len(topics),
                brief(self.tuning.all_taken_for),
                ", ".join(sorted(set(topics))),
            )
        return self.tuning.all_taken_for / 60
