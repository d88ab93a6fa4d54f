"""Waits for messages of pulled queues: one thread looks for all waiting callers of a process, and wakes one of them.

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
    """A call that may wait for a message of one of its queues, in a thread or in a coroutine. It looks by itself."""

    def __init__(self, using: str, queues: Sequence[str], seconds: float) -> None:
        self.using, self.queues = using, queues
        self._until = time.monotonic() + seconds
        self._woken: Future[None] = Future()
        # A caller was woken and has not looked yet: nobody else is woken before this time (monotonic).
        self.looks_by = 0.0
        self._joined: Waiting | None = None
        # True where the call was made in a transaction: no other connection sees what that has written.
        self.is_in_transaction = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._joined is not None:
            self._joined.remove(self)

    @property
    def left(self) -> float:
        """The seconds for which the call may still wait."""
        return 0.0 if _waits_ended.is_set() else self._until - time.monotonic()

    def wake(self) -> None:
        """Have the caller look."""
        self.looks_by = time.monotonic() + LOOK_INTERVAL
        # The caller may have been woken already, or have stopped waiting.
        with contextlib.suppress(InvalidStateError):
            self._woken.set_result(None)

    def sleep(self) -> None:
        """Wait in a thread until the caller is woken."""
        with contextlib.suppress(TimeoutError):
            self._woken.result(self._longest_sleep())
        self._woken = Future()

    async def asleep(self) -> None:
        """Wait in a coroutine until the caller is woken."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._woken), self._longest_sleep())
        self._woken = Future()

    def _longest_sleep(self) -> float:
        if self.is_in_transaction:
            return min(LOOK_INTERVAL, self.left)
        if self._joined is None:
            self._joined = _all.setdefault(self.using, Waiting(self.using))
            self._joined.add(self)
        return self.left

    def note_look(self, *, took_all: bool) -> None:
        """Take note that the caller has looked, and whether it took all it wanted: then there may be more."""
        self.looks_by = 0.0
        if took_all and self._joined is not None:
            self._joined.call(self.queues)


class Waiting:
    """Those who wait for messages of one database, and the thread that looks for them. Any thread may call it.

    ``_lock`` guards everything but the broker, which is the thread's own except for ``wake``.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._lock = threading.Lock()
        # By queue: the waiters, in the order in which they came; and the one that was woken last.
        self._waiters: defaultdict[str, dict[Waiter, None]] = defaultdict(dict)
        self._called: dict[str, Waiter] = {}
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
                thread = threading.Thread(target=self._run, name="delayq-pull", daemon=True)
                # Where the system refuses it, the next caller tries again.
                thread.start()
                self._thread = thread
            self._poked.set()
            if self._broker is not None:
                self._broker.wake()

    def remove(self, waiter: Waiter) -> None:
        """Wake the waiter no more. If it was woken and has not looked, the next one is woken instead."""
        with self._lock:
            for queue in waiter.queues:
                self._waiters[queue].pop(waiter, None)
                if not self._waiters[queue]:
                    del self._waiters[queue]
                    self._called.pop(queue, None)
        if waiter.looks_by:
            waiter.note_look(took_all=True)

    def call(self, queues: Sequence[str]) -> None:
        """Wake one waiter of each queue, unless one was woken a moment ago that has not looked yet."""
        with self._lock:
            for queue in queues:
                waiters, called = self._waiters.get(queue), self._called.get(queue)
                if waiters and (called is None or called.looks_by < time.monotonic()):
                    # The next call wakes another waiter.
                    waiter = self._called[queue] = next(iter(waiters))
                    waiters[waiter] = waiters.pop(waiter)
                    waiter.wake()

    def wake_all(self) -> None:
        """Have all callers look."""
        with self._lock:
            for waiters in self._waiters.values():
                for waiter in waiters:
                    waiter.wake()

    def _run(self) -> None:
        """Look for all who wait, until nobody does."""
        try:
            while queues := self._queues():
                looked = time.monotonic()
                if not self._sleep(queues, self._look(queues)):
                    # Somebody began to wait, or it is time for a look: further tokens come in any case.
                    time.sleep(max(0.0, looked + LOOK_PAUSE - time.monotonic()))
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._end()
            connections.close_all()

    def _end(self) -> None:
        self._thread = None
        if self._broker is not None:
            self._broker.close()
            self._broker = None

    def _queues(self) -> list[str]:
        """Return the queues for which somebody waits; none when nobody does for a while: then the thread ends."""
        self._poked.clear()
        if not self._waiters:
            with contextlib.suppress(BrokerUnavailable):
                if self._broker is not None:
                    self._broker.stop_listening()
            self._poked.wait(LINGER)
        with self._lock:
            if not self._waiters:
                self._end()
            return sorted(self._waiters)

    def _look(self, queues: Sequence[str]) -> float:
        """Wake a waiter of each queue in which a message is due. Return how long to sleep."""
        try:
            end_what_is_over(self.using)
            found = statements(self.using).find_candidates(dict.fromkeys(queues, BEGINNING), None)
            self._outage.end()
        except DatabaseError as error:
            if self._outage.is_news(error):
                logger.warning("No waiting caller is woken now; the look for messages is tried again: %s", error)
            connections[self.using].close()
            return LOOK_INTERVAL
        looks = {queue: look for queue, look in found.items() if look.is_candidate}
        self.call([queue for queue, look in looks.items() if look.is_due])
        waits = [look.wait for look in looks.values() if not look.is_due and look.wait is not None]
        return max(0.0, min([LOOK_INTERVAL, *waits]))

    def _sleep(self, queues: Sequence[str], seconds: float) -> bool:
        """Sleep until somebody begins to wait, or a token comes; return whether one did."""
        if time.monotonic() >= self._redis_at:
            self._broker = self._broker or index(self.using)
            try:
                if self._broker is not None and not self._poked.is_set():
                    return self._broker.listen(queues, seconds)
            except BrokerUnavailable:
                # The next look comes without a token, too.
                self._redis_at = time.monotonic() + RETRY_REDIS
        self._poked.wait(seconds)
        return False


_all: dict[str, Waiting] = {}
# A forked process has none of the threads.
after_fork(_all.clear)

# True: no call of this process waits any more.
_waits_ended = threading.Event()


def end_waits() -> None:
    """Have the calls that wait look once more and return, and later ones return at once: the process ends."""
    _waits_ended.set()
    for each in [*_all.values()]:
        each.wake_all()
