"""Keeps what was claimed a moment early until it falls due."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .delivery import Delivery


class _Waiting(NamedTuple):
    """In the order in which they go: of what falls due together, the greater priority first."""

    due_mono: float
    rank: int
    # Deliveries cannot be compared.
    number: int
    delivery: Delivery


class DueTimer(threading.Thread):
    """Calls ``ring`` with each delivery when it is due, never before; no thread for handlers has to wait for that."""

    def __init__(self, ring: Callable[[Delivery], object]) -> None:
        super().__init__(name="delayq-alarm", daemon=True)
        self._ring = ring
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False

    def set(self, delivery: Delivery) -> None:
        with self._changed:
            waiting = _Waiting(delivery.due_mono, -delivery.priority, next(self._numbers), delivery)
            heapq.heappush(self._waiting, waiting)
            if self._waiting[0] is waiting:
                self._changed.notify()

    def clear(self) -> list[Delivery]:
        """All that wait; none of them rings any more."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        return [place.delivery for place in waiting]

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        with self._changed:
            while not self._stopping:
                early = self._waiting[0].due_mono - time.monotonic() if self._waiting else None
                if early is None or early > 0:
                    self._changed.wait(early)
                else:
                    self._ring(heapq.heappop(self._waiting).delivery)
