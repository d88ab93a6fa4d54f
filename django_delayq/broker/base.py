"""What a worker asks of a broker, and the values of its answers. A broker finds what is due; the record decides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, NamedTuple

from ..core.clock import SECOND, from_us, to_us
from ..record.sql.rows import QueueLook, Ticket

# The most ids in one call to Redis, so that no call keeps others waiting for long.
IDS_PER_CALL = 1000
# Redis is too far away when a question and its answer take longer than this: calls that schedule wait 0.25 s at most,
# and would give up too often. A query each second finds their messages sooner. Seconds.
FAR_AWAY = 0.15
# A loader that claims more time than this is ignored, as in load.lua. Seconds.
LONGEST_LEASE = 60


class Entry(NamedTuple):
    """A message as the broker needs it: its id, its due time (microseconds since 1970) and its priority."""

    id: int
    due_us: int
    priority: int

    @classmethod
    def at(cls, pk: int, due_at: datetime, priority: int) -> Entry:
        """Make an entry from a due time that is a datetime."""
        return cls(pk, to_us(due_at), priority)

    @property
    def due_at(self) -> datetime:
        """The due time as a datetime."""
        return from_us(self.due_us)


@dataclass(frozen=True, slots=True)
class Put:
    """Counts the entries of a put: put, present already, and due beyond the horizon."""

    put: int = 0
    present: int = 0
    beyond: int = 0

    def __add__(self, other: Put) -> Put:
        return Put(self.put + other.put, self.present + other.present, self.beyond + other.beyond)


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a take: the tickets, how many more ids are ready, and when the next one falls due.

    ``next_due`` counts seconds from ``at``; None when no id is delayed. ``behind`` is true when more ids are due than
    one call makes ready: priorities are compared among ready ids only.
    """

    tickets: list[Ticket] = field(default_factory=list)
    left: int = 0
    next_due: float | None = None
    behind: bool = False
    # Seconds from ``at`` until another queue needs a worker; None when no other queue has ids.
    other_due: float | None = None
    # True while ids of any queue are blocked.
    any_blocked: bool = False
    # When the answer came (monotonic, seconds).
    at: float = field(default_factory=time.monotonic)

    @property
    def wait(self) -> float | None:
        """Seconds from now until the next id falls due; 0 when it is due already, None when no id is delayed."""
        return None if self.next_due is None else max(0.0, self.at + self.next_due - time.monotonic())


class DueQueue(NamedTuple):
    """A queue with ids that are ready or fall due, and how many these are.

    ``unblock``: the names of blocked ids that are to become ready again, each with their number. ``seen``: what a query
    found there, without the messages under the limits in ``closed``; None when the broker asks no query.
    """

    name: str
    ready: int
    due: int
    unblock: Mapping[str, int] = {}
    seen: QueueLook | None = None
    closed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DueQueues:
    """Queues with ids that are ready or fall due, and how many more there are that were not counted.

    ``next_due``: in how many seconds from ``at`` another queue has an id that falls due; None when none has.
    """

    queues: list[DueQueue] = field(default_factory=list)
    more: int = 0
    next_due: float | None = None
    # When the answer came (monotonic, seconds).
    at: float = field(default_factory=time.monotonic)

    @property
    def wait(self) -> float | None:
        """Seconds from now until an id of another queue falls due; None when none does."""
        return None if self.next_due is None else max(0.0, self.at + self.next_due - time.monotonic())


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta of all queues in Redis, read at the time ``now_tenths`` by the record's clock."""

    now_tenths: int
    # Grows with each call of ``tick``, and leaps with a load from the beginning. It goes back with an old snapshot.
    tick: int
    # Ids due up to this tenth belong in Redis; None when Redis was never filled, or was emptied since.
    horizon_tenths: int | None
    # The loader has come to this due tenth; None when it has to begin at the beginning.
    loaded_tenths: int | None
    # The run of the server that set the horizon, and the database that the ids belong to.
    run_id: str
    replid: str
    identity: str
    # A process loads until then, if it does not end earlier; 0 when no process loads.
    loader_until_tenths: int = 0
    # True: a process could not reach Redis for a while, and asks for a load from the beginning.
    is_requested: bool = False
    # When a sweep last put messages that Redis lacked; 0: never since Redis was emptied.
    swept_tenths: int = 0
    # How long the question and its answer took. Seconds.
    round_trip: float = field(default=0.0, compare=False)

    @property
    def is_loading(self) -> bool:
        """True while a process loads from the beginning."""
        left = self.loader_until_tenths - self.now_tenths
        return self.loaded_tenths is None and 0 < left <= LONGEST_LEASE * SECOND


class CallCount(NamedTuple):
    """The window in which a call was counted, "" when it is full; and in how many milliseconds it ends."""

    window: str
    left_ms: int


@dataclass(frozen=True, slots=True)
class ServerRun:
    """Identifies one run of one Redis server. ``run_id`` changes with a restart, ``replid`` with a failover."""

    run_id: str
    replid: str
    role: str
    # maxmemory-policy; empty: not known.
    policy: str = ""


