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

# The last deliveries of each handler thread that the shared state names: the one that runs, and before it those that
# have ended and whose outcomes may not be recorded yet.
NAMED = 32


def _number(place: int) -> Any:
    """Return the property of a shared that is the number at this place of its memory."""
    return property(lambda shared: shared.memory[place], lambda shared, value: setitem(shared.memory, place, value))


class SharedState:
    """The signs of life of a process, the deliveries that it began last, and since when a message is to run alone.

    The process writes and the supervisor reads, except for ``replaced``, which the supervisor writes. Each number has
    one writer among the threads of the process: the main thread gives signs of life and ends, the thread that makes the
    consumer's turns writes ``suspect_since``, and each handler thread and the loop's thread note their own deliveries.
    ``retired`` is written under a lock of the process. A number is written at once, so no lock is needed that the
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
    retired = _number(5)

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
