"""How many messages a process may claim, when handler threads and the event loop have different room.

An id in Redis does not tell in which lane its handler runs. So a process with both lanes takes as many ids as, going by
what it claimed last, there is room for; it claims none that there is no room for, and puts their ids back where they
were. While one lane is full, it looks for messages of the other one, more and more rarely when it finds none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...project.registry import Handler
from ...record.sql.rows import Claimed, Ticket
from ..run.lane import Lane
from ..run.pool import Pool

# The weight of the newest claim in the share of the event loop.
SHARE_WEIGHT = 1 / 8
# A lane with a smaller share of the messages does not decide when the next ones are claimed.
LEAST_SHARE = 1 / 16
# While one lane is full, at least so many ids are taken to look for messages of the other one, but no more than four
# times as many as it has room for.
FEWEST = 20
# After ids for a full lane were put back, no id is taken for this time. It doubles while none for the other lane is
# found. Seconds.
FIRST_PAUSE = 0.01
# That pause is never longer than this. Seconds.
LONGEST_PAUSE = 0.25

Claim = Callable[[Sequence[Ticket], dict[str, float]], list[Claimed]]


class Offer:
    """What one turn may claim: for each lane that has handlers, the room and the leases of its topics by topic."""

    def __init__(self, leases: Mapping[Lane, dict[str, float]], rooms: dict[Lane, int]) -> None:
        self._leases = leases
        self._rooms = rooms

    def claim(self, tickets: Sequence[Ticket], claim: Claim) -> list[Claimed]:
        """Claim messages by calls of ``claim``, which gets tickets and leases. There is room for all that it claims."""
        lanes = [lane for lane, room in self._rooms.items() if room > 0 or len(self._rooms) == 1]
        if len(self._rooms) == 1 or len(tickets) <= min((self._rooms[lane] for lane in lanes), default=0):
            leases: dict[str, float] = {}
            for lane in lanes:
                leases |= self._leases[lane]
            claimed = claim(tickets, leases)
            self._count(claimed)
            return claimed
        claimed = []
        rest = list(tickets)
        for lane in sorted(lanes, key=self._rooms.__getitem__, reverse=True):
            untried = rest
            while untried and (room := self._rooms[lane]) > 0:
                some, untried = untried[:room], untried[room:]
                rows = claim(some, self._leases[lane])
                self._count(rows)
                claimed += rows
            mine = {row.id for row in claimed}
            rest = [ticket for ticket in rest if ticket.id not in mine]
        return claimed

    def _count(self, claimed: Sequence[Claimed]) -> None:
        if len(self._rooms) > 1:
            for lane, leases in self._leases.items():
                self._rooms[lane] -= sum(row.topic in leases for row in claimed)

    def is_full(self, topic: str) -> bool:
        """Return whether a topic has a handler here, and its lane has no room left."""
        return any(topic in self._leases[lane] for lane in self.full)

    @property
    def full(self) -> Collection[Lane]:
        """The lanes without room, if there are several lanes."""
        return [lane for lane, room in self._rooms.items() if room <= 0] if len(self._rooms) > 1 else ()


class Rooms:
    """Says how many ids to take. Used by the thread that makes the consumer's turns, except ``is_worth_filling``."""

    def __init__(self, pool: Pool, handlers: Callable[[], Mapping[str, Handler]]) -> None:
        self._pool = pool
        self._handlers = handlers
        # The lanes that have handlers.
        self.lanes: tuple[Lane, ...] = pool.lanes
        if pool.loop is not None and all(handler.runs_on_loop for handler in handlers().values()):
            self.lanes = (pool.loop,)
        # The lanes that were full at the step of a higher queue in this turn. A message there may still wait for one.
        self._closed: set[Lane] = set()
        # The share of the event loop in the messages that were found last.
        self._share = 0.5
        # Ids for a full lane were put back: when to look again (monotonic), and how long to wait the next time.
        self._look_at = 0.0
        self._pause = FIRST_PAUSE

    def _room(self, lane: Lane) -> int:
        return 0 if lane in self._closed else lane.room

    @property
    def full(self) -> tuple[Lane, ...]:
        """The lanes without room, while another one has room."""
        full = tuple(lane for lane in self.lanes if self._room(lane) <= 0)
        return full if len(full) < len(self.lanes) else ()

    @property
    def limit(self) -> int:
        """The number of ids to take now."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0].room
        threads, loop = map(self._room, lanes)
        if threads and loop:
            fitting = min(threads / max(1 - self._share, 1e-6), loop / max(self._share, 1e-6))
            return int(min(max(threads, loop), max(min(threads, loop), fitting)))
        if not (threads or loop) or time.monotonic() < self._look_at:
            return 0
        # Of these, no more are claimed than there is room for. The others may be for the full lane.
        room, share = threads + loop, self._share if loop else 1 - self._share
        return min(4 * room, max(FEWEST, int(room * share)))

    @property
    def seconds_to_look(self) -> float:
        """The seconds until ids may be taken again that a full lane had no room for."""
        return max(0.0, self._look_at - time.monotonic())

    @property
    def usual(self) -> tuple[Lane, ...]:
        """The lanes that get a part of the messages that is worth a claim."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes
        return lanes[self._share > 1 - LEAST_SHARE : 1 + (self._share >= LEAST_SHARE)]

    @property
    def are_quick(self) -> bool:
        """True when handlers are quick in each usual lane."""
        return all(lane.is_quick for lane in self.usual)

    @property
    def is_worth_filling(self) -> bool:
        """True when a usual lane is half empty, or has a free place."""
        return any(lane.is_worth_filling for lane in self.usual)

    def offer(self) -> Offer:
        """Return what may be claimed now."""
        leases: dict[Lane, dict[str, float]] = {lane: {} for lane in self.lanes}
        for topic, handler in self._handlers().items():
            leases.setdefault(self._pool.lane_of(handler), {})[topic] = handler.lease
        return Offer(leases, {lane: self._room(lane) for lane in leases})

    def close(self, lanes: Collection[Lane]) -> None:
        """Give lower queues no room in these lanes, which were full for a higher one, even if a place becomes free."""
        self._closed.update(lanes)

    def open(self) -> None:
        """Begin or end a turn: there is room in each lane that has a free place."""
        self._closed.clear()

    def topics(self) -> Collection[str]:
        """Return the topics to look for by query: those of the lanes that have room, or all if none has."""
        handlers = self._handlers()
        full = self.full
        if not full:
            return handlers
        return [topic for topic, handler in handlers.items() if self._pool.lane_of(handler) not in full]

    def learn(self, topics: Sequence[str]) -> None:
        """Take note of the topics of messages that were taken together, whether there was room for them or not."""
        if topics and len(self.lanes) > 1:
            handlers = self._handlers()
            on_loop = sum(self._pool.lane_of(handlers[topic]) is self._pool.loop for topic in topics)
            self._share += (on_loop / len(topics) - self._share) * SHARE_WEIGHT

    def note_put_back(self, *, claimed: bool) -> None:
        """Take note that ids for a full lane were put back, and whether others were claimed."""
        self._pause = FIRST_PAUSE if claimed else min(LONGEST_PAUSE, 2 * self._pause)
        self._look_at = time.monotonic() + self._pause
