"""The threads that run handlers: sync ones, and transactional ones of both kinds."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from ...core import actors
from ...core.durations import brief
from ...core.outcomes import Outcome, Unentered
from ...extensions import Service
from ..shared import connections
from ..shared.shared_state import SharedState
from .delivery import Delivery
from .executor import execute, not_entered
from .pool import Lane
from .recorder import Recorder
from .reporting import report_delivered

logger = logging.getLogger("django_delayq")

# A thread that the database gave no transaction is offered nothing for this long, after the next refusal in a row for
# twice that, and so on. Seconds.
FIRST_REST = 5.0
# A thread is offered nothing for this long at most. Seconds.
LONGEST_REST = 60.0
# While the database refuses a thread, the others close their connections when they had nothing to do for this long: the
# recorder and other processes may need one. Seconds.
SHORT_CLOSED_AFTER = 1.0
# The time for which handlers have all threads before the log says so. Seconds.
ALL_TAKEN_FOR = 60.0
# The time between two looks for that. Seconds.
TAKEN_CHECK_INTERVAL = 1.0
# Handlers of a topic are quick while their mean run time is below this. Seconds.
QUICK = 0.00015
# A run counts with this time at most: Python may keep a thread waiting for longer than the handler takes. Seconds.
LONGEST_RUN = 0.001
# The weight of the newest run in the mean. Quick handlers that had to wait for others, some of them in a row, must not
# count as slow: side by side they would take longer, and stay so.
RUN_WEIGHT = 0.02
# A quick handler that turns out slow keeps others waiting for up to twice this time. Seconds.
LONGEST_TURN = 0.002


class Turns:
    """Lets one thread take deliveries, and run them one after another while handlers are quick.

    With several threads at it Python switches between them at each call to the system, which costs more than a quick
    handler itself. Before any other handler the thread passes the turn on, so that all threads run handlers that wait.
    A thread of its own passes the turn on when a handler that was quick so far is not.

    ``_guard`` guards ``_holder``. What is known of a topic is an estimate, which may miss a run.
    """

    def __init__(self, deliveries: SimpleQueue[Any], threads: int) -> None:
        self._deliveries = deliveries
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._holder: int | None = None
        # The number of quick handlers that were begun, and the thread that runs one now, with the turn.
        self._begun = 0
        self._running: int | None = None
        self._means: defaultdict[str, float] = defaultdict(float)
        # Set while deliveries wait for a quick handler: only then the watch is awake.
        self._is_waited_for = threading.Event()
        self._stopping = False
        # One thread has always the turn.
        self.members: Sequence[threading.Thread] = ()
        if threads > 1:
            self.members = [threading.Thread(target=self._watch, name="delayq-turn-watch", daemon=True)]

    def take(self, thread: int, timeout: float = -1) -> bool:
        """Wait for the turn, up to ``timeout`` seconds (-1: for ever), and return whether the thread has it."""
        if self._turn.acquire(timeout=timeout):
            self._holder = thread
        return self._holder == thread

    def has(self, thread: int) -> bool:
        """Return whether the thread has the turn still."""
        return self._holder == thread

    def pass_on(self, thread: int) -> None:
        """Let another thread have the turn, unless it has it already."""
        with self._guard:
            if self._holder == thread:
                self._holder = self._running = None
                self._turn.release()

    def begin(self, thread: int, topic: str) -> None:
        """Keep the turn during a handler if it is quick by all that is known; else pass it on."""
        if self._means[topic] >= QUICK:
            self.pass_on(thread)
            return
        # The watch may have passed the turn on just before this thread got its delivery.
        if self.has(thread):
            self._begun += 1
            self._running = thread
            self.note_waiting()

    def end(self, thread: int, topic: str, seconds: float) -> None:
        """Take note of the run time of a handler."""
        if self._running == thread:
            self._running = None
        mean = self._means[topic]
        self._means[topic] = mean + (min(seconds, LONGEST_RUN) - mean) * RUN_WEIGHT

    def note_waiting(self) -> None:
        """Wake the watch if a delivery waits for a quick handler. Call this after each change that can lead to that."""
        if self._running is not None and not (self._is_waited_for.is_set() or self._deliveries.empty()):
            self._is_waited_for.set()

    def stop(self) -> None:
        """End the watch."""
        self._stopping = True
        self._is_waited_for.set()

    def _watch(self) -> None:
        while self._is_waited_for.wait() and not self._stopping:
            begun = self._begun
            time.sleep(LONGEST_TURN)
            running = self._running
            if running is None or self._deliveries.empty():
                self._is_waited_for.clear()
                # One may have begun, and a delivery may have come, in between.
                self.note_waiting()
            elif begun == self._begun:
                self.pass_on(running)


def rest(refusals: int) -> float:
    """Return the seconds for which a thread is offered nothing after so many refusals in a row."""
    return min(LONGEST_REST, FIRST_REST * 2.0 ** min(refusals - 1, 20))


class HandlerThreads(Lane):
    """A fixed number of threads, each of which runs one handler at a time.

    Each thread owns its number in ``_refusals``, which the others read, adds itself to ``_resting`` and takes itself
    out, both in one step; others only count it. ``_stopping`` is only ever set.
    """

    def __init__(self, threads: int, recorder: Recorder, worker: str, shared: SharedState) -> None:
        super().__init__(threads, recorder, worker, shared)
        self.turns = Turns(self._queue, threads)
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
        self.members = [*self.turns.members, *workers]
        self.services = [ThreadsWatch(self)]

    @property
    def places(self) -> int:
        """The number of deliveries that may run at once: one in each thread that does not rest."""
        return self._all_places - len(self._resting)

    def put(self, delivery: Delivery) -> None:
        """Have a held delivery run as soon as a thread is free."""
        super().put(delivery)
        self.turns.note_waiting()

    def stop(self) -> None:
        """End each thread after the delivery that it runs."""
        self._stopping.set()
        for _number in range(self._all_places):
            self._queue.put(None)
        self.turns.stop()

    def _work(self, number: int) -> None:
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._next(number)) is not None:
                began = time.monotonic()
                self.turns.begin(number, delivery.topic)
                try:
                    self._run(delivery, actor, number)
                except BaseException as error:  # noqa: BLE001
                    self._note_failure(delivery, error, actor)
                finally:
                    self.held.remove(delivery)
                    self.turns.end(number, delivery.topic, time.monotonic() - began)
                self.on_freed()
                if number in self._resting:
                    self._rest(number)
        self.turns.pass_on(number)
        connections.close_all()

    def _next(self, number: int) -> Delivery | None:
        """Return the next delivery, which only the thread that has the turn takes; None at the end."""
        closed_after = SHORT_CLOSED_AFTER if any(self._refusals) else connections.IDLE_CLOSED_AFTER
        if not (self.turns.has(number) or self.turns.take(number, closed_after)):
            connections.close_all()
            self.turns.take(number)
        return connections.wait_for(self._queue, closed_after)

    def _rest(self, number: int) -> None:
        """Take nothing for a while. Others take what is waiting."""
        self.turns.pass_on(number)
        self._stopping.wait(rest(self._refusals[number]))
        self._resting.discard(number)
        self.on_freed()

    def _run(self, delivery: Delivery, actor: str, number: int) -> None:
        if self._refuse(delivery, actor):
            return
        connections.before_task()
        outcome = self._execute(delivery, actor, number) if delivery.enter() else not_entered(delivery)
        if connections.after_task() == connections.IN_TRANSACTION and delivery.topic not in self._dirtying:
            self._dirtying.add(delivery.topic)
            logger.warning(
                "The handler of %s left a database connection in a transaction; that connection is closed, and what "
                "the handler did not commit is undone",
                delivery.topic,
            )
        self._note_entry(delivery, outcome, number)
        self._note_outcome(delivery, outcome, actor)

    def _execute(self, delivery: Delivery, actor: str, number: int) -> Outcome:
        # Whatever follows may kill the process.
        self.shared.note_begun(number, delivery.id)
        delivery.thread_number = number
        # A time zone or language that a handler, or a receiver before it, activates ends with it.
        context = contextvars.copy_context()
        context.run(report_delivered, delivery)
        return context.run(execute, delivery, actor)

    def _note_entry(self, delivery: Delivery, outcome: Outcome, number: int) -> None:
        """Take the place of this thread out of the lane if the database gave it no transaction.

        That comes before the delivery is no longer held: otherwise another one would be claimed for this thread.
        """
        if isinstance(outcome, Unentered):
            self._refusals[number] += 1
            self._resting.add(number)
            logger.warning(
                "The database gave handler thread %d no transaction; the thread takes no message for %g s: %s",
                number,
                rest(self._refusals[number]),
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
        self._told: set[str] = set()

    def tick(self) -> float:
        """Log the topics when no thread has become free for a while."""
        since = time.monotonic() - ALL_TAKEN_FOR
        topics = [d.topic for d in self.lane.held.all() if 0 < d.started_mono < since]
        if len(topics) >= self.lane.places and not self._told.issuperset(topics):
            self._told.update(topics)
            logger.warning(
                "All %d handler threads of this process have been running the same handlers for %s, and nothing else "
                "begins in them. Topics: %s. Give them a timeout, a queue with workers of its own, or more --threads",
                len(topics),
                brief(ALL_TAKEN_FOR),
                ", ".join(sorted(set(topics))),
            )
        return TAKEN_CHECK_INTERVAL
