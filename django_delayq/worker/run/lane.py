"""A lane: places in which handlers of one kind run, and the deliveries that have a place or wait for one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from ...core.outcomes import Outcome, Release, Retry, storable
from ..parts.begun_page import BegunPage
from ..parts.delivery import Delivery
from .recorder import Recorder

logger = logging.getLogger("django_delayq")

# At most as many claims wait in this process for a place as end within this time. With fewer, handlers wait for claims.
# Seconds.
QUEUED_TIME = 0.05
# Never more than this many wait: a process ends them in a tenth of a second if handlers do nothing.
MOST_QUEUED = 1500
# A delivery that the worker itself failed to run is tried again after this time.
RETRY_FAILED_AFTER = timedelta(seconds=10)


class HeldDeliveries:
    """The held deliveries of a process, in the order in which they came. One lock guards them.

    The consumer adds deliveries; a handler thread, the timeout watch or the main thread removes those that it ends; the
    timeout watch, the lease renewer and the main thread read them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[Delivery, None] = {}

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Hold these deliveries."""
        with self._lock:
            self._deliveries.update(dict.fromkeys(deliveries))

    def remove(self, delivery: Delivery) -> None:
        """Hold this delivery no longer."""
        with self._lock:
            del self._deliveries[delivery]

    def all(self) -> list[Delivery]:
        """Return all held deliveries."""
        with self._lock:
            return list(self._deliveries)

    def __len__(self) -> int:
        return len(self._deliveries)


class _MeanRunTime:
    """The mean run time of handlers, in seconds. Handlers' threads and the timeout watch change it, under the lock."""

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


class Lane:
    """What handler threads and the event loop have in common.

    A delivery waits in ``_queue`` until a place is free, and whoever takes it out of there ends it. ``held``, ``_mean``
    and ``_queue`` are safe from any thread. ``_is_releasing`` is written by the main thread; others only read it. Each
    handler thread adds itself to ``_resting`` and takes itself out, both in one step; others only count it.
    """

    def __init__(self, places: int, recorder: Recorder, worker: str, page: BegunPage) -> None:
        self._all_places = places
        # The handler threads that the database refused, and that are offered nothing for a while.
        self._resting: set[int] = set()
        self.recorder = recorder
        self.worker = worker
        self.page = page
        self.held = HeldDeliveries()
        self.members: Sequence[threading.Thread] = ()
        # Set by the pool before the threads start: called when a delivery has ended, and for each one released
        # unstarted, which is still held then.
        self.on_freed: Callable[[], None] = lambda: None
        self.on_released: Callable[[], None] = lambda: None
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._is_releasing = False
        # A mean so high that no delivery is queued until handlers turn out quicker.
        self._mean = _MeanRunTime(max(1.0, 2 * places * QUEUED_TIME))

    def start(self) -> None:
        """Start the threads."""
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        raise NotImplementedError

    def put(self, delivery: Delivery) -> None:
        """Have a held delivery run as soon as a place is free."""
        self._queue.put(delivery)

    @property
    def places(self) -> int:
        """The number of deliveries that may run at once."""
        return self._all_places - len(self._resting)

    @property
    def size(self) -> int:
        """The number of deliveries that may be held: one for each place, and more when handlers are quick."""
        return self.places + min(MOST_QUEUED, int(self.places * QUEUED_TIME / max(self._mean.seconds, 1e-6)))

    @property
    def room(self) -> int:
        """The number of messages that may be claimed now."""
        return max(0, self.size - len(self.held))

    @property
    def is_quick(self) -> bool:
        """True when handlers end so soon that as many deliveries may wait for a place as have one."""
        return self.size >= 2 * self.places

    @property
    def is_worth_filling(self) -> bool:
        """True when the lane is half empty, or a place is free."""
        held, size = len(self.held), self.size
        return held < self.places or 0 < 2 * held <= size

    # --- release ------------------------------------------------------------------------------------------------------

    def release_all_queued(self) -> None:
        """Release deliveries that have not begun, at once and from now on: the places may be taken for long."""
        self._is_releasing = True
        self.release(self._queued(), Release("shutdown"))

    def release_queued(self, longest: float) -> None:
        """Release all deliveries that wait for a place, when one has waited longer than ``longest`` seconds."""
        now = time.monotonic()
        # A delivery that was claimed ahead does not wait for a place before it is due.
        if any(not d.started_mono and now - max(d.queued_mono, d.due_mono) > longest for d in self.held.all()):
            self._mean.assume_slow()
            self.release(self._queued(), Release("waited too long for a thread"))

    def release(self, deliveries: Iterable[Delivery], outcome: Release) -> None:
        """Release deliveries that were taken out of their places."""
        for delivery in deliveries:
            self.recorder.submit(delivery, outcome, f"worker:{self.worker}")
            self.on_released()
            self.held.remove(delivery)

    def _queued(self) -> Iterator[Delivery]:
        """Take deliveries out of the queue until it is empty."""
        with suppress(queue.Empty):
            while (delivery := self._queue.get_nowait()) is not None:
                yield delivery

    # --- run ----------------------------------------------------------------------------------------------------------

    def _refuse(self, delivery: Delivery, actor: str) -> bool:
        """Release a delivery that must not begin any more, and return whether it is one."""
        if not (self._is_releasing or delivery.lost):
            return False
        self.recorder.submit(delivery, Release("shutdown" if self._is_releasing else "lease lost"), actor)
        self.on_released()
        return True

    def _note_outcome(self, delivery: Delivery, outcome: Outcome, actor: str) -> None:
        now = time.monotonic()
        if delivery.started_mono:
            self._mean.learn(now - delivery.started_mono)
        self.recorder.submit(delivery, outcome, actor, now)

    def _note_failure(self, delivery: Delivery, error: BaseException, actor: str) -> None:
        """Have a delivery retried that the worker failed to run. That is no error of the handler, but, for example, of
        a receiver of a signal, which may raise anything. It costs no attempt if the handler has not begun."""
        logger.error(
            "The worker failed to run %r, which is retried in %s", delivery, RETRY_FAILED_AFTER, exc_info=error
        )
        text = storable(f"the worker failed: {type(error).__name__}")
        self.recorder.submit(delivery, Retry(RETRY_FAILED_AFTER, text, counts=bool(delivery.started_mono)), actor)
