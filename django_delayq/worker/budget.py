"""How many more messages may be delivered (--max-messages), shared by all processes of a worker."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .processlock import ProcessLock


class Budget:
    """Numbers in shared memory: what is left, and what each process has reserved for a claim under way. None: no limit.

    A process may die at any moment: what it had reserved is given back by ``bury``.
    """

    def __init__(self, messages: int | None, processes: int = 1) -> None:
        # Which of the processes this one is.
        self.place = 0
        self._numbers: memoryview | None = None
        if messages is not None:
            self._numbers = memoryview(mmap.mmap(-1, 8 * (1 + processes))).cast("q")
            self._numbers[0] = messages
            self._lock = ProcessLock()
            self._threads = threading.Lock()

    @contextmanager
    def _locked(self, numbers: memoryview) -> Iterator[memoryview]:
        with self._threads:
            self._lock.acquire()
            try:
                yield numbers
            finally:
                self._lock.release()

    def reserve(self, wanted: int) -> int:
        """Up to ``wanted``, and not more than are left. ``settle`` must follow."""
        if self._numbers is None:
            return wanted
        with self._locked(self._numbers) as numbers:
            granted = max(0, min(wanted, numbers[0]))
            # In this order: a death in between may cost the budget something, and never adds to it.
            numbers[0] -= granted
            numbers[1 + self.place] += granted
            return int(granted)

    def settle(self, reserved: int, used: int) -> None:
        """Of what was reserved, so much was used; the rest is left for others."""
        if self._numbers is not None:
            with self._locked(self._numbers) as numbers:
                numbers[1 + self.place] -= reserved
                numbers[0] += reserved - used

    def give_back(self, messages: int) -> None:
        """So many that were used have not been delivered after all."""
        self.settle(0, -messages)

    def bury(self, place: int) -> None:
        """The process that was there is dead; it delivered nothing of what it had reserved."""
        if self._numbers is not None:
            with self._locked(self._numbers) as numbers:
                reserved, numbers[1 + place] = numbers[1 + place], 0
                numbers[0] += reserved

    @property
    def left(self) -> bool:
        """Whether there is something to reserve now."""
        return self._numbers is None or self._numbers[0] > 0

    @property
    def empty(self) -> bool:
        """Nothing is left, and nothing will be given back."""
        if self._numbers is None:
            return False
        with self._locked(self._numbers) as numbers:
            return max(numbers) <= 0
