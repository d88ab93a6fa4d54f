"""The life of a worker process: its page, which its supervisor reads, its budget, and a lock that its death frees."""

from __future__ import annotations

import logging
import math
import mmap
import os
import random
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import setitem
from pathlib import Path
from typing import Any

from ...core.worker_options import Options

logger = logging.getLogger("django_delayq")

# The last deliveries of each handler thread that the page names: the one that runs, and before it those that have ended
# and whose outcomes may not be recorded yet.
NAMED = 32
# Each process has limits of its own, lower than those that were asked for by up to this part: otherwise processes that
# were started together would be replaced together.
JITTER = 0.1
# A spent process waits so long for a place for its successor. Seconds.
PATIENCE = 1.0
# Then it may claim as many messages again, or use more memory by this part.
MORE_MEMORY = 0.1


def _number(place: int) -> Any:
    """Return the property of a page that is the number at this place of its memory."""
    return property(lambda page: page.memory[place], lambda page, value: setitem(page.memory, place, value))


class BegunPage:
    """The signs of life of a process, the deliveries that it began last, and since when a message is to run alone.

    The process writes and the supervisor reads, except for ``replaced``, which the supervisor writes. Each number has
    one writer among the threads of the process: the main thread gives signs of life and ends, the thread that makes the
    consumer's turns writes ``suspect_since``, and each handler thread and the loop's thread note their own deliveries.
    ``spent`` is written under a lock of the process. A number is written at once, so no lock is needed that the
    processes share, which a killed process would hold for ever.
    """

    # When the consumer last began a turn (monotonic), and the number of signs of life.
    beat, signs = _number(0), _number(1)
    # True when the exit code is the worker's own: a handler may call ``os._exit`` with any code.
    ended = _number(2)
    # Since when the process takes nothing because a message is to run alone in it (monotonic); 0: it takes.
    suspect_since = _number(3)
    # True when another process has taken the place of this one, which takes nothing and ends when it holds nothing.
    replaced = _number(4)
    # True when the process has reached a limit of its lifetime: it claims nothing, and waits to be replaced.
    spent = _number(5)

    def __init__(self, threads: int, tasks: int = 0) -> None:
        """``tasks`` handlers run at once on the event loop."""
        self.memory = memoryview(mmap.mmap(-1, 6 * 8)).cast("d")
        self._begun = memoryview(mmap.mmap(-1, (threads * NAMED + 2 * tasks) * 8)).cast("q")
        # For each handler thread, where its last delivery is named.
        self._places = [number * NAMED for number in range(threads)]
        # Where tasks are named. They end in any order, so each has a place until it ends, and a place that was given
        # back is the last to be used again.
        self._free = deque(range(threads * NAMED, len(self._begun)))

    def show_life(self, beat: float) -> None:
        """Give a sign of life; ``beat`` is when the consumer last began a turn."""
        self.beat = beat
        self.signs += 1

    def note_begun(self, thread: int, pk: int) -> None:
        """Take note, before a handler begins, of its thread (from 0) and its message."""
        first = thread * NAMED
        place = self._places[thread] = first + (self._places[thread] + 1 - first) % NAMED
        self._begun[place] = pk

    def note_task(self, pk: int) -> int:
        """Take note, before a task begins, of its message. Return the place to give back when it has ended."""
        place = self._free.popleft()
        self._begun[place] = pk
        return place

    def give_back(self, place: int) -> None:
        """Have the place used again, later: the outcome of the task may not be recorded yet."""
        self._free.append(place)

    @property
    def begun(self) -> frozenset[int]:
        """The messages whose handlers ran last: all that run now are among them."""
        return frozenset(self._begun) - {0}


class Budget:
    """Tells how many messages one process may still claim.

    With ``--max-messages`` the process ends when they are used up. With ``--max-tasks-per-child`` or
    ``--max-memory-per-child`` it is spent then, and asks the supervisor for a successor. There is no place for one
    while too many predecessors still finish. The process does not wait for ever: a few slow handlers would stop the
    work of all others.

    The thread that makes the consumer's turns counts the messages that it claims, and any thread those that it releases
    unstarted. The main thread looks at the memory, and at how long the process waits. ``_lock`` guards the numbers.
    """

    def __init__(self, options: Options, page: BegunPage, worker: str) -> None:
        less = random.uniform(0, JITTER)
        messages, memory = options.max_tasks_per_child, options.max_memory_per_child
        # Of less than ten messages none is subtracted.
        self._messages = None if messages is None else messages - int(messages * less)
        self._memory = None if memory is None else memory * (1 - less)
        # The messages that it may still claim, and the bytes that it may use.
        limits = (options.max_messages, self._messages, sys.maxsize)
        self._left = next(limit for limit in limits if limit is not None)
        self._bytes = math.inf if self._memory is None else self._memory
        self._has_end = options.max_messages is not None
        self._page = page
        self._worker = worker
        # Called when the process is spent: it wakes the supervisor and the main thread, which find that in the page.
        self.ask: Callable[[], None] = lambda: None
        self._claimed = 0
        # When it was spent (monotonic).
        self._spent_at = 0.0
        self._lock = threading.Lock()

    def grant(self, wanted: int) -> int:
        """Return how many of the ``wanted`` messages the process may claim."""
        return 0 if self._page.spent else max(0, min(wanted, self._left))

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
            self._spend(f"has claimed {self._claimed} messages")

    def refund(self) -> None:
        """Take note that a message was released unstarted."""
        self.count(-1)

    def check(self) -> bool:
        """Find out whether the process is spent, or has waited long enough. Return True when it may claim again."""
        if self._page.spent:
            return not self._page.replaced and time.monotonic() - self._spent_at >= PATIENCE and self._go_on()
        # A process that has claimed nothing has not grown by messages, and its successor would need as much.
        if self._memory is not None and self._claimed and (used := resident_memory()) >= self._bytes:
            self._spend(f"uses {in_megabytes(used)} of memory")
        return False

    def _spend(self, why: str) -> None:
        with self._lock:
            if self._page.spent or self._page.replaced:
                return
            self._page.spent = True
            self._spent_at = time.monotonic()
        logger.info("Worker process %s %s; another one takes its place", self._worker, why)
        self.ask()

    def _go_on(self) -> bool:
        with self._lock:
            if self._messages is not None:
                self._left = self._messages
            if self._memory is not None:
                self._bytes = resident_memory() + self._memory * MORE_MEMORY
            self._page.spent = False
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


class ProcessLock:
    """Lets one process at a time hold it. It serves the processes that were forked after it was made.

    It is a lock of POSIX: it belongs to a process, not to the children of that process, and the kernel frees it when
    the process dies. It does not exclude the threads of one process from each other.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            # This needs no folder that can be written to. Some builds of Python lack it.
            self._file = os.memfd_create("delayq")
        else:
            self._file, path = tempfile.mkstemp(prefix="delayq")
            os.unlink(path)
        weakref.finalize(self, os.close, self._file)

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock. Return whether this process has it now."""
        # Imported here: where it is missing, run_delayq is to say so in a sentence.
        import fcntl

        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            return False
        os.pwrite(self._file, struct.pack("d", time.monotonic()), 0)
        return True

    @property
    def held_for(self) -> float:
        """The seconds since some process took the lock; of no meaning while none has it."""
        written = os.pread(self._file, struct.calcsize("d"), 0)
        return max(0.0, time.monotonic() - struct.unpack("d", written)[0]) if written else 0.0

    def release(self) -> None:
        """Free the lock. Does nothing when this process does not have it."""
        import fcntl

        fcntl.lockf(self._file, fcntl.LOCK_UN)
