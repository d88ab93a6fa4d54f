"""What a consumer knows of paused queues: nothing, until a claim refuses what is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .. import pausing

# While a queue is known to be paused, whether it still is, is asked this often. Seconds.
LOOK = 1.0


class KnownPauses:
    """The claim obeys a pause by itself. To know of it saves taking what could not start."""

    def __init__(self, using: str, queues: Callable[[], tuple[str, ...]]) -> None:
        self.using = using
        self.queues = queues
        self._known: set[str] = set()
        self._look_at = math.inf

    def __contains__(self, queue: str) -> bool:
        return queue in self._known

    @property
    def served(self) -> tuple[str, ...]:
        """The queues without those that are known to be paused."""
        return tuple(queue for queue in self.queues() if queue not in self._known)

    @property
    def wait(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._look_at - time.monotonic())

    def learn(self, queue: str) -> bool:
        """Something due in this queue could not be claimed: whether that is for a pause."""
        self._ask()
        return queue in self._known

    def look(self) -> list[str]:
        """Ask again if it is time; the queues that are still paused then."""
        if self.wait > 0:
            return []
        self._ask()
        return sorted(self._known)

    def _ask(self) -> None:
        self._known = pausing.paused(self.using).keys() & set(self.queues())
        self._look_at = time.monotonic() + LOOK if self._known else math.inf
