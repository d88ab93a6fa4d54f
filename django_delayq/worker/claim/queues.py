"""Which queues a worker serves, and in which order a consumer takes from them: strict, by weight, or in turns."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...api import pausing
from ...broker.base import Broker, DueQueue, DueQueues, Taken
from ...core.callables import nothing
from ...extensions import Service
from ...project import conf, pulled, registry
from ...record import overrides
from ...record.sql import statements
from ...record.sql.rows import Ticket
from .blocked import Blocked
from .tuning import Tuning

logger = logging.getLogger("django_delayq")


class QueueFinder(Service):
    """Gives the queues named on the command line, else those of the settings, else all queues that it finds.

    Of the found queues the default queue comes first, then, by name, those of handlers and those that hold messages.
    The upkeep thread and the consumer replace the tuple of found queues as a whole (``_lock``); any thread may read it.
    """

    name = "queue finder"
    is_shared = True

    def __init__(
        self,
        using: str,
        named: tuple[str, ...] = (),
        on_change: Callable[[], None] = nothing,
        tuning: Tuning | None = None,
    ) -> None:
        self.using = using
        self.tuning = tuning or Tuning()
        self._on_change = on_change
        # The queues that the command line or the settings name; None: all queues are served.
        self.named = named or conf.get().QUEUES or None
        self._seen: dict[str, float] = {}
        self._lock = threading.Lock()
        self._served: frozenset[str] = frozenset()
        self._found: tuple[str, ...] = self.named or self._order(set())

    def __call__(self) -> tuple[str, ...]:
        return self._found

    def note(self, queues: Collection[str]) -> None:
        """Serve these queues from now on: the broker says that they hold messages."""
        if self.named is None and not self._served.issuperset(queues):
            with self._lock:
                self._seen.update(dict.fromkeys(queues, time.monotonic()))
                self._replace()

    def tick(self) -> float:
        """Search the record from time to time."""
        self.search()
        return self.tuning.idle_wait if self.named is None else 3600.0

    def search(self) -> tuple[str, ...]:
        """Search the record, call ``on_change`` when other queues are found than before, and return the queues."""
        if self.named is not None:
            return self._found
        found = statements(self.using).queues()
        now = time.monotonic()
        with self._lock:
            self._seen = {queue: at for queue, at in self._seen.items() if now - at < self.tuning.remembered}
            self._seen.update(dict.fromkeys(found, now))
            changed = self._replace()
        if changed:
            self._on_change()
        return self._found

    def _replace(self) -> bool:
        """Replace the tuple of found queues; return whether it changed."""
        before, self._found = self._found, self._order(set(self._seen))
        self._served = frozenset(self._found)
        return self._found != before

    def _order(self, found: set[str]) -> tuple[str, ...]:
        default = conf.get().DEFAULT_QUEUE
        found |= {h.queue for h in registry.handlers().values() if h.queue is not None}
        return tuple(pulled.without((default, *sorted(found - {default}))))


@dataclass(slots=True)
class Found:
    """What was taken from each queue, and what is known of the other queues."""

    taken: dict[str, Taken] = field(default_factory=dict)
    due: DueQueues = field(default_factory=DueQueues)
    # The number of messages that were claimed.
    claimed: int = 0
    # True when a queue had ids that are ready, and there was no room for them.
    left_out: bool = False
    # True when some of what was taken is blocked now.
    blocked: bool = False
    # True when more ids are ready, and there is room for them: the next round begins at once.
    goes_on: bool = False

    def add(self, later: Found) -> None:
        """Add what was found later in the same round, in other queues."""
        self.taken |= later.taken
        if later.due.next_due is not None:
            self.due = later.due
        self.claimed += later.claimed
        self.left_out |= later.left_out
        self.blocked |= later.blocked
        self.goes_on |= later.goes_on

    @property
    def tickets(self) -> dict[str, list[Ticket]]:
        """The tickets of the queues that gave some."""
        return {queue: taken.tickets for queue, taken in self.taken.items() if taken.tickets}

    @property
    def any_blocked(self) -> bool:
        """True while ids of any queue are blocked."""
        return self.blocked or any(taken.any_blocked for taken in self.taken.values())

    @property
    def leaves_some(self) -> bool:
        """True when ids are ready for which there was no room."""
        return self.left_out or any(taken.left for taken in self.taken.values())

    @property
    def waits(self) -> list[float]:
        """The seconds until the next messages of queues fall due."""
        waits = [self.due.wait, *(taken.wait for taken in self.taken.values())]
        return [wait for wait in waits if wait is not None]

    def has_filled(self, room: int) -> bool:
        """Tell whether a take used the whole room and left further ids."""
        return any(taken.left > 0 and len(taken.tickets) >= room for taken in self.taken.values())


class KnownPauses:
    """Remembers paused queues, so that a consumer takes no ids there that could not start. Reads changed limits, too.

    The claim obeys a pause by itself; this only saves work. Used by the thread that makes the consumer's rounds.
    """

    def __init__(self, using: str, finder: QueueFinder) -> None:
        self.using = using
        self.tuning = finder.tuning
        self.queues: Callable[[], tuple[str, ...]] = finder
        self.known: set[str] = set()
        self._check_at = time.monotonic() + self.tuning.idle_wait

    @property
    def served(self) -> tuple[str, ...]:
        """The queues that are not known to be paused."""
        return tuple(queue for queue in self.queues() if queue not in self.known)

    @property
    def seconds_to_check(self) -> float:
        """Seconds until the record is to be asked again."""
        return max(0.0, self._check_at - time.monotonic())

    def is_paused(self, queue: str) -> bool:
        """Ask the record whether a queue is paused. Called when a due message in it could not be claimed."""
        self._read()
        return queue in self.known

    def check(self) -> list[str]:
        """Ask the record again if it is time, and return the queues that are still paused then.

        While no pause is known, it is asked seldom: a query passes over paused queues, and no claim tells of them.
        """
        if self.seconds_to_check > 0:
            return []
        self._read()
        return sorted(self.known)

    def look(self) -> None:
        """Have the record asked in the next round: a claim by query took nothing of what the query had found."""
        self._check_at = time.monotonic()

    def _read(self) -> None:
        """Read pauses and changed limits, log what is new, and set the time of the next look."""
        before, paused = self.known, pausing.paused(self.using)
        overrides.read(self.using)
        self.known = paused.keys() & set(self.queues())
        is_changed = self.known or overrides.known(self.using).in_force
        wait = self.tuning.pause_check_interval if is_changed else self.tuning.idle_wait
        self._check_at = time.monotonic() + wait
        for queue in sorted(self.known - before):
            pausing.log_paused(paused[queue])
        for queue in sorted(before - self.known):
            logger.info("The queue %s is paused no more: its messages start", queue)


class Shares:
    """Divides the room of each round among queues by their weights, and none starves.

    A queue has a clock, which each claimed message advances by 1 / weight; the queues whose clocks are behind get what
    is left over when the room is divided. So shares are right over many rounds, even with room for one message in each.
    A queue that leaves a part of its room unused saves nothing up: its clock is set to that of those which had more.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._clocks = dict.fromkeys(weights, 0.0)
        # The queues that the last take emptied. The next round asks them first, and gives the others what they leave.
        self._idle: set[str] = set()

    def divide(self, queues: Sequence[str], room: int) -> list[tuple[str, int]]:
        """Return the queues in the order in which they are served now, each with its share of the room."""
        total = sum(self._weights[queue] for queue in queues)
        shares = {queue: room * self._weights[queue] // total for queue in queues}
        for _ in range(room - sum(shares.values())):
            first = min(queues, key=lambda queue: self._after(queue, shares[queue] + 1))
            shares[first] += 1
        return sorted(shares.items(), key=lambda share: (share[0] not in self._idle, self._after(share[0], 1)))

    def learn(self, taken: Mapping[str, Taken], claimed: Mapping[str, int]) -> None:
        """Take note of how many of the messages that this round took were claimed, by queue."""
        for queue, number in claimed.items():
            self._clocks[queue] = self._after(queue, number)
        wanting = {queue for queue, some in taken.items() if some.left or len(some.tickets) > claimed.get(queue, 0)}
        # A queue's credit is one round at most, or a queue whose lane was full for long would starve the others.
        latest = max((self._clocks[queue] for queue in wanting), default=0.0)
        clocks = {queue: max(self._clocks[queue], latest - 1.0) for queue in wanting}
        least = min(clocks.values(), default=None)
        # Only differences between clocks count, so the least one becomes 0.
        self._clocks = {
            queue: 0.0 if least is None else clocks.get(queue, max(clock, least)) - least
            for queue, clock in self._clocks.items()
        }
        self._idle = {queue for queue, some in taken.items() if not some.left}

    def _after(self, queue: str, number: int) -> float:
        """Return the clock of a queue after this number of further messages."""
        return self._clocks[queue] + number / self._weights[queue]


class Queues:
    """Takes ids from the queues of this process in one of three ways.

    Of a few named queues: from one after another. By weight: from each its share of the room. Of many or unnamed
    queues: from the first, and if others have ids, from all that the index of queues says.
    Used by the thread that makes the consumer's rounds.
    """

    def __init__(self, finder: QueueFinder, pauses: KnownPauses, blocked: Blocked, weights: Mapping[str, int]) -> None:
        self.tuning = finder.tuning
        self.finder = finder
        self.pauses = pauses
        self.blocked = blocked
        # None: named queues are served in strict order, and unnamed ones take turns.
        self.shares = Shares(weights) if weights else None
        # The queue from which the last round took last, if that left ids, and there are other queues; "" otherwise.
        self._served_last = ""
        # That queue while it comes last in this round, in a group of its own; "" otherwise.
        self.deferred = ""
        # Until then (monotonic) further messages of other queues are expected beside it.
        self._others_until = 0.0

    def listens(self) -> tuple[str, ...] | None:
        """The queues whose wake-ups are for this process; None: those of all queues."""
        return None if self.finder.named is None else self.pauses.served

    @property
    def with_blocked(self) -> list[str]:
        """The queues of this process with blocked ids that may begin here."""
        named, paused = self.finder.named, self.pauses.known
        return [q for q in self.blocked.queues if q not in paused and (named is None or q in named)]

    def in_order(self) -> Iterator[tuple[str, ...]]:
        """Yield the queues of a round in groups, the highest first. One take serves one group."""
        queues, self.deferred = self.pauses.served, ""
        if self.finder.named is None or len(queues) > self.tuning.few_queues or (self.shares is not None and queues):
            yield queues
            if self.deferred:
                yield (self.deferred,)
        else:
            # A thread that becomes free during this round serves the highest queue first, in the next round.
            yield from ((queue,) for queue in queues)

    def find(self, broker: Broker, queues: tuple[str, ...], room: int, within: float) -> Found:
        """Take up to ``room`` ids from one group of queues that are due or fall due ``within`` seconds."""
        if self.shares is not None:
            return Found(self._take_shares(self.shares, broker, queues, room, within))
        if time.monotonic() < self._others_until:
            room = min(room, self.tuning.most_beside_others)
        if queues == (self.deferred,) or (self.finder.named is not None and len(queues) == 1):
            self.deferred = ""
            found = Found({queues[0]: self._take_one(broker, queues[0], room, within)})
        else:
            found = self._take_due(broker, queues, room, within)
        self._note_last(found)
        return found

    def _note_last(self, found: Found) -> None:
        """Remember the queue that was served last while it has more: the next round begins with the one after it."""
        if not self.deferred:
            is_short = found.left_out or (found.leaves_some and len(self.finder()) > 1)
            is_in_turn = self.finder.named is None and is_short
            self._served_last = [self._served_last, *found.tickets][-1] if is_in_turn else ""

    def learn(self, found: Found, claimed: Mapping[str, int]) -> None:
        """Take note of how many of the messages that were found were claimed, by queue."""
        if self.shares is not None:
            self.shares.learn(found.taken, claimed)

    def _take_one(self, broker: Broker, queue: str, room: int, within: float) -> Taken:
        unblock = self.blocked.unblock(queue, room)
        return broker.take(queue, room, within, unblock, both_ends=self.blocked.are_most)

    def _take_shares(
        self, shares: Shares, broker: Broker, queues: Sequence[str], room: int, within: float
    ) -> dict[str, Taken]:
        """Take from each queue its share, and the part of their shares that the queues before it left."""
        found: dict[str, Taken] = {}
        unused = 0
        for queue, share in shares.divide(queues, room):
            found[queue] = taken = self._take_one(broker, queue, share + unused, within)
            unused += share - len(taken.tickets)
        return found

    def _take_due(self, broker: Broker, queues: Sequence[str], room: int, within: float) -> Found:
        """Take from the first queue, and then from those others that have ids which are due.

        While more is due than there is room for, queues take turns if neither the command line nor a setting orders
        them.
        """
        named = self.finder.named is not None
        found = Found()
        if queues and not self._served_last and self.blocked.holds_ids:
            taken = found.taken[queues[0]] = self._take_one(broker, queues[0], room, within)
            room -= len(taken.tickets)
            found.due = DueQueues(next_due=taken.other_due, at=taken.at)
            others = taken.other_due is not None and taken.other_due <= within
            if not (others or any(queue != queues[0] for queue in self.with_blocked)):
                return found
        found.due = due = broker.due_queues(
            queues if named else None,
            within,
            after=self._served_last,
            enough=None if named or self.pauses.known else max(room, self.tuning.enough_ids),
        )
        rest = [queue for queue in due.queues if queue.name not in found.taken and queue.name not in self.pauses.known]
        if queues and not (named or self._served_last):
            # The first queue of the list goes first. With Redis the take above has seen to that.
            rest.sort(key=lambda queue: queue.name != queues[0])
        self.finder.note([queue.name for queue in rest])
        wanted = self._with_blocked(self._defer(rest, room), queues, found, room)
        found.taken |= broker.take_many(wanted, room, within, both_ends=self.blocked.are_most)
        found.left_out = due.more > 0 or any(queue.name not in found.taken for queue in wanted)
        return found

    def _defer(self, due: Sequence[DueQueue], room: int) -> Sequence[DueQueue]:
        """Leave out the queue that was served last while others leave it room: it is served after their claim.

        So their few messages do not wait for the claim of its many, and begin meanwhile. A query counts none.
        """
        others = [queue for queue in due if queue.name != self._served_last]
        are_few = self.blocked.holds_ids and 0 < sum(queue.ready + queue.due for queue in others) < room
        if len(others) == len(due) or not are_few:
            return due
        self.deferred, self._others_until = self._served_last, time.monotonic() + self.tuning.others_expected
        return others

    def _with_blocked(
        self, due: Sequence[DueQueue], queues: Sequence[str], found: Found, room: int
    ) -> Sequence[DueQueue]:
        """Add the blocked ids that may begin here, also those of queues in which nothing else is due."""
        blocked = [queue for queue in self.with_blocked if queue not in found.taken and queue != self.deferred]
        if not blocked:
            return due
        others = {queue.name for queue in due}
        every = [*due, *(DueQueue(queue, 0, 0) for queue in blocked if queue not in others)]
        found_blocked = []
        for queue in sorted(every, key=lambda queue: self._rank(queue.name, queues)):
            names = self.blocked.unblock(queue.name, room)
            room -= min(room, queue.ready + queue.due + sum(names.values()))
            found_blocked.append(queue._replace(unblock=names))
        return found_blocked

    def _rank(self, queue: str, queues: Sequence[str]) -> tuple[int, str]:
        """Return the rank of a queue in the order in which queues are served now, the smallest first."""
        if self.finder.named is not None:
            return queues.index(queue), ""
        return int(queue <= self._served_last), queue
