"""Weighted queues: each gets a share of the room, by its weight, and none starves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...broker.base import Taken


class Shares:
    """Divides the room of each turn among queues. Used by the thread that makes the consumer's turns.

    A queue has a clock, which each claimed message advances by 1 / weight; the queues whose clocks are behind get what
    is left over when the room is divided. So shares are right over many turns, even with room for one message in each.
    A queue that leaves a part of its room unused saves nothing up: its clock is set to that of those which had more.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._clocks = dict.fromkeys(weights, 0.0)
        # The queues that had nothing left when they were asked last. They are asked first: the others get their share.
        self._idle: set[str] = set()

    def take(self, queues: Sequence[str], room: int, take: Callable[[str, int], Taken]) -> dict[str, Taken]:
        """Take from each queue by ``take``, which gets the queue and the room, and return the answers."""
        shares = self._divide(queues, room)
        found: dict[str, Taken] = {}
        unused = 0
        for queue in sorted(queues, key=lambda one: (one not in self._idle, self._after(one, 1))):
            given = shares[queue] + unused
            found[queue] = taken = take(queue, given)
            unused = given - len(taken.tickets)
        return found

    def learn(self, taken: Mapping[str, Taken], claimed: Mapping[str, int]) -> None:
        """Take note of how many messages of each queue were claimed of what was taken in this turn."""
        for queue, number in claimed.items():
            self._clocks[queue] = self._after(queue, number)
        wanting = {queue for queue, some in taken.items() if some.left or len(some.tickets) > claimed.get(queue, 0)}
        # A queue that wants more is behind by one round at most: its lane may have been full for long.
        latest = max((self._clocks[queue] for queue in wanting), default=0.0)
        clocks = {queue: max(self._clocks[queue], latest - 1.0) for queue in wanting}
        least = min(clocks.values(), default=None)
        # Only differences count.
        self._clocks = {
            queue: 0.0 if least is None else clocks.get(queue, max(clock, least)) - least
            for queue, clock in self._clocks.items()
        }
        self._idle = {queue for queue, some in taken.items() if not some.left}

    def _divide(self, queues: Sequence[str], room: int) -> dict[str, int]:
        total = sum(self._weights[queue] for queue in queues)
        shares = {queue: room * self._weights[queue] // total for queue in queues}
        for _ in range(room - sum(shares.values())):
            first = min(queues, key=lambda queue: self._after(queue, shares[queue] + 1))
            shares[first] += 1
        return shares

    def _after(self, queue: str, number: int) -> float:
        """Return the clock of a queue after so many further messages."""
        return self._clocks[queue] + number / self._weights[queue]
