"""Finds the queues that a worker serves, in their order."""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import conf, registry, transitions
from ..extensions import Service

# A queue that is named nowhere is served for this long after it held a message. Seconds.
REMEMBERED = 3600.0
# The time between two searches of the record for queues that hold messages. Seconds.
SEARCH_INTERVAL = 6.0


class QueueFinder(Service):
    """Gives the queues named on the command line, else those of the settings, else all queues that it finds.

    Of the found queues the default queue comes first, then, by name, those of handlers and those that hold messages.
    The upkeep thread replaces the tuple of found queues as a whole; any thread may read it.
    """

    name = "queue finder"

    def __init__(self, using: str, named: tuple[str, ...] = (), on_change: Callable[[], None] = lambda: None) -> None:
        self.using = using
        self._on_change = on_change
        self._fixed = named or conf.get().QUEUES
        self._seen: dict[str, float] = {}
        self._found: tuple[str, ...] = self._fixed or self._order(set())

    def __call__(self) -> tuple[str, ...]:
        return self._found

    def tick(self) -> float:
        """Search the record, and call ``on_change`` when other queues are found than before."""
        if self._fixed:
            return 3600.0
        now = time.monotonic()
        self._seen = {queue: at for queue, at in self._seen.items() if now - at < REMEMBERED}
        self._seen.update(dict.fromkeys(transitions.queues(self.using), now))
        found = self._order(set(self._seen))
        if found != self._found:
            self._found = found
            self._on_change()
        return SEARCH_INTERVAL

    def _order(self, found: set[str]) -> tuple[str, ...]:
        default = conf.get().DEFAULT_QUEUE
        found |= {h.queue for h in registry.handlers().values() if h.queue is not None}
        return (default, *sorted(found - {default}))
