"""The budget: the deliveries that a process may still make, and all processes of a worker (``--max-messages``)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .lifetime import Lifetime
from .processlock import ProcessLock


class Budget:
    """Counts deliveries in shared memory: those that are left, and those that each process has reserved for a claim.

    ``messages`` None: together they have no limit. A process may die at any moment: ``release_reservations_of`` returns
    its reservations. A process that is frozen may hold the lock meanwhile, so only a process that reserves waits for
    the lock.

    Two locks guard the numbers, in this order: ``_threads`` among the threads of this process, ``_processes`` among the
    processes of the worker. ``_refunds`` guards ``_refunded``, so that a refund waits for no other process.
    """

    def __init__(self, messages: int | None, processes: int = 1) -> None:
        # The place of this process among them, from 0.
        self.place = 0
        # The limits of this process; None: it has none.
        self.lifetime: Lifetime | None = None
        self._numbers: memoryview | None = None
        if messages is not None:
            self._numbers = memoryview(mmap.mmap(-1, 8 * (1 + processes))).cast("q")
            self._numbers[0] = messages
            self._processes = ProcessLock()
        self._threads = threading.Lock()
        # Deliveries that this process returns with its next reservation.
        self._refunded = 0
        self._refunds = threading.Lock()

    @contextmanager
    def _locked(self, *, wait: bool = True) -> Iterator[memoryview | None]:
        """Lock the numbers. With ``wait=False`` give None when another thread or process has the lock."""
        if not self._threads.acquire(blocking=wait):
            yield None
            return
        try:
            if not self._processes.acquire(wait=wait):
                yield None
                return
            try:
                yield self._numbers
            finally:
                self._processes.release()
        finally:
            self._threads.release()

    def reserve(self, wanted: int) -> int:
        """Reserve up to ``wanted`` deliveries, as many as are left. ``commit`` must follow."""
        if self.lifetime is not None:
            wanted = self.lifetime.grant(wanted)
        if self._numbers is None:
            return wanted
        with self._locked() as numbers:
            assert numbers is not None
            with self._refunds:
                numbers[0] += self._refunded
                self._refunded = 0
            granted = max(0, min(wanted, numbers[0]))
            numbers[0] -= granted
            numbers[1 + self.place] += granted
            return int(granted)

    def commit(self, reserved: int, used: int) -> None:
        """Use up ``used`` of the ``reserved`` deliveries, and return the others."""
        if self.lifetime is not None and used:
            self.lifetime.count(used)
        if self._numbers is not None:
            with self._locked() as numbers:
                assert numbers is not None
                numbers[1 + self.place] -= reserved
                numbers[0] += reserved - used

    def refund(self) -> None:
        """Return a delivery that was committed but did not happen. Waits for no other process."""
        if self.lifetime is not None:
            self.lifetime.count(-1)
        if self._numbers is not None:
            with self._refunds:
                self._refunded += 1

    def release_reservations_of(self, place: int) -> bool:
        """Return the reservations of a process that died during a claim. False: locked now, try again later."""
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
        """True when deliveries are left to reserve."""
        if self.lifetime is not None and not self.lifetime.grant(1):
            return False
        return self._numbers is None or self._numbers[0] + self._refunded > 0

    @property
    def empty(self) -> bool:
        """True when no delivery is left or reserved. False while another process has the lock."""
        if self._numbers is None or self._refunded:
            return False
        with self._locked(wait=False) as numbers:
            return numbers is not None and max(numbers) <= 0
