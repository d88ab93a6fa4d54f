"""The threads that run handlers, and the deliveries that they hold."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

from .. import actors
from ..outcomes import Release, Retry, storable
from . import connections
from .claim_ahead import ClaimAhead
from .delivery import Delivery
from .executor import execute
from .held import HeldDeliveries
from .page import Page
from .recorder import Recorder
from .reporting import report_delivered

logger = logging.getLogger("django_delayq")

# Claims that wait in this process for a free thread: at most as many as the threads finish in the first time (seconds),
# and never more than the second number.
QUEUED_TIME = 0.05
MOST_QUEUED = 500
# A delivery that the worker itself failed to run is tried again after this time.
RETRY_FAILED_AFTER = timedelta(seconds=10)


class _MeanRunTime:
    """The mean run time of handlers, in seconds. Handler threads and the timeout watch change it, under the lock."""

    def __init__(self, slow: float) -> None:
        """``slow`` (seconds) is assumed until handlers turn out quicker."""
        self._lock = threading.Lock()
        self._slow = slow
        self.seconds = slow

    def learn(self, seconds: float) -> None:
        """Add the run time of a handler that has ended."""
        with self._lock:
            self.seconds += (seconds - self.seconds) * 0.1

    def assume_slow(self) -> None:
        """Assume slow handlers: those that keep others waiting have not ended, so their run times are not known yet."""
        with self._lock:
            self.seconds = max(self.seconds, self._slow)


class Pool:
    """A fixed number of threads that run handlers, with the deliveries that run or wait for a thread or their due time.

    The consumer submits; the handler threads run; the timeout watch and the main thread release deliveries that have
    not begun. A delivery is in one place at a time (the due timer, the queue, a thread), and the thread that took it
    out of there ends it. ``_held`` and ``_mean`` have locks of their own, and ``_queue`` is safe by itself.
    ``quarantined`` is written by the thread that makes the consumer's turns, and ``_is_releasing`` by the main thread;
    other threads only read them.
    """

    def __init__(
        self,
        threads: int,
        recorder: Recorder,
        worker: str,
        on_freed: Callable[[], None],
        on_released: Callable[[], None],
        claim_ahead: float,
        page: Page,
    ) -> None:
        """``on_freed`` is called when a thread has ended a delivery, ``on_released`` for each one released unstarted.

        The latter is called while the delivery is still held. ``claim_ahead`` is how many seconds early at most
        messages are claimed.
        """
        self.threads = threads
        self.recorder = recorder
        self.worker = worker
        self.page = page
        self._on_freed = on_freed
        self._on_released = on_released
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._held = HeldDeliveries()
        # The delivery that waits to run alone until no other is held.
        self.quarantined: Delivery | None = None
        self._is_releasing = False
        # A mean so high that no delivery is queued until handlers turn out quicker.
        self._mean = _MeanRunTime(max(1.0, 2 * threads * QUEUED_TIME))
        self.claim_ahead = ClaimAhead(claim_ahead, self._queue.put)
        self.members = [
            *self.claim_ahead.threads,
            *(
                threading.Thread(target=self._work, args=(number,), name=f"delayq-handler-{number}", daemon=True)
                for number in range(threads)
            ),
        ]

    def start(self) -> None:
        """Start the threads."""
        for member in self.members:
            member.start()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        """Hold deliveries, and have each run by a thread when it is due."""
        now = time.monotonic()
        for delivery in deliveries:
            delivery.queued_mono = now
        # All deliveries are held before the first of them can end.
        self._held.add(deliveries)
        for delivery in deliveries:
            if not self.claim_ahead.hold(delivery):
                self._queue.put(delivery)

    def held(self) -> list[Delivery]:
        """Return the deliveries that run or wait in this process. Safe from any thread."""
        quarantined = self.quarantined
        return [*self._held.all(), *([] if quarantined is None else [quarantined])]

    @property
    def size(self) -> int:
        """The number of deliveries that may be held: one for each thread, and more when handlers are quick."""
        return self.threads + min(MOST_QUEUED, int(self.threads * QUEUED_TIME / max(self._mean.seconds, 1e-6)))

    @property
    def room(self) -> int:
        """The number of messages that may be claimed now."""
        return max(0, self.size - len(self._held))

    @property
    def is_worth_filling(self) -> bool:
        """True when the pool is half empty, or a thread is idle."""
        held = len(self._held)
        return held < self.threads or held * 2 <= self.size

    @property
    def is_busy(self) -> bool:
        """True when a delivery is held."""
        return len(self._held) > 0

    def release_unstarted(self) -> None:
        """Release deliveries that have not begun, at once and from now on: the threads may be busy for long."""
        self._is_releasing = True
        # First those that are not due: a delivery that falls due meanwhile is then in the queue.
        self._release(self.claim_ahead.release(), Release("shutdown"))
        self._release(self._queued(), Release("shutdown"))

    def release_queued(self, longest: float) -> None:
        """Release all deliveries that wait for a thread, when one has waited longer than ``longest`` seconds."""
        now = time.monotonic()
        if any(not d.started_mono and now - d.queued_mono > longest for d in self._held.all()):
            self._mean.assume_slow()
            self._release(self._queued(), Release("waited too long for a thread"))

    def _release(self, deliveries: Iterable[Delivery], outcome: Release) -> None:
        for delivery in deliveries:
            self.recorder.submit(delivery, outcome, f"worker:{self.worker}")
            self._on_released()
            self._held.remove(delivery)

    def _queued(self) -> Iterator[Delivery]:
        """Take deliveries out of the queue until it is empty."""
        with contextlib.suppress(queue.Empty):
            while (delivery := self._queue.get_nowait()) is not None:
                yield delivery

    def wait_idle(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no delivery is held. Return False after ``timeout`` seconds, or when ``give_up`` returns True."""
        deadline = time.monotonic() + timeout
        while self.is_busy:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        """End each thread after the delivery that it runs."""
        self.claim_ahead.stop()
        for _number in range(self.threads):
            self._queue.put(None)

    def _work(self, number: int) -> None:
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._queue.get()) is not None:
                try:
                    self._run(delivery, actor, number)
                except BaseException as error:
                    # This is not an error of the handler, which would be an outcome. A receiver of a signal may raise
                    # anything.
                    logger.exception(
                        "The worker failed to run %r, which is retried in %s", delivery, RETRY_FAILED_AFTER
                    )
                    text = storable(f"the worker failed: {type(error).__name__}")
                    self.recorder.submit(delivery, Retry(RETRY_FAILED_AFTER, text), actor)
                finally:
                    self._held.remove(delivery)
                self._on_freed()
        connections.close_all()

    def _run(self, delivery: Delivery, actor: str, number: int) -> None:
        if self._is_releasing or delivery.lost:
            self.recorder.submit(delivery, Release("shutdown" if self._is_releasing else "lease lost"), actor)
            self._on_released()
            return
        # Whatever follows may kill the process.
        self.page.note_begun(number, delivery.id)
        connections.before_task()
        report_delivered(delivery)
        # A time zone or language that a handler activates ends with it.
        outcome = contextvars.copy_context().run(execute, delivery, actor)
        self._mean.learn(time.monotonic() - delivery.started_mono)
        connections.after_task()
        self.recorder.submit(delivery, outcome, actor)
