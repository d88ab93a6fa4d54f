"""Waits for messages of pulled queues: one thread looks for all callers of a process that wait, and wakes one of them.

The thread is started when somebody waits, and ends when nobody has waited for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Self

from django.db import Error as DatabaseError
from django.db import connections

from ..broker import RedisBroker, index
from ..broker.broker_tuning import USUAL
from ..core.exceptions import BrokerUnavailable
from ..core.forks import after_fork
from ..core.outages import Outage
from ..record.sql import statements
from ..record.sql.rows import BEGINNING
from .ending import end_what_is_over

logger = logging.getLogger("django_delayq")

# The longest time between two looks while somebody waits: Redis wakes for what is due sooner. Seconds.
LOOK_INTERVAL = USUAL.pullers_look
# A caller that begins to wait has the thread look, but not sooner than this after the last look. Seconds.
LOOK_PAUSE = 0.005
# The thread ends when nobody has waited for this time. Seconds.
LINGER = 5.0
# Redis that did not answer is tried again after this time. Seconds.
RETRY_REDIS = 1.0


class Waiter:
    """A caller that waits for a message of one of its queues, in a thread or in a coroutine."""

    def __init__(self, waiting: Waiting, queues: Sequence[str]) -> None:
        self._waiting, self.queues = waiting, queues
        self._woken: Future[None] = Future()

    def __enter__(self) -> Self:
        self._waiting.add(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self._waiting.remove(self)

    def wake(self) -> None:
        """Have the caller look."""
        # It may have been woken already, or have stopped to wait.
        with contextlib.suppress(InvalidStateError):
            self._woken.set_result(None)

    def sleep(self, seconds: float) -> None:
        """Wait in a thread until the caller is woken."""
        with contextlib.suppress(TimeoutError):
            self._woken.result(seconds)
        self._woken = Future()

    async def asleep(self, seconds: float) -> None:
        """Wait in a coroutine until the caller is woken."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._woken), seconds)
        self._woken = Future()

    def has_looked(self, *, takes_all: bool) -> None:
        """Say that the caller has looked, and that it took all it could: then there may be more for the next one."""
        self._waiting.note_look(self, takes_all=takes_all)


