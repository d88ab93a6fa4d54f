"""How many ids a process takes, and of which lanes. Every term is a reason to take less.

An id in Redis does not tell in which lane its handler runs. So a process with two lanes estimates from its last takes
how many ids fit, and takes that number. Those that find no room are blocked (``blocked.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ...project.registry import Handler
from ...record.sql.rows import Claimed
from ..run.pool import Isolation, Lane, Pool
from ..shared.lifetime import Budget
from .tuning import Tuning


class Wanted:
    """The room of a process for further messages, by lane.

    Used by the thread that makes the consumer's rounds, except ``is_worth_filling``.
    """

    def __init__(
        self,
        pool: Pool,
        budget: Budget,
        isolation: Isolation,
        handlers: Callable[[], Mapping[str, Handler]],
        tuning: Tuning,
    ) -> None:
        self.tuning = tuning
        self.pool = pool
        self.budget = budget
        self.isolation = isolation
        self._handlers = handlers
        # The lanes that have handlers.
        self.lanes: tuple[Lane, ...] = pool.lanes
        if pool.loop is not None and all(handler.runs_on_loop for handler in handlers().values()):
            self.lanes = (pool.loop,)
        # The room in each lane as it was at the beginning of the round, without what was claimed since. A slot that
        # becomes free meanwhile counts for the next round: it may be for a higher queue, or for a blocked id.
        self._rooms: dict[Lane, int] = {}
        self.see()
        # The share of the event loop in the messages that were found last.
        self._share = 0.5

    # --- how many -----------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> int:
        """The number of messages that may be claimed now. Which lane each needs is not known yet."""
        return self.budget.grant(self._room)

    @property
    def _room(self) -> int:
        """Return the room for messages: none while this process could not record their outcomes, or makes way."""
        recorder = self.pool.recorder
        if recorder.behind > self.tuning.longest_behind or recorder.sender.is_behind:
            return 0
        if self.isolation.is_waiting or self.pool.shared.replaced:
            return 0
        return min(1, self._of_lanes) if self.isolation.had_the_last else self._of_lanes

    @property
    def _of_lanes(self) -> int:
        """Return how many ids to take so that, by the mix of the last takes, each lane gets what it has room for."""
        lanes = self.lanes
        if len(lanes) == 1:
            return self.room(lanes[0])
        threads, loop = map(self.room, lanes)
        if threads and loop:
            fitting = min(threads / max(1 - self._share, 1e-6), loop / max(self._share, 1e-6))
            return int(min(max(threads, loop), max(min(threads, loop), fitting)))
        room, share = threads + loop, self._share if loop else 1 - self._share
        return min(4 * room, max(self.tuning.fewest, int(room * share)))

    # --- of which lanes -----------------------------------------------------------------------------------------------

    def see(self) -> None:
        """Read the room of each lane."""
        self._rooms = {lane: lane.claimable for lane in self.lanes}

    def use(self, claimed: Sequence[Claimed]) -> None:
        """Take note of messages that were claimed."""
        for row in claimed:
            lane = self.lane_of(row.topic) if len(self.lanes) > 1 else self.lanes[0]
            if lane is not None:
                self._rooms[lane] -= 1

    def room(self, lane: Lane) -> int:
        """Return how many messages of a lane may be claimed."""
        return self._rooms.get(lane, 0)

    def lane_of(self, topic: str) -> Lane | None:
        """Return the lane in which messages of a topic run; None when it has no handler here."""
        handler = self._handlers().get(topic)
        return None if handler is None else self.pool.lane_of(handler)

    def slots_for(self, topic: str) -> int:
        """Return how many messages of a topic may be claimed."""
        lane = self.lane_of(topic)
        return 0 if lane is None else self.room(lane)

    @property
    def full(self) -> tuple[Lane, ...]:
        """The lanes without room, while another one has room."""
        full = tuple(lane for lane in self.lanes if self.room(lane) <= 0)
        return full if len(full) < len(self.lanes) else ()

    @property
    def usual(self) -> tuple[Lane, ...]:
        """The lanes whose share of the messages is worth a claim."""
        if len(self.lanes) == 1:
            return self.lanes
        threads, loop = self.lanes
        if self._share > 1 - self.tuning.least_share:
            return (loop,)
        return (threads,) if self._share < self.tuning.least_share else (threads, loop)

    @property
    def are_quick(self) -> bool:
        """True when handlers are quick in each usual lane."""
        return all(lane.is_quick for lane in self.usual)

    @property
    def is_worth_filling(self) -> bool:
        """True when a usual lane is half empty, or has a free slot."""
        return any(lane.is_worth_filling for lane in self.usual)

    @property
    def can_fill_later(self) -> bool:
        """True when nothing runs out before the lane is half empty. Of two lanes, one may then be empty for long."""
        return len(self.lanes) == 1 and self.lanes[0].outlasts_a_round and not self.isolation.is_waiting

    def topics(self) -> Collection[str]:
        """The topics to look for by query: those of the lanes that have room, or all if none has."""
        full = self.full
        return [topic for topic in self._handlers() if self.lane_of(topic) not in full]

    @property
    def leases(self) -> dict[str, float]:
        """The leases of all topics that have a handler here, in seconds."""
        return {topic: handler.lease for topic, handler in self._handlers().items()}

    # --- what a round teaches -----------------------------------------------------------------------------------------

    def learn(self, topics: Sequence[str]) -> None:
        """Take note of the topics of messages that were taken together, whether there was room for them or not."""
        if topics and len(self.lanes) > 1:
            on_loop = sum(self.lane_of(topic) is self.pool.loop for topic in topics)
            self._share += (on_loop / len(topics) - self._share) * self.tuning.share_weight
