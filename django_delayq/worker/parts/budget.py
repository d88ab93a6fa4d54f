"""The budget: the messages that this process may still claim, by ``--max-messages`` and by its lifetime."""

from __future__ import annotations

import sys
import threading

from .lifetime import Lifetime


class Budget:
    """Counts the messages that one process claims. ``messages`` None: there is no limit.

    The thread that makes the consumer's turns counts what it has claimed, and any thread refunds. ``_lock`` guards
    ``_left``.
    """

    def __init__(self, messages: int | None) -> None:
        # The limits of a process that has a successor; None: it has none.
        self.lifetime: Lifetime | None = None
        self._left = sys.maxsize if messages is None else messages
        self._is_limited = messages is not None
        self._lock = threading.Lock()

    def grant(self, wanted: int) -> int:
        """Return how many of the ``wanted`` messages may be claimed."""
        if self.lifetime is not None:
            wanted = self.lifetime.grant(wanted)
        return max(0, min(wanted, self._left))

    def count(self, claimed: int) -> None:
        """Count messages that were claimed; a negative number counts some that were released unstarted."""
        if self.lifetime is not None and claimed:
            self.lifetime.count(claimed)
        if self._is_limited:
            with self._lock:
                self._left -= claimed

    def refund(self) -> None:
        """Take note that a message was released unstarted."""
        self.count(-1)

    @property
    def left(self) -> bool:
        """True when a message may be claimed."""
        return self.grant(1) > 0

    @property
    def empty(self) -> bool:
        """True when ``--max-messages`` is reached."""
        return self._left <= 0
