"""The paused queues that a consumer knows of: none, until a claim refuses a due message."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ...api import pausing

# While a queue is known to be paused, the record is asked this often whether it still is. Seconds.
PAUSE_CHECK_INTERVAL = 1.0


class KnownPauses:
    """Remembers paused queues, so that a consumer takes no ids there that could not start.

    The claim obeys a pause by itself; this only saves work. Used by the thread that makes the consumer's turns.
    """

    def __init__(self, using: str, queues: Callable[[], tuple[str, ...]]) -> None:
        self.using = using
        self.queues = queues
        self._paused: set[str] = set()
        self._check_at = math.inf

    def __contains__(self, queue: str) -> bool:
        return queue in self._paused

    @property
    def any_known(self) -> bool:
        """True when a queue is known to be paused."""
        return bool(self._paused)

    @property
    def served(self) -> tuple[str, ...]:
        """The queues that are not known to be paused."""
        return tuple(queue for queue in self.queues() if queue not in self._paused)

    @property
    def seconds_to_check(self) -> float:
        """Seconds until the record is to be asked again; infinite while no pause is known."""
        return max(0.0, self._check_at - time.monotonic())

    def is_paused(self, queue: str) -> bool:
        """Ask the record whether a queue is paused. Called when a due message in it could not be claimed."""
        self._read()
        return queue in self._paused

    def check(self) -> list[str]:
        """Ask the record again if it is time, and return the queues that are still paused then."""
        if self.seconds_to_check > 0:
            return []
        self._read()
        return sorted(self._paused)

    def _read(self) -> None:
        self._paused = pausing.paused(self.using).keys() & set(self.queues())
        self._check_at = time.monotonic() + PAUSE_CHECK_INTERVAL if self._paused else math.inf
