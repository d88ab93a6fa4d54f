"""The broker on the database: for projects without Redis, and while Redis is unavailable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar

from ..record import admission, transitions
from ..record.sql.rows import BEGINNING, WHOLE, Spot, Stretch, Ticket
from .base import DueQueue, DueQueues, Entry, Put, Taken

# While a limit is full, its messages are looked for again after this time. Seconds.
LOOK_AGAIN = 0.25


def _look_again(wait: float | None, closed: Collection[str]) -> float | None:
    """Return after how many seconds to look again, when the next message is due in ``wait`` (None: there is none)."""
    return min(LOOK_AGAIN, wait or LOOK_AGAIN) if closed else wait


class DatabaseBroker:
    """Finds due messages by query. It holds no ids itself, so most methods do nothing.

    ``topics`` returns the topics that this process can deliver.
    """

    claims_ahead: ClassVar[bool] = False
    forgets_taken: ClassVar[bool] = False

    def __init__(self, using: str, topics: Callable[[], Iterable[str]]) -> None:
        self.using = using
        self.topics = topics
        self._woken = threading.Event()
        self._holding: ExitStack | None = None
        # While limits are full, many messages may have to be passed over: a take looks at a part of a queue, and the
        # next one at the part behind it.
        self._looked_up_to: dict[str, Spot] = {}

    def put(self, queue: str, entries: Sequence[Entry]) -> Put:
        """Report all entries as present: the rows hold them."""
        return Put(present=len(entries))

    def take(self, queue: str, limit: int, within: float = 0.0, opened: Mapping[str, int] = {}) -> Taken:
        """Find rows that are due. ``within`` and ``opened`` are ignored: a query finds nothing early or aside."""
        return self._take(queue, limit, list(self.topics()), admission.full(self.using))

    def _take(self, queue: str, limit: int, topics: Sequence[str], closed: Collection[str]) -> Taken:
        stretch = self._stretch(queue) if closed else WHOLE
        wait = transitions.until_due(self.using, queue, topics, closed, stretch)
        tickets: list[Ticket] = []
        if wait is not None and wait <= 0:
            if limit <= 0:
                return Taken(left=1)
            if self._holding is not None:
                # The transaction begins when something is due: until then a take costs few queries, no transaction.
                self._holding.enter_context(transitions.exclusively(self.using))
                self._holding = None
            tickets = transitions.due(self.using, queue, topics, limit, closed, stretch)
        if not stretch.is_last and (not tickets or len(tickets) < limit):
            self._looked_up_to[queue] = stretch.end
            return Taken(tickets, left=1, behind=True)
        if tickets:
            # Whether more are due is not known: a query returns a thousand at most, and passes over rows that others
            # hold.
            return Taken(tickets, left=1)
        self._looked_up_to.pop(queue, None)
        return Taken(next_due=_look_again(wait, closed))

    def _stretch(self, queue: str) -> Stretch:
        """Return the part of a queue to look at, from where the last look ended."""
        return transitions.stretch(self.using, queue, self._looked_up_to.get(queue, BEGINNING))

    def due_queues(
        self, queues: Sequence[str] | None, within: float = 0.0, *, after: str = "", enough: int | None = None
    ) -> DueQueues:
        """Find the first message of each queue with one query. ``within`` is ignored, and no more is counted."""
        found = transitions.queues(self.using) if queues is None else queues
        found = sorted(found, key=lambda queue: (queue <= after, queue)) if queues is None else found
        if not found:
            return DueQueues()
        closed = admission.full(self.using)
        waits = transitions.waits(self.using, found, list(self.topics()), closed)
        due = [DueQueue(queue, 0, 1) for queue in found if waits.get(queue, 1.0) <= 0]
        next_due = min((wait for wait in waits.values() if wait > 0), default=None)
        return DueQueues(due, 0, _look_again(next_due, closed))

    def take_many(self, due: Sequence[DueQueue], limit: int, within: float = 0.0) -> dict[str, Taken]:
        """Take from one queue after another."""
        if not due:
            return {}
        topics, closed = list(self.topics()), admission.full(self.using)
        found = {}
        for queue in due:
            found[queue.name] = taken = self._take(queue.name, limit, topics, closed)
            limit -= len(taken.tickets)
        return found

    def promote(self, queue: str) -> Taken:
        """Do nothing: the due time of a row says whether it is ready."""
        return Taken()

    def park(self, queue: str, tickets: Sequence[Ticket], seconds: float) -> None:
        """Do nothing: the row is still due."""

    def put_back(self, queue: str, tickets: Sequence[Ticket]) -> None:
        """Do nothing: the row is still due."""

    def stand_aside(self, queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        """Do nothing: the row is still due, and the next query leaves out what nobody here can begin."""

    def asides(self) -> dict[str, dict[str, int]]:
        """Return nothing."""
        return {}

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

    def stop_listening(self) -> None:
        """Do nothing: there are no notifications."""

    def wake(self) -> None:
        """End a ``listen``, or the next one."""
        self._woken.set()

    def notify(self, queues: Sequence[str] | None) -> None:
        """Do nothing: other processes poll."""
