"""Claiming ahead: a worker claims a message a moment before its due time, so that its handler begins on time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from .delivery import Delivery
from .due_timer import DueTimer

# The weight of the newest measurement in the mean and in the mean deviation, and the number of deviations that the lead
# allows for: those of RFC 6298, which estimates in this way how long to wait for an answer.
MEAN_WEIGHT, DEVIATION_WEIGHT, DEVIATIONS = 1 / 8, 1 / 4, 4


class ClaimAhead:
    """Decides how early this process asks for messages, and holds early claims until their due times.

    The setting ``CLAIM_AHEAD`` (``longest``, in seconds) bounds how early a message is claimed; 0 turns all of it off.
    The mean and the deviation belong to the thread that makes the consumer's turns. Any thread may hold and release
    deliveries: the due timer guards them by its own lock.
    """

    def __init__(self, longest: float, begin: Callable[[Delivery], object]) -> None:
        """``begin`` is called with each delivery that was held, when it falls due."""
        self.longest = longest
        # None: nothing was measured yet, and messages that are not due are left to other processes.
        self._mean: float | None = None
        self._deviation = 0.0
        self._leaves_to_others = False
        self._due_timer = DueTimer(begin) if longest > 0 else None

    def learn(self, seconds: float) -> None:
        """Add a measurement: the seconds from asking for due messages until they were claimed and handed over."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self._mean) - self._deviation) * DEVIATION_WEIGHT
        self._mean += (seconds - self._mean) * MEAN_WEIGHT

    def leave_to_others(self) -> None:
        """Claim nothing ahead in this process any more: it would take messages that only other processes can run."""
        self._leaves_to_others = True

    @property
    def lead(self) -> float:
        """The process asks this many seconds before the next due time. Of several workers the slowest asks first."""
        if self._mean is None or self._leaves_to_others:
            return 0.0
        return min(self.longest / 2, self._mean + DEVIATIONS * self._deviation)

    @property
    def reach(self) -> float:
        """Messages due within this many seconds are taken. A shorter time would cost a claim for each message."""
        return 2 * self.lead

    # --- until the due time -------------------------------------------------------------------------------------------

    def hold(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Keep the deliveries that are not due yet until they are, and return the others."""
        if self._due_timer is None:
            return deliveries
        due = []
        for delivery in deliveries:
            if delivery.due_mono <= delivery.queued_mono:
                due.append(delivery)
            else:
                self._due_timer.add(delivery)
        return due

    def release(self) -> list[Delivery]:
        """Return the held deliveries, and hold them no longer."""
        return [] if self._due_timer is None else self._due_timer.remove_all()

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The thread that waits for due times; none when claiming ahead is off."""
        return () if self._due_timer is None else (self._due_timer,)

    def stop(self) -> None:
        """End the thread."""
        if self._due_timer is not None:
            self._due_timer.stop()
