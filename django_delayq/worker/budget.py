"""How many more messages may be delivered (--max-messages), shared by all processes of a worker."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .processlock import ProcessLock


class Budget:
    """Numbers in shared memory: what is left, and what each process has reserved for a claim under way. None: no limit.

    A process may die at any moment: what it had reserved is given back by ``bury``. One that stands still may do so
    with the lock in its hand, so only who reserves waits for that.
    """

    def __init__(self, messages: int | None, processes: int = 1) -> None:
        # Which of the processes this one is.
        self.place = 0
        self._numbers: memoryview | None = None
        if messages is not None:
            self._numbers = memoryview(mmap.mmap(-1, 8 * (1 + processes))).cast("q")
            self._numbers[0] = messages
            self._lock = ProcessLock()
        # The lock of processes says nothing about the threads of one.
        self._threads = threading.Lock()
        # What this process gives back, until it reserves again.
        self._returned = 0
        self._returning = threading.Lock()

    @contextmanager
    def _locked(self, *, wait: bool = True) -> Iterator[memoryview | None]:
        """The numbers; None when another process has the lock, and it is not waited for."""
        if not self._threads.acquire(blocking=wait):
            yield None
            return
        try:
            if not self._lock.acquire(wait=wait):
                yield None
                return
            try:
                yield self._numbers
            finally:
                self._lock.release()
        finally:
            self._threads.release()

    def reserve(self, wanted: int) -> int:
        """Up to ``wanted``, and not more than are left. ``settle`` must follow."""
        if self._numbers is None:
            return wanted
        with self._locked() as numbers:
            assert numbers is not None
            with self._returning:
                numbers[0] += self._returned
                self._returned = 0
            granted = max(0, min(wanted, numbers[0]))
            numbers[0] -= granted
            numbers[1 + self.place] += granted
            return int(granted)

    def settle(self, reserved: int, used: int) -> None:
        """Of what was reserved, so much was used; the rest is left for others."""
        if self._numbers is not None:
            with self._locked() as numbers:
                assert numbers is not None
                numbers[1 + self.place] -= reserved
                numbers[0] += reserved - used

    def give_back(self) -> None:
        """One that was used has not been delivered after all. Waits for no other process."""
        if self._numbers is not None:
            with self._returning:
                self._returned += 1

    def bury(self, place: int) -> bool:
        """The process that was there is dead, in the middle of a claim at worst. False: try again later."""
        if self._numbers is None:
            return True
        with self._locked(wait=False) as numbers:
            if numbers is None:
                return False
            reserved, numbers[1 + place] = numbers[1 + place], 0
            numbers[0] += reserved
            return True

    @property
    def left(self) -> bool:
        """Whether there is something to reserve now."""
        return self._numbers is None or self._numbers[0] + self._returned > 0

    @property
    def empty(self) -> bool:
        """Nothing is left or reserved. False while that cannot be told."""
        if self._numbers is None or self._returned:
            return False
        with self._locked(wait=False) as numbers:
            return numbers is not None and max(numbers) <= 0