class Waiting:
    """Those who wait for messages of one database, and the thread that looks for them. Any thread may call it.

    ``_lock`` guards everything but the broker, which is the thread's own except for ``wake``.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._lock = threading.Lock()
        # By queue, in the order in which they came.
        self._waiters: defaultdict[str, dict[Waiter, None]] = defaultdict(dict)
        # The waiter of a queue that was woken and has not looked yet, and when it was woken (monotonic).
        self._called: dict[str, tuple[Waiter, float]] = {}
        self._thread: threading.Thread | None = None
        self._poked = threading.Event()
        self._broker: RedisBroker | None = None
        self._redis_at = 0.0
        self._outage = Outage()

    def add(self, waiter: Waiter) -> None:
        """Wake the waiter when a message falls due that it waits for."""
        with self._lock:
            for queue in waiter.queues:
                self._waiters[queue][waiter] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delayq-pull", daemon=True)
                self._thread.start()
            self._poke()

    def remove(self, waiter: Waiter) -> None:
        """Wake the waiter no more."""
        with self._lock:
            for queue in waiter.queues:
                self._waiters[queue].pop(waiter, None)
                if not self._waiters[queue]:
                    del self._waiters[queue]
        self.note_look(waiter, takes_all=True)

    def note_look(self, waiter: Waiter, *, takes_all: bool) -> None:
        """Take note that a waiter that was woken has looked, or left; wake the next one if there may be more."""
        with self._lock:
            for queue in [queue for queue, (called, _at) in self._called.items() if called is waiter]:
                del self._called[queue]
                if takes_all:
                    self._call(queue)

    def wake_all(self) -> None:
        """Have all callers look."""
        with self._lock:
            for waiters in self._waiters.values():
                for waiter in waiters:
                    waiter.wake()

    def _call(self, queue: str) -> None:
        """Wake one waiter of a queue, unless one was woken a moment ago that has not looked yet."""
        called = self._called.get(queue)
        if called is not None and time.monotonic() - called[1] < LOOK_INTERVAL:
            return
        waiters = self._waiters.get(queue)
        if waiters:
            # The next call is for another one.
            waiter = next(iter(waiters))
            waiters[waiter] = waiters.pop(waiter)
            self._called[queue] = (waiter, time.monotonic())
            waiter.wake()

    def _poke(self) -> None:
        self._poked.set()
        if self._broker is not None:
            self._broker.wake()

    def _run(self) -> None:
        """Look for all who wait, until nobody does."""
        idle_at = time.monotonic() + LINGER
        try:
            while queues := self._queues(idle_at):
                looked = time.monotonic()
                if not self._sleep(queues, self._look(queues)):
                    # Somebody began to wait, or it is time: tokens come in any case.
                    time.sleep(max(0.0, looked + LOOK_PAUSE - time.monotonic()))
                idle_at = time.monotonic() + LINGER
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._end()
            connections.close_all()

    def _queues(self, idle_at: float) -> list[str]:
        """Return the queues for which somebody waits. When nobody has until ``idle_at``, end."""
        while True:
            with self._lock:
                if self._waiters:
                    return sorted(self._waiters)
                if time.monotonic() >= idle_at:
                    self._end()
                    return []
            if self._broker is not None:
                with contextlib.suppress(BrokerUnavailable):
                    self._broker.stop_listening()
            self._poked.wait(max(0.0, idle_at - time.monotonic()))
            self._poked.clear()

    def _end(self) -> None:
        self._thread = None
        if self._broker is not None:
            self._broker.close()
            self._broker = None

    def _look(self, queues: Sequence[str]) -> float:
        """Wake a waiter of each queue in which a message is due. Return how long to sleep."""
        try:
            end_what_is_over(self.using)
            found = statements(self.using).find_candidates(dict.fromkeys(queues, BEGINNING), None)
            self._outage.end()
        except DatabaseError as error:
            if self._outage.is_news(error):
                logger.warning("Nobody is woken who waits for messages, and the look is tried again: %s", error)
            connections[self.using].close()
            return LOOK_INTERVAL
        wait = LOOK_INTERVAL
        with self._lock:
            for queue, look in found.items():
                if look.is_due and look.is_candidate:
                    self._call(queue)
                elif look.wait is not None and look.is_candidate:
                    wait = min(wait, max(0.0, look.wait))
        return wait

    def _sleep(self, queues: Sequence[str], seconds: float) -> bool:
        """Sleep until somebody begins to wait, or a token comes; return whether one did."""
        if time.monotonic() >= self._redis_at:
            self._broker = self._broker or index(self.using)
        if self._broker is not None and time.monotonic() >= self._redis_at:
            try:
                return self._broker.listen(queues, seconds)
            except BrokerUnavailable:
                # The next look comes by itself.
                self._redis_at = time.monotonic() + RETRY_REDIS
        self._poked.wait(seconds)
        self._poked.clear()
        return False


_all: dict[str, Waiting] = {}
_making = threading.Lock()


def waiting(using: str) -> Waiting:
    """Return those who wait for messages of a database alias in this process."""
    with _making:
        if using not in _all:
            _all[using] = Waiting(using)
        return _all[using]


# Set: no call of this process waits any more.
_waits_ended = threading.Event()


def end_waits() -> None:
    """Have the calls that wait look once more and return, and later ones return at once: the process ends."""
    _waits_ended.set()
    with _making:
        there = [*_all.values()]
    for each in there:
        each.wake_all()


def has_ended() -> bool:
    """Return whether no call of this process may wait any more."""
    return _waits_ended.is_set()


def _forget() -> None:
    """Begin anew in a forked process, which has none of the threads."""
    global _making, _waits_ended
    _making, _waits_ended = threading.Lock(), threading.Event()
    _all.clear()


after_fork(_forget)
