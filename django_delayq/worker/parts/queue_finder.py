"""Finds the queues that a worker serves, in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from ...extensions import Service
from ...project import conf, registry
from ...record.sql import statements

# A queue that is named nowhere is served for this long after it held a message. Seconds.
REMEMBERED = 3600.0
# The time between two searches of the record for queues that hold messages, in the process that has the duty. The
# broker tells the others of a queue in which a message falls due. Seconds.
SEARCH_INTERVAL = 30.0


class QueueFinder(Service):
    """Gives the queues named on the command line, else those of the settings, else all queues that it finds.

    Of the found queues the default queue comes first, then, by name, those of handlers and those that hold messages.
    The upkeep thread and the consumer replace the tuple of found queues as a whole (``_lock``); any thread may read it.
    """

    name = "queue finder"
    is_shared = True

    def __init__(self, using: str, named: tuple[str, ...] = (), on_change: Callable[[], None] = lambda: None) -> None:
        self.using = using
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
        """Take note of queues that hold messages, as the broker says: a new one is served before the next search."""
        if self.named is None and not self._served.issuperset(queues):
            with self._lock:
                self._seen.update(dict.fromkeys(queues, time.monotonic()))
                self._replace()

    def tick(self) -> float:
        """Search the record from time to time."""
        self.search()
        return SEARCH_INTERVAL if self.named is None else 3600.0

    def search(self) -> tuple[str, ...]:
        """Search the record, call ``on_change`` when other queues are found than before, and return the queues."""
        if self.named is not None:
            return self._found
        found = statements(self.using).queues()
        now = time.monotonic()
        with self._lock:
            self._seen = {queue: at for queue, at in self._seen.items() if now - at < REMEMBERED}
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
        return (default, *sorted(found - {default}))
