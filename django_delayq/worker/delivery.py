"""One message claimed once: what its handler receives, and what the worker knows of it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from .. import transitions
from ..durations import Duration, seconds
from ..exceptions import HandlerTimeout, LeaseLost, Superseded
from ..registry import Handler
from ..sql.rows import Claimed, LeaseRenewal


class Delivery:
    """Implements ``registry.Delivered``. Everything else is for the worker."""

    __slots__ = (
        "_answering",
        "_closed",
        "_deadline",
        "_interrupted",
        "_scope",
        "_thread",
        "attempt",
        "claimed",
        "claimed_mono",
        "deliveries",
        "due",
        "due_mono",
        "handler",
        "headers",
        "id",
        "key",
        "leased_mono",
        "lost",
        "payload",
        "priority",
        "queue",
        "queued_mono",
        "requested",
        "started_mono",
        "topic",
        "using",
    )

    def __init__(
        self, claimed: Claimed, handler: Handler, using: str, asked: float | None = None, until: float = 0.0
    ) -> None:
        """``asked``: when the claim was (monotonic); ``until``: so many seconds later it falls due."""
        self.id = claimed.id
        self.topic = claimed.topic
        self.queue = claimed.queue
        self.key = claimed.key
        self.priority = claimed.priority
        self.payload = claimed.payload
        self.headers = claimed.headers
        self.due = claimed.due_at
        self.attempt = claimed.attempts + 1
        self.deliveries = claimed.deliveries
        self.claimed = claimed
        self.handler = handler
        self.using = using
        # The lease runs from some moment after the claim was asked for: the answer may have taken longer than that.
        self.claimed_mono = self.leased_mono = time.monotonic() if asked is None else asked
        self.due_mono = self.claimed_mono + until
        self.queued_mono = self.started_mono = 0.0
        self.lost = False
        self.requested = False
        self._deadline: float | None = None
        self._thread = 0
        self._scope: tuple[asyncio.AbstractEventLoop, asyncio.Timeout] | None = None
        self._interrupted = self._closed = False
        self._answering = threading.Lock()

    def __repr__(self) -> str:
        return f"<Delivery {self.deliveries} of message {self.id}, topic {self.topic}>"

    # --- for the handler ----------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> datetime | None:
        if self._deadline is None:
            return None
        return timezone.now() + timedelta(seconds=self._deadline - time.monotonic())

    @property
    def cancel_requested(self) -> bool:
        return self.requested

    def extend(self, more: Duration) -> datetime | None:
        span = seconds(more)
        if span < 0:
            raise ValueError("extend needs 0 seconds or more")
        lease = max(span, self.handler.lease)
        answer = self._extend([LeaseRenewal(self.id, self.deliveries, lease)])
        if self.id not in answer:
            self.lost = True
            raise LeaseLost
        self.requested = answer[self.id]
        self.leased_mono = time.monotonic() + lease - self.handler.lease
        if self._deadline is not None:
            self._deadline = time.monotonic() + span
            if self._scope is not None:
                loop, scope = self._scope
                loop.call_soon_threadsafe(scope.reschedule, loop.time() + span)
        return self.deadline

    def _extend(self, holdings: list[LeaseRenewal]) -> dict[int, bool]:
        """Not in the handler's own transaction: nobody would see it, and who cancels would wait for its end."""
        connection = connections[self.using]
        if not (connection.in_atomic_block and connection.features.has_select_for_update):
            return transitions.extend(self.using, holdings)

        def apart() -> dict[int, bool]:
            try:
                return transitions.extend(self.using, holdings)
            finally:
                connections[self.using].close()

        with ThreadPoolExecutor(1, thread_name_prefix="delayq-extend") as pool:
            return pool.submit(apart).result()

    async def aextend(self, more: Duration) -> datetime | None:
        """``extend`` for async handlers."""
        deadline: datetime | None = await sync_to_async(self.extend, thread_sensitive=True)(more)
        return deadline

    # --- for the worker -----------------------------------------------------------------------------------------------

    @property
    def crashes(self) -> int:
        """Earlier deliveries that ended without a word."""
        return self.claimed.deliveries - 1 - self.claimed.reported - self.claimed.excused

    @property
    def lateness(self) -> float:
        """Seconds from due to claim, both by the record's clock; from due to begun for what was claimed early."""
        if self.due_mono > self.claimed_mono:
            return max(0.0, (self.started_mono or time.monotonic()) - self.due_mono)
        return max(0.0, (self.claimed.claimed_at - self.due).total_seconds())

    @property
    def overtime(self) -> float | None:
        """Seconds past the timeout (negative: until it); None when there is none, or it has not begun or has ended."""
        if self._deadline is None or self._closed:
            return None
        return time.monotonic() - self._deadline

    def is_late(self, by: float = 0.0) -> bool:
        """Whether it runs on, so many seconds after its timeout."""
        over = self.overtime
        return over is not None and over >= by

    def begin(self) -> None:
        """The handler starts, in this thread. Raises ``Superseded`` when the lease has run out meanwhile.

        A process that was frozen holds what is somebody else's by now, or will be in a moment. Asked as late as can be:
        one that freezes after this line runs a handler twice.
        """
        self._thread = threading.get_ident()
        self.started_mono = time.monotonic()
        if self.started_mono - self.leased_mono > self.handler.lease:
            raise Superseded("lease ran out before it began")
        timeout = self.handler.timeout
        self._deadline = None if timeout is None else self.started_mono + timeout

    async def within(self, call: Callable[[Any], Any]) -> Any:
        """Await an async handler under its timeout."""
        if self._deadline is None:
            return await call(self)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()) as scope:
                self._scope = (loop, scope)
                return await call(self)
        except TimeoutError:
            if scope.expired():
                raise HandlerTimeout from None
            raise
        finally:
            self._scope = None

    def interrupt(self) -> None:
        """Raise HandlerTimeout in the handler's thread, unless it has just ended."""
        with self._answering:
            if self._closed or self._interrupted or self.handler.is_async:
                return
            self._interrupted = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(HandlerTimeout))

    def arrived(self) -> None:
        """The interrupt has been raised: none is on its way any more."""
        self._interrupted = False

    def close(self) -> None:
        """The handler has ended. Takes in an interrupt that is on its way, so that it hits no later message."""
        try:
            with self._answering:
                self._closed = True
            until = time.monotonic() + 1.0
            while self._interrupted and time.monotonic() < until:
                time.sleep(0.001)
        except HandlerTimeout:
            pass
