"""How many more messages may be delivered (--max-messages), shared by all processes of a worker."""

from __future__ import annotations

import multiprocessing


class Budget:
    """Two counters in shared memory: what is left, and what is reserved for a claim under way. None: no limit."""

    def __init__(self, messages: int | None) -> None:
        self._numbers = None if messages is None else multiprocessing.get_context().Array("q", [messages, 0])

    def reserve(self, wanted: int) -> int:
        """Up to ``wanted``, and not more than are left. ``settle`` must follow."""
        if self._numbers is None:
            return wanted
        with self._numbers.get_lock():
            granted = max(0, min(wanted, self._numbers[0]))
            self._numbers[0] -= granted
            self._numbers[1] += granted
            return int(granted)

    def settle(self, reserved: int, used: int) -> None:
        """Of what was reserved, so much was used; the rest is left for others."""
        if self._numbers is not None:
            with self._numbers.get_lock():
                self._numbers[0] += reserved - used
                self._numbers[1] -= reserved

    @property
    def empty(self) -> bool:
        """Nothing is left, and nothing will be given back."""
        if self._numbers is None:
            return False
        with self._numbers.get_lock():
            return bool(self._numbers[0] <= 0 and self._numbers[1] <= 0)
