"""How long a worker process lives: the messages that it may claim and the memory that it may use."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...core.callables import nothing
from ...core.worker_options import Options
from .shared_state import SharedState

logger = logging.getLogger("django_delayq")


class Budget:
    """Tells how many messages one process may still claim.

    With ``--max-messages`` the process ends when they are used up. With ``--max-tasks-per-child`` or
    ``--max-memory-per-child`` it retires then, and asks the supervisor for a successor. The supervisor starts none
    while too many retired processes still finish. The process does not wait for ever: a few slow handlers would stop
    the work of all others.

    The consumer's thread counts the messages that it claims, and any thread those that it releases unstarted. The main
    thread looks at the memory, and at how long the process waits. ``_lock`` guards the numbers.
    """

    # Each process lowers its limits by a random part, up to this one: otherwise processes that were started together
    # would retire together.
    jitter = 0.1
    # A retired process waits this long for its successor to start. Seconds.
    patience = 1.0
    # If none has started then, the process may claim its number of messages once more, or use this share more memory.
    more_memory = 0.1

    def __init__(
        self, options: Options, shared: SharedState, worker: str, on_retired: Callable[[], None] = nothing
    ) -> None:
        """``on_retired`` wakes the supervisor and the main thread, which read the shared state."""
        less = random.uniform(0, self.jitter)
        messages, memory = options.max_tasks_per_child, options.max_memory_per_child
        # Of less than ten messages none is subtracted.
        self._messages = None if messages is None else messages - int(messages * less)
        self._memory = None if memory is None else memory * (1 - less)
        # The messages that it may still claim, and the bytes that it may use.
        limits = (options.max_messages, self._messages, sys.maxsize)
        self._left = next(limit for limit in limits if limit is not None)
        self._bytes = math.inf if self._memory is None else self._memory
        self._has_end = options.max_messages is not None
        self._shared = shared
        self._worker = worker
        self._on_retired = on_retired
        self._claimed = 0
        # When it retired (monotonic).
        self._retired_at = 0.0
        self._lock = threading.Lock()

    def grant(self, wanted: int) -> int:
        """Return how many of the ``wanted`` messages the process may claim."""
        return 0 if self._shared.retired else max(0, min(wanted, self._left))

    @property
    def empty(self) -> bool:
        """True when ``--max-messages`` is reached."""
        return self._has_end and self._left <= 0

    def count(self, claimed: int) -> None:
        """Count messages that were claimed; a negative number counts some that were released unstarted."""
        with self._lock:
            self._claimed += claimed
            self._left -= claimed
            is_over = self._left <= 0
        if is_over and self._messages is not None:
            self._retire(f"has claimed {self._claimed} messages")

    def refund(self) -> None:
        """Take note that a message was released unstarted."""
        self.count(-1)

    def check(self) -> bool:
        """Find out whether the process is retired, or has waited long enough. Return True when it may claim again."""
        if self._shared.retired:
            return not self._shared.replaced and time.monotonic() - self._retired_at >= self.patience and self._go_on()
        # A process that has claimed nothing has not grown by messages, and its successor would need as much.
        if self._memory is not None and self._claimed and (used := resident_memory()) >= self._bytes:
            self._retire(f"uses {in_megabytes(used)} of memory")
        return False

    def _retire(self, why: str) -> None:
        """Mark this process as retired, and ask for a successor."""
        with self._lock:
            if self._shared.retired or self._shared.replaced:
                return
            self._shared.retired = True
            self._retired_at = time.monotonic()
        logger.info("Worker process %s %s; another one takes its place", self._worker, why)
        self._on_retired()

    def _go_on(self) -> bool:
        """Let this process claim again, since no successor started. Returns True."""
        with self._lock:
            if self._messages is not None:
                self._left = self._messages
            if self._memory is not None:
                self._bytes = resident_memory() + self._memory * self.more_memory
            self._shared.retired = False
        logger.info("Worker process %s goes on, because too many before it have not finished", self._worker)
        return True


def resident_memory() -> int:
    """Return the resident memory of this process, in bytes, as ``ps`` shows it: with the pages that it shares.

    Where there is no ``/proc``, as on macOS, it is the most that the process ever had.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        # macOS gives bytes, other systems KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_megabytes(size: float) -> str:
    """Return a size in bytes as text, such as ``200M``."""
    return f"{size / 1024**2:.0f}M"
