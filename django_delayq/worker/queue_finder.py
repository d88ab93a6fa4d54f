"""Which queues a worker serves, in which order."""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import conf, registry, transitions
from ..extensions import Service

# A queue that nobody has named is listened to for so long after it held a message. Seconds.
REMEMBERED = 3600.0


class QueueFinder(Service):
    """The queues named on the command line, else those of the settings, else all that can be found.

    What is found is the default queue first, then the handlers' queues and those that hold messages, by name.
    """

    name = "queue finder"
    interval = 6.0

    def __init__(self, using: str, named: tuple[str, ...] = (), changed: Callable[[], None] = lambda: None) -> None:
        self.using = using
        self._changed = changed
        self._fixed = named or conf.get().QUEUES
        self._seen: dict[str, float] = {}
        self._found: tuple[str, ...] = self._fixed or self._order(set())

    def __call__(self) -> tuple[str, ...]:
        return self._found

    def tick(self) -> float:
        if self._fixed:
            return 3600.0
        now = time.monotonic()
        self._seen = {queue: at for queue, at in self._seen.items() if now - at < REMEMBERED}
        self._seen.update(dict.fromkeys(transitions.queues(self.using), now))
        found = self._order(set(self._seen))
        if found != self._found:
            self._found = found
            self._changed()
        return self.interval

    def _order(self, found: set[str]) -> tuple[str, ...]:
        default = conf.get().DEFAULT_QUEUE
        found |= {h.queue for h in registry.handlers().values() if h.queue is not None}
        return (default, *sorted(found - {default}))
