"""The pool: all deliveries that a process holds, in its handler threads and on its event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...core.outcomes import Release
from ...project.registry import Handler
from ..parts.begun_page import BegunPage
from ..parts.delivery import Delivery
from .claim_ahead import ClaimAhead
from .event_loop import EventLoop
from .handler_threads import HandlerThreads
from .lane import Lane
from .recorder import Recorder

# Async handlers that are cancelled because their process ends have this time to clean up. Seconds.
CANCEL_TIME = 2.0


class Pool:
    """The lanes of a process, and the deliveries that run in them or wait for a place or their due time.

    The consumer submits; the lanes run; the timeout watch and the main thread release deliveries that have not begun. A
    delivery is in one place at a time (the due timer, the queue of its lane, a place), and the thread that took it out
    of there ends it. ``quarantined`` is written by the thread that makes the consumer's turns; other threads only read
    it.
    """

    def __init__(
        self,
        threads: HandlerThreads,
        # None: no handler of this process runs on an event loop.
        loop: EventLoop | None,
        recorder: Recorder,
        on_freed: Callable[[], None],
        on_released: Callable[[], None],
        claim_ahead: float,
        page: BegunPage,
    ) -> None:
        """``on_freed`` is called when a delivery has ended, ``on_released`` for each one released unstarted.

        The latter is called while the delivery is still held. ``claim_ahead`` is how many seconds early at most
        messages are claimed.
        """
        self.threads = threads
        self.loop = loop
        self.lanes: tuple[Lane, ...] = (threads,) if loop is None else (threads, loop)
        self.recorder = recorder
        self.page = page
        for lane in self.lanes:
            lane.on_freed, lane.on_released = on_freed, on_released
        # The delivery that waits to run alone until no other is held.
        self.quarantined: Delivery | None = None
        self.claim_ahead = ClaimAhead(claim_ahead, lambda delivery: self.lane_of(delivery.handler).put(delivery))
        self.members = [*self.claim_ahead.threads, *(member for lane in self.lanes for member in lane.members)]

    def lane_of(self, handler: Handler) -> Lane:
        """Return the lane in which a handler runs."""
        return self.loop if self.loop is not None and handler.runs_on_loop else self.threads

    def start(self) -> None:
        """Start the threads."""
        for member in self.claim_ahead.threads:
            member.start()
        for lane in self.lanes:
            lane.start()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        """Hold deliveries, and have each run when it is due and its lane has a place."""
        now = time.monotonic()
        for delivery in deliveries:
            delivery.queued_mono = now
        # All deliveries are held before the first of them can end.
        if self.loop is None:
            self.threads.held.add(deliveries)
        else:
            for lane in self.lanes:
                lane.held.add([delivery for delivery in deliveries if self.lane_of(delivery.handler) is lane])
        for delivery in self.claim_ahead.hold(deliveries):
            self.lane_of(delivery.handler).put(delivery)

    def held(self) -> list[Delivery]:
        """Return the deliveries that run or wait in this process. Safe from any thread."""
        quarantined = self.quarantined
        running = [delivery for lane in self.lanes for delivery in lane.held.all()]
        return [*running, *([] if quarantined is None else [quarantined])]

    @property
    def is_busy(self) -> bool:
        """True when a delivery is held."""
        return any(len(lane.held) > 0 for lane in self.lanes)

    def release_unstarted(self) -> None:
        """Release deliveries that have not begun, at once and from now on."""
        # First those that are not due: a delivery that falls due meanwhile is then in a queue.
        for delivery in self.claim_ahead.release():
            self.lane_of(delivery.handler).release([delivery], Release("shutdown"))
        for lane in self.lanes:
            lane.release_all_queued()

    def release_queued(self, longest: float) -> None:
        """Release all deliveries that wait for a place, when one of their lane has waited longer than ``longest``."""
        for lane in self.lanes:
            lane.release_queued(longest)

    def wait_idle(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no delivery is held. Return False after ``timeout`` seconds, or when ``give_up`` returns True."""
        deadline = time.monotonic() + timeout
        while self.is_busy:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(0.01)
        return True

    def finish(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no delivery is held, and after ``timeout`` seconds cancel the async handlers, which are released.

        Return False when a delivery is still held then.
        """
        if self.wait_idle(timeout, give_up):
            return True
        cancelled = [delivery for delivery in self.held() if delivery.cancel("shutdown")]
        return bool(cancelled) and self.wait_idle(CANCEL_TIME, give_up)

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        self.claim_ahead.stop()
        for lane in self.lanes:
            lane.stop()
