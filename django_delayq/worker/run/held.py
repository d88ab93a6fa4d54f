"""The deliveries that a worker process holds."""

from __future__ import annotations

from collections.abc import Iterable

from .delivery import Delivery


class HeldDeliveries:
    """The held deliveries of a lane, in the order in which they came. Each method is one operation of a dict.

    The consumer adds deliveries; a handler thread, the timeout watch or the main thread removes those that it ends; the
    timeout watch, the lease renewer and the main thread read them.
    """

    def __init__(self) -> None:
        self._deliveries: dict[Delivery, None] = {}

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Hold these deliveries."""
        self._deliveries.update(dict.fromkeys(deliveries))

    def remove(self, delivery: Delivery) -> None:
        """Hold this delivery no longer."""
        del self._deliveries[delivery]

    def all(self) -> list[Delivery]:
        """Return all held deliveries."""
        return list(self._deliveries)

    def __len__(self) -> int:
        return len(self._deliveries)


class HeldByProcess:
    """All deliveries that a process holds: those of its lanes, and the one that waits to run isolated.

    Lanes are added before the threads start. The consumer's thread writes ``isolated``; any thread reads it.
    """

    def __init__(self) -> None:
        self._lanes: list[HeldDeliveries] = []
        # The delivery that waits until no other is held.
        self.isolated: Delivery | None = None

    def of_new_lane(self) -> HeldDeliveries:
        """Return what a further lane holds."""
        self._lanes.append(HeldDeliveries())
        return self._lanes[-1]

    def all(self) -> list[Delivery]:
        """Return the deliveries that run or wait in this process. Safe from any thread."""
        # Read first: it joins a lane before it is taken from here.
        isolated = self.isolated
        running = [delivery for held in self._lanes for delivery in held.all()]
        return running if isolated is None else [*running, isolated]
