"""Claiming ahead: a worker claims a message a moment before its due time, so that its handler begins on time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..parts.delivery import Delivery

# How long before its due time a message is claimed at most, so that its handler begins on time. Seconds.
CLAIM_AHEAD = 0.05
# Messages that fall due within this time are claimed together. A claim for each would cost more, and with a longer time
# one process would take what several could share. Seconds.
TOGETHER = 0.005
# Messages are claimed so long before their due times at most where a claim takes something from others that are due
# already: a place under a limit, or a free thread while handlers are slow. Seconds.
NEAR = 0.01


class _Waiting(NamedTuple):
    """A waiting delivery. Deliveries sort by due time, then by priority, the greatest first."""

    due_mono: float
    rank: int
    # Deliveries cannot be compared.
    number: int
    delivery: Delivery


class ClaimAhead(threading.Thread):
    """Decides how early this process asks for messages, and holds early claims until they fall due.

    A claim is a commit, which waits for the disk: usually a millisecond, but up to a tenth of a second while the disk
    is busy. The process asks so early that slow claims end in time, too. The thread calls ``begin`` with each delivery
    when it is due, never before, so that no handler thread has to wait for it.

    Any thread may hold and release deliveries: ``_changed`` guards the heap and ``_stopping``.
    """

    def __init__(self, longest: float, begin: Callable[[Delivery], object]) -> None:
        """``longest`` (seconds) says how early a message is claimed at most. ``begin`` is called under a lock, and must
        not block."""
        super().__init__(name="delayq-due-timer", daemon=True)
        self.longest = longest
        self._leaves_to_others = False
        self._begin = begin
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False

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
        due = []
        for delivery in deliveries:
            if delivery.due_mono <= delivery.queued_mono:
                due.append(delivery)
            else:
                self._add(delivery)
        return due

    def release(self) -> list[Delivery]:
        """Return the held deliveries, and hold them no longer."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        return [place.delivery for place in waiting]

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Sleep until the first delivery is due or an earlier one is added."""
        with self._changed:
            while not self._stopping:
                early = self._waiting[0].due_mono - time.monotonic() if self._waiting else None
                if early is None or early > 0:
                    self._changed.wait(early)
                else:
                    self._begin(heapq.heappop(self._waiting).delivery)

    def _add(self, delivery: Delivery) -> None:
        with self._changed:
            waiting = _Waiting(delivery.due_mono, -delivery.priority, next(self._numbers), delivery)
            heapq.heappush(self._waiting, waiting)
            if self._waiting[0] is waiting:
                self._changed.notify()
