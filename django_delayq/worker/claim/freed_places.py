"""The places under limits that this process has taken, and those that its deliveries have made free again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

from ...extensions import WorkerExtension
from ...record.sql.rows import Moved
from ...signals import MessageFacts

# The deliveries of which a process remembers the limits. One whose lease was lost is never told to have ended.
MOST_REMEMBERED = 10_000


class FreedPlaces(WorkerExtension):
    """Exists only in a process that knows a limit.

    The consumer's thread notes what it has claimed; any thread tells what has ended, when that is recorded. ``_lock``
    guards all. Nothing is decided by it: the record counts what runs.
    """

    def __init__(self, using: str, worker: str, wake: Callable[[], None]) -> None:
        """``wake`` is called when a place became free for which a message may wait."""
        super().__init__(using, worker)
        self._wake = wake
        self._lock = threading.Lock()
        self._held: dict[int, Collection[str]] = {}
        self._freed: Counter[str] = Counter()
        # The names of the limits that are full as far as this process knows.
        self.waited_for: Container[str] = ()
        # True while a claim asks limits. It may refuse what becomes free a moment later.
        self._is_asked = False

    def hold(self, names: Mapping[int, Collection[str]]) -> None:
        """Take note of the limits under which messages begin, by their ids."""
        with self._lock:
            self._held.update(names)
            while len(self._held) > MOST_REMEMBERED:
                del self._held[next(iter(self._held))]

    def ask(self) -> None:
        """Take note that a claim asks limits."""
        with self._lock:
            self._is_asked = True

    def answer(self, full: Collection[str]) -> None:
        """Take note of the limits that are full by the answer; go on at once if a place became free there meanwhile."""
        with self._lock:
            self._is_asked = False
            self._freed = Counter({name: freed for name, freed in self._freed.items() if name in self.waited_for})
            is_free = any(self._freed[name] for name in full)
        if is_free:
            self._wake()

    def under(self, name: str) -> int:
        """Return how many places under a limit became free and were not used up."""
        return self._freed[name]

    def use_up(self, names: Collection[str]) -> None:
        """Take note that a message under these limits is tried."""
        with self._lock:
            for name in names:
                if self._freed[name] > 1:
                    self._freed[name] -= 1
                else:
                    self._freed.pop(name, None)

    def hand_back(self, names: Iterable[str]) -> None:
        """Take note that messages were tried under these limits, and did not begin for another reason."""
        with self._lock:
            self._freed.update(name for name in names if name in self.waited_for)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        """Note the places that became free."""
        self._free(message.id for message in messages)

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        """Note the places that became free."""
        self._free(message.id for message in messages)

    def ended(self, moves: Sequence[Moved]) -> None:
        """Note the places that became free."""
        self._free(move.id for move in moves)

    def _free(self, ids: Iterable[int]) -> None:
        with self._lock:
            names = [name for pk in ids for name in self._held.pop(pk, ())]
            self._freed.update(name for name in names if self._is_asked or name in self.waited_for)
            is_waited_for = any(name in self.waited_for for name in names)
        if is_waited_for:
            self._wake()
