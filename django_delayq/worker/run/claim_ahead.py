"""Claiming ahead: a worker claims a message a moment before its due time, so that its handler begins on time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..parts.delivery import Delivery
from .due_timer import DueTimer

# How long before its due time a message is claimed at most, so that its handler begins on time. Seconds.
CLAIM_AHEAD = 0.05
# Messages that fall due within this time are claimed together. A claim for each would cost more, and with a longer time
# one process would take what several could share. Seconds.
TOGETHER = 0.005
# Messages are claimed so long before their due times at most where a claim takes something from others that are due
# already: a place under a limit, or a free thread while handlers are slow. Seconds.
NEAR = 0.01


class ClaimAhead:
    """Decides how early this process asks for messages, and holds early claims until their due times.

    A claim is a commit, which waits for the disk: usually a millisecond, but up to a tenth of a second while the disk
    is busy. The process asks so early that slow claims end in time, too. ``longest``
    (seconds) says how early a message is claimed at most; 0 turns all of it off. Any thread may hold and release
    deliveries: the due timer guards them by its own lock.
    """

    def __init__(self, longest: float, begin: Callable[[Delivery], object]) -> None:
        """``begin`` is called with each delivery that was held, when it falls due."""
        self.longest = longest
        self._leaves_to_others = False
        self._due_timer = DueTimer(begin) if longest > 0 else None

    def leave_to_others(self) -> None:
        """Claim nothing ahead in this process any more: it would take messages that only other processes can run."""
        self._leaves_to_others = True

    def lead(self, *, quick: bool) -> float:
        """Return how many seconds before the next due time the process asks. ``quick``: as in ``reach``."""
        reach = self.reach(quick=quick)
        return max(reach - TOGETHER, reach / 2)

    def reach(self, *, quick: bool) -> float:
        """Return how many seconds ahead messages are taken. ``quick``: handlers take no thread for long."""
        if self._leaves_to_others:
            return 0.0
        return self.longest if quick else min(self.longest, NEAR)

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