class HashSlot(NamedTuple):
    """The hash slot of a database alias in a Redis Cluster, and the nodes that have it. Addresses are host:port."""

    number: int
    # Empty while it is not known.
    owner: str
    replicas: tuple[str, ...]
    # The number of nodes that the settings name.
    seeds: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A report of the Redis server about itself. A field is None when the server does not report it, or may not."""

    version: str | None
    role: str | None
    # Seconds.
    uptime: int | None
    # Bytes.
    memory: int | None
    max_memory: int | None
    # maxmemory-policy
    policy: str | None
    evicted: int | None
    # The way in which the server writes to disk: "aof", "rdb" or "none".
    persistence: str | None
    # True when the server is in cluster mode.
    cluster: bool | None = None
    # None when the server is in no cluster, and when the other nodes cannot be found.
    hash_slot: HashSlot | None = None
    # Why the server refuses writes; None when it takes them.
    refusal: str | None = None


class Location(NamedTuple):
    """The location of an id in Redis: its due tenth there, in ``ready_tenths`` when it is ready or blocked."""

    delayed_tenths: int | None
    ready_tenths: int | None
    # The name under which it is blocked; None when it is not.
    blocked: str | None = None

    @property
    def is_nowhere(self) -> bool:
        """True when Redis does not have the id."""
        return self.delayed_tenths is None and self.ready_tenths is None


@dataclass(frozen=True, slots=True)
class QueueSize:
    """The numbers of ids of a queue in Redis."""

    delayed: int
    ready: int

    @property
    def total(self) -> int:
        """The number of ids, delayed and ready."""
        return self.delayed + self.ready


class Broker:
    """What a worker takes from, and gives back to: Redis, or the database.

    The methods with a body here suit a broker that holds no ids itself.

    Each method may be called again when its answer was lost, and by any number of processes at once. Each raises
    ``BrokerUnavailable`` when the broker does not answer, its subclass ``BrokerRubbish`` when it answers nonsense, and
    ``UnusableBroker`` when it must not be used.
    """

    # True when ``take`` takes ids out, also shortly before they fall due: one that was not claimed has to be put back,
    # delayed or blocked.
    holds_ids: ClassVar[bool] = False

    def put(self, queue: str, entries: Sequence[Entry]) -> Put:
        """Put ids into the locations for their due times, wherever they are."""
        return Put(present=len(entries))

    def take(
        self, queue: str, limit: int, within: float = 0.0, unblock: Mapping[str, int] = {}, *, both_ends: bool = False
    ) -> Taken:
        """Take up to ``limit`` ids that are due, best priority first, then ids that fall due within ``within`` seconds.

        First blocked ids become ready again: of each name in ``unblock`` the given number. With ``both_ends`` half of a
        full take are ids of the best priority that fell due last, and come at the end. A broker that does not claim
        ahead leaves out ids that are not due yet.
        """
        return self.take_many([DueQueue(queue, 0, 1, unblock)], limit, within, both_ends=both_ends)[queue]

    def due_queues(
        self, queues: Sequence[str] | None, within: float = 0.0, *, after: str = "", enough: int | None = None
    ) -> DueQueues:
        """Find which of these queues (None: of all) have ids that are ready, or fall due within ``within`` seconds.

        Queues that are given come in their order, others by name, in a circle that begins after the name ``after``.
        Those after ``enough`` ids are not counted.
        """
        raise NotImplementedError

    def take_many(
        self, due: Sequence[DueQueue], limit: int, within: float = 0.0, *, both_ends: bool = False
    ) -> dict[str, Taken]:
        """Take up to ``limit`` ids of the queues that ``due_queues`` found: an earlier queue goes before a later one.

        A queue for which no room is left, and where no id falls due, is left out.
        """
        raise NotImplementedError

    def promote(self, queue: str) -> Taken:
        """Make ids ready that have fallen due, and take none of them."""
        return Taken()

    def delay(self, queue: str, tickets: Sequence[Ticket], seconds: float) -> None:
        """Put taken ids back so that they fall due in ``seconds``, whatever their due times are."""

    def put_back(self, queue: str, tickets: Sequence[Ticket]) -> None:
        """Put taken ids back where they were."""

    def block(self, queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        """Block taken ids, by the name of the reason: no ``take`` returns them before one unblocks that name."""

    def blocked(self) -> dict[str, dict[str, int]]:
        """Return the numbers of blocked ids, by queue and name."""
        return {}

    def exclusively(self) -> AbstractContextManager[object]:
        """Keep other processes from the ids that ``take`` returns until the block ends: they are claimed in it."""
        return nullcontext()

    def listen(self, queues: Sequence[str] | None, timeout: float) -> bool:
        """Sleep for up to ``timeout`` seconds; return whether a notification ended the sleep. ``wake`` ends it too.

        None: listen to all queues that there are.
        """
        raise NotImplementedError

    def stop_listening(self) -> bool:
        """Leave notifications to other processes until the next ``listen``. Return whether one may have come here."""
        return False

    def wake(self) -> None:
        """End a ``listen`` in another thread of this process, or the next one."""
        raise NotImplementedError

    def notify(self, queues: Sequence[str] | None) -> None:
        """End the ``listen`` of one process for each of these queues, or the next one.

        None: of one process that listens to all queues.
        """
