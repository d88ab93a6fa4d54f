"""The deliveries that a worker process holds: claimed, and not ended yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .delivery import Delivery


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
