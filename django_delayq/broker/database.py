"""The broker when there is no Redis, or while it is away: the same verbs by query."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .. import transitions
from .base import DueTicket, Entry, Put, Taken


class DatabaseBroker:
    """Knows nothing that the rows do not say. ``topics`` tells which ones this process can deliver."""

    def __init__(self, using: str, topics: Callable[[], Iterable[str]]) -> None:
        self.using = using
        self.topics = topics
        self._woken = threading.Event()
        self._holding: ExitStack | None = None

    def put(self, queue: str, entries: Sequence[Entry], *, fill: bool = False) -> Put:
        return Put(present=len(entries))

    def remove(self, queue: str, ids: Sequence[int]) -> None:
        """The row says that it is not scheduled any more."""

    def take(self, queue: str, limit: int, within: float = 0.0) -> Taken:
        topics = list(self.topics())
        wait = transitions.until_due(self.using, queue, topics)
        if wait is None or wait > 0:
            return Taken(next_due=wait)
        if limit <= 0:
            return Taken(left=1)
        if self._holding is not None:
            # Only now: while nothing is due, a look costs one query and no transaction.
            self._holding.enter_context(transitions.exclusively(self.using))
        tickets = transitions.due(self.using, queue, topics, limit)
        return Taken([DueTicket(t.id, None, None) for t in tickets], left=int(len(tickets) == limit))

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Used by one thread at a time."""
        with ExitStack() as stack:
            self._holding = stack
            try:
                yield
            finally:
                self._holding = None

    def wait(self, queues: Sequence[str], timeout: float) -> bool:
        self._woken.wait(max(0.0, timeout))
        self._woken.clear()
        return False

    def stop_listening(self) -> None:
        """Nobody is woken in another process."""

    def wake(self) -> None:
        self._woken.set()

    def ring(self, queue: str) -> None:
        """Others look by themselves."""

    def close(self) -> None:
        """Nothing is held."""
