"""Keeps deliveries that were claimed a moment early until they fall due."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..parts.delivery import Delivery


class _Waiting(NamedTuple):
    """A waiting delivery. Deliveries sort by due time, then by priority, the greatest first."""

    due_mono: float
    rank: int
    # Deliveries cannot be compared.
    number: int
    delivery: Delivery


class DueTimer(threading.Thread):
    """Calls ``begin`` with each delivery when it is due, never before, so that no handler thread has to wait for it.

    ``_changed`` guards the heap and ``_stopping``. ``begin`` is called under it and must not block.
    """

    def __init__(self, begin: Callable[[Delivery], object]) -> None:
        super().__init__(name="delayq-due-timer", daemon=True)
        self._begin = begin
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False

    def add(self, delivery: Delivery) -> None:
        """Have ``begin`` called with a delivery at its due time."""
        with self._changed:
            waiting = _Waiting(delivery.due_mono, -delivery.priority, next(self._numbers), delivery)
            heapq.heappush(self._waiting, waiting)
            if self._waiting[0] is waiting:
                self._changed.notify()

    def remove_all(self) -> list[Delivery]:
        """Return all deliveries that wait; ``begin`` is called with none of them any more."""
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
