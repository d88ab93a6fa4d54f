"""The broker on the database: for projects without Redis, and while Redis is unavailable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ..core.limits import any_key
from ..project import pulled
from ..record import admission, transitions
from ..record.low_water import LowWater
from ..record.sql import statements
from ..record.sql.rows import BEGINNING, IndexPosition, QueueLook
from .base import Broker, DueQueue, DueQueues, Taken
from .broker_tuning import USUAL, BrokerTuning


class Walk:
    """Goes along the messages of one queue in the order of (due, id), one look after another.

    A look goes on behind the messages that may not begin, such as limited ones, and a take behind those that earlier
    takes have taken, since their rows may be dead. When nothing more is due, the next look begins at the low-water
    mark.
    """

    def __init__(self, parts_of_time: float) -> None:
        self._low = LowWater(parts_of_time)
        self._at: IndexPosition | None = None
        # The limits that were full at some look since the walk began: messages under them may stand before ``_at``.
        self.passed: frozenset[str] = frozenset()
        # True when the last look has found no message that may begin, while more messages may be due.
        self.is_under_way = False
        # When the queue held a message (monotonic).
        self.last_seen = time.monotonic()

    def begin(self) -> IndexPosition:
        """Return the position behind which to look now."""
        if self._low.begin_full_scan():
            self._at = BEGINNING
        return self._low.mark if self._at is None else self._at

    def start_over(self) -> None:
        """Have the next look begin at the low-water mark: a limit has room again that had none."""
        self._at, self.passed = None, frozenset()

    def note(self, begin: IndexPosition, closed: frozenset[str], seen: QueueLook, took: float) -> None:
        """Take note of a look: where it began, the limits it left out, what it found, and the seconds it took."""
        self.passed |= closed
        self.is_under_way = seen.is_due and not seen.is_candidate
        self._low.note(begin, seen.first, seen.now, took, is_over=seen.position is None or seen.is_candidate)
        if seen.first is not None:
            self.last_seen = time.monotonic()
        if not seen.is_due:
            self._at = None
        else:
            # More messages may begin than there is room for: the next look begins with the first of them.
            self._at = seen.before if seen.is_candidate else seen.position

    def go_past(self, seen: QueueLook) -> None:
        """Go on behind the message that a look has found: another transaction has locked it."""
        self._at = seen.position


class DatabaseBroker(Broker):
    """Finds due messages by query. It holds no ids itself.

    ``topics`` returns the topics that this process can deliver.
    """

    def __init__(self, using: str, topics: Callable[[], Iterable[str]], tuning: BrokerTuning = USUAL) -> None:
        self.using = using
        self.tuning = tuning
        self.topics = topics
        self._woken = threading.Event()
        self._holding: ExitStack | None = None
        self._walks: dict[str, Walk] = {}

    def _closed_for(self, queues: Collection[str]) -> frozenset[str]:
        """Return the limits whose messages a look at these queues leaves out.

        A limit that has room again stays closed for the walks that are under way, since they have passed earlier
        messages under it. When these walks have found a message that may begin, or the end, they start over.
        """
        full = frozenset(admission.full(self.using))
        walks = [self._walks[queue] for queue in queues if queue in self._walks]
        closed = full.union(*(walk.passed for walk in walks if walk.is_under_way))
        for walk in walks:
            if walk.passed - closed:
                walk.start_over()
        return closed

    def _topics(self, closed: Collection[str]) -> list[str]:
        return [topic for topic in self.topics() if any_key(topic) not in closed]

    def _look(self, queues: Collection[str], topics: Sequence[str], closed: frozenset[str]) -> dict[str, QueueLook]:
        """Search each queue for its first candidate, from where its walk is, and have the walks note the results."""
        walks = {queue: self._walks.setdefault(queue, Walk(self.tuning.parts_of_time)) for queue in queues}
        begins = {queue: walk.begin() for queue, walk in walks.items()}
        asked = time.monotonic()
        found = statements(self.using).find_candidates(begins, topics, closed)
        took = time.monotonic() - asked
        for queue, seen in found.items():
            walks[queue].note(begins[queue], closed, seen, took)
        return found

    def _next_look(self, wait: float | None, closed: Collection[str]) -> float | None:
        """Return the seconds until the next look, when the next message is due in ``wait`` (None: there is none)."""
        return min(self.tuning.look_again, wait or self.tuning.look_again) if closed else wait

    def _lock_due(self, seen: QueueLook, limit: int, topics: Sequence[str], closed: Collection[str]) -> Taken:
        """Take due messages of a queue, by what a look has found there. Their rows stay locked until the claim."""
        if not seen.is_due:
            return Taken(next_due=self._next_look(seen.wait, closed))
        if limit <= 0:
            return Taken(left=1)
        if not seen.is_candidate:
            return Taken(left=1, behind=True)
        if self._holding is not None:
            # The transaction begins when something is due: a take that finds nothing needs none.
            self._holding.enter_context(transitions.exclusively(self.using))
            self._holding = None
        tickets = statements(self.using).due(seen.queue, topics, limit, closed, seen.before)
        if not tickets:
            self._walks[seen.queue].go_past(seen)
        # More may be due: a query returns a thousand at most, and passes over rows that others hold.
        return Taken(tickets, left=1, behind=not tickets)

    def due_queues(
        self, queues: Sequence[str] | None, within: float = 0.0, *, after: str = "", enough: int | None = None
    ) -> DueQueues:
        """Look at all queues with one query. ``within`` and ``enough`` mean nothing to it."""
        found = sorted(self._known(), key=lambda queue: (queue <= after, queue)) if queues is None else queues
        closed = self._closed_for(found)
        looks = self._look(found, self._topics(closed), closed) if found else {}
        due = [DueQueue(queue, 0, 1, seen=looks[queue], closed=closed) for queue in found if looks[queue].is_due]
        waits = [seen.wait for seen in looks.values() if not seen.is_due]
        next_due = min((wait for wait in waits if wait is not None), default=None)
        return DueQueues(due, 0, self._next_look(next_due, closed))

    def _known(self) -> list[str]:
        """Return the queues that hold messages, or did a while ago."""
        since = time.monotonic() - self.tuning.remembered
        self._walks = {queue: walk for queue, walk in self._walks.items() if walk.last_seen > since}
        return pulled.without({*self._walks, *statements(self.using).queues(self._walks)})

    def take_many(
        self, due: Sequence[DueQueue], limit: int, within: float = 0.0, *, both_ends: bool = False
    ) -> dict[str, Taken]:
        """Find due rows in one queue after another. Of the arguments only ``limit`` means something to a query."""
        found = {}
        for queue in due:
            # The caller may add a queue in which ``due_queues`` has not looked.
            closed = queue.closed if queue.seen else self._closed_for([queue.name])
            topics = self._topics(closed)
            seen = queue.seen or self._look([queue.name], topics, closed)[queue.name]
            found[queue.name] = taken = self._lock_due(seen, limit, topics, closed)
            limit -= len(taken.tickets)
        return found

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the rows that ``take`` finds until the block ends. Only one thread at a time may use this."""
        with ExitStack() as stack:
            self._holding = stack
            try:
                yield
            finally:
                self._holding = None

    def listen(self, queues: Sequence[str] | None, timeout: float) -> bool:
        """Sleep until the timeout or ``wake``; no other process can notify this one."""
        self._woken.wait(max(0.0, timeout))
        self._woken.clear()
        return False

    def wake(self) -> None:
        """End a ``listen``, or the next one."""
        self._woken.set()
