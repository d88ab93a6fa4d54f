"""The threads that run handlers."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

from .. import actors, signals
from ..models import Message
from ..outcomes import Release, Retry, storable
from . import connections
from .delivery import Delivery
from .due_timer import DueTimer
from .executor import execute
from .recorder import Recorder, log

logger = logging.getLogger("django_delayq")

# Claims that wait in this process for a free thread are at most what the threads work off in this time. Seconds.
AHEAD = 0.05
MOST_AHEAD = 500
# What the worker itself failed to run is tried again after this time.
FAILED = timedelta(seconds=10)


class Pool:
    """A fixed number of threads, and what they hold: deliveries that run, and a few that wait for one or to be due."""

    def __init__(
        self,
        threads: int,
        recorder: Recorder,
        worker: str,
        freed: Callable[[], None],
        returned: Callable[[], None] = lambda: None,
    ) -> None:
        """``freed`` is told of each end; ``returned`` of each that is given back unstarted, while it is held yet."""
        self.threads = threads
        self.recorder = recorder
        self.worker = worker
        self._freed = freed
        self._waiting: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._held: dict[tuple[int, int], Delivery] = {}
        self._returned = returned
        # Waits until nothing else is held, to run alone.
        self.aside: Delivery | None = None
        self._draining = False
        # Mean run time of a handler, in seconds; so slow, until shown otherwise, that nothing is held ahead.
        self._slow = max(1.0, 2 * threads * AHEAD)
        self._mean = self._slow
        self._due_timer = DueTimer(self._waiting.put)
        self._members = [
            self._due_timer,
            *(
                threading.Thread(target=self._work, args=(number,), name=f"delayq-handler-{number}", daemon=True)
                for number in range(threads)
            ),
        ]

    def start(self) -> None:
        for member in self._members:
            member.start()

    @property
    def members(self) -> list[threading.Thread]:
        return self._members

    def submit(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            delivery.queued_mono = time.monotonic()
            self._held[delivery.id, delivery.deliveries] = delivery
            if delivery.due_mono > delivery.queued_mono:
                self._due_timer.set(delivery)
            else:
                self._waiting.put(delivery)

    def held(self) -> list[Delivery]:
        """What runs or waits here. Safe from any thread."""
        aside = self.aside
        return [*self._held.copy().values(), *([aside] if aside is not None else [])]

    @property
    def size(self) -> int:
        """How many may be held at once: one for each thread, and more ahead when handlers are quick."""
        return self.threads + min(MOST_AHEAD, int(self.threads * AHEAD / max(self._mean, 1e-6)))

    @property
    def room(self) -> int:
        """How many more may be claimed."""
        return max(0, self.size - len(self._held))

    @property
    def is_worth_filling(self) -> bool:
        """Half empty, or a thread idle."""
        held = len(self._held)
        return held < self.threads or held * 2 <= self.size

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def drain(self) -> None:
        """From now on give back what has not begun, at once: the threads may be busy for long."""
        self._draining = True
        # Those that are not due first: what becomes due meanwhile is then among the others.
        self._give_back(self._due_timer.clear(), Release("shutdown"))
        self._give_back(self._queued(), Release("shutdown"))

    def give_back_waiting(self, longest: float) -> None:
        """When something has waited for a thread for longer than this (seconds): all that waits."""
        now = time.monotonic()
        if any(not d.started_mono and now - d.queued_mono > longest for d in self._held.copy().values()):
            # Handlers have become slow, which is known otherwise when the first of them ends.
            self._mean = max(self._mean, self._slow)
            self._give_back(self._queued(), Release("waited too long for a thread"))

    def _give_back(self, deliveries: Iterable[Delivery], outcome: Release) -> None:
        for delivery in deliveries:
            self.recorder.submit(delivery, outcome, f"worker:{self.worker}")
            self._returned()
            del self._held[delivery.id, delivery.deliveries]

    def _queued(self) -> Iterator[Delivery]:
        """What waits for a thread, and does so no more."""
        with contextlib.suppress(queue.Empty):
            while (delivery := self._waiting.get_nowait()) is not None:
                yield delivery

    def wait_idle(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Until nothing is held; False when that took too long."""
        deadline = time.monotonic() + timeout
        while self._held:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        self._due_timer.stop()
        for _number in range(self.threads):
            self._waiting.put(None)

    def _work(self, number: int) -> None:
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._waiting.get()) is not None:
                try:
                    self._run(delivery, actor)
                except BaseException as error:
                    # Not from the handler, whose errors are outcomes; a receiver of a signal may raise anything.
                    logger.exception("%r could not be run", delivery)
                    text = storable(f"the worker failed: {type(error).__name__}")
                    self.recorder.submit(delivery, Retry(FAILED, text), actor)
                finally:
                    del self._held[delivery.id, delivery.deliveries]
                self._freed()
        connections.close_all()

    def _run(self, delivery: Delivery, actor: str) -> None:
        if self._draining or delivery.lost:
            self.recorder.submit(delivery, Release("shutdown" if self._draining else "lease lost"), actor)
            self._returned()
            return
        connections.before_task()
        if logger.isEnabledFor(logging.DEBUG):
            log(logging.DEBUG, "delivered", delivery, lateness_ms=delivery.lateness * 1000)
        if signals.message_delivered.receivers:
            told = {"delivery": delivery.deliveries, "lateness": delivery.lateness}
            signals.emit(
                signals.message_delivered, Message, **told, **signals.message_arguments(delivery, delivery.using)
            )
        # What a handler activates (a time zone, a language) ends with it.
        outcome = contextvars.copy_context().run(execute, delivery, actor)
        self._mean += (time.monotonic() - delivery.started_mono - self._mean) * 0.1
        connections.after_task()
        self.recorder.submit(delivery, outcome, actor)
