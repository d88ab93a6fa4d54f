"""Says which handler thread takes the next delivery: one thread at a time as long as handlers are quick."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

# Handlers of a topic are quick while their mean run time is below this. Seconds.
QUICK = 0.00015
# A run counts with this time at most: Python may keep a thread waiting for longer than the handler takes. Seconds.
LONGEST_RUN = 0.001
# The weight of the newest run in the mean. Quick handlers that had to wait for others, some of them in a row, must not
# count as slow: side by side they would take longer, and stay so.
RUN_WEIGHT = 0.02
# A quick handler that turns out slow keeps others waiting for up to twice this time. Seconds.
LONGEST_TURN = 0.002


class Turns:
    """Lets one thread take deliveries, and run them one after another while handlers are quick.

    With several threads at it Python switches between them at each call to the system, which costs more than a quick
    handler itself. Before any other handler the thread passes the turn on, so that all threads run handlers that wait.
    A thread of its own passes the turn on when a handler that was quick so far is not.

    ``_guard`` guards ``_holder``. What is known of a topic is an estimate, which may miss a run.
    """

    def __init__(self, deliveries: SimpleQueue[Any], threads: int) -> None:
        self._deliveries = deliveries
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._holder: int | None = None
        # The number of quick handlers that were begun, and the thread that runs one now, with the turn.
        self._begun = 0
        self._running: int | None = None
        self._means: defaultdict[str, float] = defaultdict(float)
        # Set while deliveries wait for a quick handler: only then the watch is awake.
        self._is_waited_for = threading.Event()
        self._stopping = False
        # One thread has always the turn.
        self.members: Sequence[threading.Thread] = ()
        if threads > 1:
            self.members = [threading.Thread(target=self._watch, name="delayq-turn-watch", daemon=True)]

    def take(self, thread: int, timeout: float = -1) -> bool:
        """Wait for the turn, up to ``timeout`` seconds (-1: for ever), and return whether the thread has it."""
        if self._turn.acquire(timeout=timeout):
            self._holder = thread
        return self._holder == thread

    def has(self, thread: int) -> bool:
        """Return whether the thread has the turn still."""
        return self._holder == thread

    def pass_on(self, thread: int) -> None:
        """Let another thread have the turn, unless it has it already."""
        with self._guard:
            if self._holder == thread:
                self._holder = self._running = None
                self._turn.release()

    def begin(self, thread: int, topic: str) -> None:
        """Keep the turn during a handler if it is quick by all that is known; else pass it on."""
        if self._means[topic] >= QUICK:
            self.pass_on(thread)
            return
        # The watch may have passed the turn on just before this thread got its delivery.
        if self.has(thread):
            self._begun += 1
            self._running = thread
            self.note_waiting()

    def end(self, thread: int, topic: str, seconds: float) -> None:
        """Take note of the run time of a handler."""
        if self._running == thread:
            self._running = None
        mean = self._means[topic]
        self._means[topic] = mean + (min(seconds, LONGEST_RUN) - mean) * RUN_WEIGHT

    def note_waiting(self) -> None:
        """Wake the watch if a delivery waits for a quick handler. Call this after each change that can lead to that."""
        if self._running is not None and not (self._is_waited_for.is_set() or self._deliveries.empty()):
            self._is_waited_for.set()

    def stop(self) -> None:
        """End the watch."""
        self._stopping = True
        self._is_waited_for.set()

    def _watch(self) -> None:
        while self._is_waited_for.wait() and not self._stopping:
            begun = self._begun
            time.sleep(LONGEST_TURN)
            running = self._running
            if running is None or self._deliveries.empty():
                self._is_waited_for.clear()
                # One may have begun, and a delivery may have come, in between.
                self.note_waiting()
            elif begun == self._begun:
                self.pass_on(running)
