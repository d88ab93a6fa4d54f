"""What the processes of a worker share: memory with signs of life, and a lock that the death of its holder frees."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import weakref
from collections import deque
from operator import setitem
from typing import Any

# The last deliveries of each handler thread that the shared state names, or twice as many as the largest batch: those
# that run, and before them those that have ended and whose outcomes may not be recorded yet.
NAMED = 32


def _number(index: int) -> Any:
    """Return a property of the shared state: the number at this index of its memory."""
    return property(lambda shared: shared.memory[index], lambda shared, value: setitem(shared.memory, index, value))


class SharedState:
    """The signs of life of a process, the deliveries that it began last, and since when it isolates a message.

    The process writes and the supervisor reads, except for ``replaced``, which the supervisor writes. Each number has
    one writer among the threads of the process: the main thread gives signs of life and ends, the consumer's
    thread writes ``suspect_since``, and each handler thread and the loop's thread note their own deliveries.
    ``retired`` is written under a lock of the process. A number is written at once, so no lock is needed that the
    processes share, which a killed process would hold for ever.
    """

    # When the consumer last began a round (monotonic), and the number of signs of life.
    beat, signs = _number(0), _number(1)
    # True when the exit code is the worker's own: a handler may call ``os._exit`` with any code.
    ended = _number(2)
    # Since when the process takes nothing because it isolates a message (monotonic); 0: it takes.
    suspect_since = _number(3)
    # True when another process has replaced this one, which takes nothing and ends when it holds nothing.
    replaced = _number(4)
    # True when the process has reached a limit of its lifetime: it claims nothing, and waits to be replaced.
    retired = _number(5)

    def __init__(self, threads: int, tasks: int = 0, largest_batch: int = 1) -> None:
        """``tasks`` handlers run at once on the event loop; one in a thread runs up to ``largest_batch`` deliveries."""
        named = self._named = max(NAMED, 2 * largest_batch)
        self.memory = memoryview(mmap.mmap(-1, 6 * 8)).cast("d")
        self._begun = memoryview(mmap.mmap(-1, (threads * named + 2 * tasks) * 8)).cast("q")
        # For each handler thread, the entry that names its last delivery.
        self._last = [number * named for number in range(threads)]
        # Entries for tasks. They end in any order, so each has an entry until it ends, and an entry that was freed is
        # the last to be used again.
        self._free = deque(range(threads * named, len(self._begun)))

    def show_life(self, beat: float) -> None:
        """Give a sign of life; ``beat`` is when the consumer last began a round."""
        self.beat = beat
        self.signs += 1

    def note_begun(self, thread: int, pk: int) -> None:
        """Take note, before a handler begins, of its thread (from 0) and its message."""
        first = thread * self._named
        entry = self._last[thread] = first + (self._last[thread] + 1 - first) % self._named
        self._begun[entry] = pk

    def note_task(self, pk: int) -> int:
        """Take note, before a task begins, of its message. Return the entry to free when it has ended."""
        entry = self._free.popleft()
        self._begun[entry] = pk
        return entry

    def free(self, entry: int) -> None:
        """Have the entry used again, later: the outcome of the task may not be recorded yet."""
        self._free.append(entry)

    @property
    def begun(self) -> frozenset[int]:
        """The messages whose handlers ran last: all that run now are among them."""
        return frozenset(self._begun) - {0}


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
