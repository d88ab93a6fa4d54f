"""The deliveries of a lane that wait for a slot, in lines: none waits behind the backlog of another queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from queue import SimpleQueue

from .delivery import Delivery


class QueueLines(SimpleQueue[Delivery | None]):
    """Deliveries, each in the line of its queue. The lines take turns, or are served in a strict order.

    The ``SimpleQueue`` holds an entry for each delivery: the thread that gets an entry takes the delivery whose turn it
    is. None, which ends a thread, stands in no line. Any thread may put and get: ``_lock`` guards the lines, none of
    which is empty, and their turns.
    """

    def __init__(self) -> None:
        # Bound once: to ask ``super`` between any two messages takes longer than all else here.
        self._next_entry, self._add_entry = super().get, super().put
        self._lines: dict[str, deque[Delivery]] = {}
        # The queues that have lines, in the order of their turns.
        self._turns: deque[str] = deque()
        self._lock = threading.Lock()
        # The queues that are served in strict order, the highest first; empty: all queues take turns.
        self.order: Sequence[str] = ()

    def put_all(self, deliveries: Collection[Delivery]) -> None:
        """Add deliveries, each at the end of the line of its queue."""
        with self._lock:
            for delivery in deliveries:
                line = self._lines.get(delivery.queue)
                if line is None:
                    line = self._lines[delivery.queue] = deque()
                    self._turns.append(delivery.queue)
                line.append(delivery)
        for delivery in deliveries:
            self._add_entry(delivery)

    def get(self, block: bool = True, timeout: float | None = None) -> Delivery | None:
        """Take the delivery whose turn it is. Raises ``Empty`` after ``timeout`` seconds."""
        if self._next_entry(block, timeout) is None:
            return None
        with self._lock:
            queue = self._turns[0]
            for higher in self.order:
                if higher in self._lines:
                    queue = higher
                    break
            line = self._lines[queue]
            delivery = line.popleft()
            if not line:
                del self._lines[queue]
                self._turns.remove(queue)
            elif len(self._turns) > 1:
                self._turns.rotate(-1)
        return delivery

    def get_nowait(self) -> Delivery | None:
        """Take the delivery whose turn it is. Raises ``Empty`` when there is none."""
        return self.get(block=False)
