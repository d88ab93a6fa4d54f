"""Sends the signals of outcomes and moves, and logs failures, in a thread of its own.

Receivers and handlers of the log may be slow, and other threads have leases to renew and messages to load.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Queue

from . import connections
from .reporting import try_to

logger = logging.getLogger("django_delayq")

# While so many signals and failures wait, the process takes no messages: receivers that are slower than handlers must
# not fill the memory. More than end in one batch, which waits for a moment wherever receivers and the log are quick.
MOST_WAITING = 2000


class SignalSender(threading.Thread):
    """Sends signals and logs failures one after another, in the order in which they were given. Any thread gives them.

    Where the thread was not started, as in tests of a project, each is sent at once.
    """

    def __init__(self) -> None:
        super().__init__(name="delayq-signals", daemon=True)
        self._waiting: Queue[Callable[[], object] | None] = Queue()
        # Set before the thread starts: called when the process may take messages again.
        self.on_room: Callable[[], None] = lambda: None

    def send(self, call: Callable[[], object]) -> None:
        """Have a call made that sends a signal or logs a failure."""
        if not self.is_alive():
            try_to(call)
            return
        self._waiting.put(call)
        if self.waiting == MOST_WAITING:
            logger.warning(
                "%d signals and failures wait for slow receivers or a slow log; this process takes no messages now",
                MOST_WAITING,
            )

    @property
    def waiting(self) -> int:
        """The number of signals and failures that are not told yet."""
        return self._waiting.unfinished_tasks

    @property
    def is_behind(self) -> bool:
        """True when so many signals wait that there should be no more."""
        return self.waiting >= MOST_WAITING

    def finish(self, timeout: float) -> None:
        """End the thread when all is told. Give up, and log it, after ``timeout`` seconds."""
        self._waiting.put(None)
        self.join(timeout)
        if self.is_alive():
            logger.error(
                "Receivers or the log did not end in time; signals and failures that are not told: %d", self.waiting - 1
            )

    def run(self) -> None:
        """Tell what is given until the end."""
        while (call := connections.wait_for(self._waiting, connections.IDLE_CLOSED_AFTER)) is not None:
            connections.before_task()
            try_to(call)
            connections.after_task()
            self._waiting.task_done()
            if self.waiting == MOST_WAITING // 2:
                self.on_room()
        connections.close_all()
