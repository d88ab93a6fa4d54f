"""A delivery: one message claimed once, as its handler receives it and as the worker knows it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, Q
from django.utils import timezone

from ...core import names
from ...core.durations import Duration, seconds
from ...core.exceptions import HandlerTimeout, LeaseLost, MessageCancelled, Superseded
from ...core.forks import after_fork
from ...core.limits import PUNCTUAL
from ...core.outcomes import Outcome, Recorded, event
from ...core.retry import RetryPolicy
from ...core.text import shown
from ...core.values import CENTURY
from ...project.answers import KEPT, REJECTED, Reject, RetryLater
from ...project.registry import Handler
from ...record import admission
from ...record.sql import statements
from ...record.sql.rows import Claimed, LeaseRenewal
from ..shared.connections import connect

logger = logging.getLogger("django_delayq")

# The forks between the first process and this one. Python counts them in each child; to ask the system for the id of
# the process would be a call to it before and after each handler.
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


after_fork(_count_fork)


# Of scheduled rows: none of these comes alone, as ``Delivery.comes_alone`` says when one has been claimed.
MAY_COME_TOGETHER = Q(attempts=0, conflicts=0, deliveries=F("reported") + F("excused"))

# Names of attributes that messages have in other libraries, and what stands for them here.
_MEANT = {
    **dict.fromkeys(("args", "body", "data", "get", "kwargs"), "message.payload"),
    "__getitem__": "message.payload[…]",
    **dict.fromkeys(("request", "task_id"), "message.id, and message.attempt, which counts from 1"),
    **dict.fromkeys(("max_retries", "retries"), "message.attempt, which counts from 1, or message.attempts_left"),
    **dict.fromkeys(("retry", "snooze"), 'raise RetryLater("60s")'),
    **dict.fromkeys(("abort", "cancel", "delete"), 'raise Reject("why"), or return'),
    **dict.fromkeys(("is_aborted", "is_cancelled", "should_abort"), "message.cancel_requested"),
    **dict.fromkeys(("ack", "complete", "save"), "return, which ends the message"),
}


@names.refuse_attributes("A delivered message", _MEANT)
class Delivery:
    """Implements ``registry.Delivered`` for the handler; everything else is for the worker.

    The thread that runs the handler owns all attributes but these: the loop's thread if the handler is a task there.
    ``_lock`` guards ``_is_closed`` and ``_is_interrupted`` against the timeout watch. The lease renewer writes
    ``leased_mono``, ``cancel_requested`` and ``lost`` too, without a lock: an interrupt could hit the handler's thread
    while that holds it. Other threads only set the two flags, and a renewal that gets lost between the two threads is
    only made again. Other threads read single attributes.
    """

    __slots__ = (
        # What the handler reads.
        *("id", "topic", "queue", "key", "priority", "payload", "headers", "due_at", "expires_at"),
        *("attempt", "deliveries", "cancel_requested"),
        # The claim, and what runs.
        *("claimed", "handler", "using", "extend_lease", "together", "thread_number", "has_own_transaction"),
        # Its moments (monotonic).
        *("claimed_mono", "leased_mono", "due_mono", "queued_mono", "started_mono", "ended_mono"),
        # What has become of it.
        *("decided", "raised", "answered", "entry_error", "is_committed", "on_end", "lost", "cancel_reason"),
        # Its timeout.
        *(
            "_deadline",
            "_forks",
            "_is_awaited",
            "_is_closed",
            "_is_interrupted",
            "_lock",
            "_scope",
            "_thread",
            "_timer",
        ),
    )

    # A test may run a handler inside of a transaction of its own.
    is_outermost = True

    def __init__(
        self,
        claimed: Claimed,
        handler: Handler,
        using: str,
        asked: float | None = None,
        due_in: float = 0.0,
        extend_lease: Callable[[Delivery, float], None] | None = None,
    ) -> None:
        """The claim was sent at ``asked`` (monotonic), ``due_in`` seconds before the message falls due.

        ``extend_lease`` has a lease end at a moment (monotonic), and waits for that for a limited time. None: the
        thread of the handler does so itself, on its own connection.
        """
        # The first fields of a claimed message, in their order.
        (
            self.id,
            self.topic,
            self.queue,
            self.key,
            self.priority,
            self.payload,
            self.headers,
            self.due_at,
            self.expires_at,
        ) = claimed[:9]
        self.attempt = claimed.attempts + 1
        self.deliveries = claimed.deliveries
        self.claimed = claimed
        self.handler = handler
        self.using = using
        self.extend_lease = extend_lease
        # Counted from the moment when the claim was sent: the lease began after that, perhaps long before the answer
        # came.
        self.claimed_mono = self.leased_mono = time.monotonic() if asked is None else asked
        self.due_mono = self.claimed_mono + due_in
        self.queued_mono = self.started_mono = self.ended_mono = 0.0
        self.lost = False
        self.cancel_requested = False
        # The outcome and the exception that it answers, once they are decided. Middleware may still fail then, and so
        # may the functions on commit of a transactional handler.
        self.decided: Outcome | None = None
        self.raised: BaseException | None = None
        # Called with the outcome when nothing can change it any more. A handler may set it.
        self.on_end: Callable[[Outcome], None] | None = None
        # In a batch: all deliveries of the call, of which the first one has the thread and the clock; and the handler's
        # answer to this message.
        self.together: Sequence[Delivery] | None = None
        self.answered: BaseException | None = None
        # Whether a transactional handler was committed.
        self.is_committed = False
        # Why the handler got no connection or no transaction, so that it does not begin.
        self.entry_error: BaseException | None = None
        # The number of the worker's thread that runs the handler; None elsewhere.
        self.thread_number: int | None = None
        # Whether the transaction of the handler began with its block, and not before, with that of a test case.
        self.has_own_transaction = False
        self._deadline: float | None = None
        self._thread = self._forks = 0
        # While an async handler runs: its loop, its task, and the timer of its next look at the deadline.
        self._scope: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Why the worker cancelled the task of the handler; empty: it did not.
        self.cancel_reason = ""
        self._is_awaited = self._is_interrupted = self._is_closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Delivery {self.deliveries} of message {self.id}, topic {self.topic}>"

    # --- for the handler ----------------------------------------------------------------------------------------------

    @property
    def attempts_left(self) -> int | None:
        """The number of attempts that the retry policy allows after this one; None when it names no number."""
        allowed = self.policy.attempts
        return None if allowed is None else max(0, allowed - self.attempt)

    @property
    def deadline(self) -> datetime | None:
        """When the timeout ends; None without a timeout."""
        if self._deadline is None:
            return None
        return timezone.now() + timedelta(seconds=self._deadline - time.monotonic())

    def raise_if_cancelled(self) -> None:
        """Raise ``MessageCancelled`` when a cancel was requested."""
        if self.cancel_requested:
            raise MessageCancelled

    def extend(self, more: Duration) -> datetime | None:
        """Move the end of timeout and lease to ``more`` from now. Raises ``LeaseLost`` when the lease is gone."""
        span = seconds(more)
        if not 0 <= span <= CENTURY:
            raise ValueError("extend needs 0 seconds to 100 years")
        # Before the wait for an answer about the lease, which might outlast the timeout.
        if self._deadline is not None:
            for one in self.together or (self,):
                one._deadline = time.monotonic() + span
            (self if self.together is None else self.together[0])._note_extended()
        self._extend_lease(max(span, self.lease))
        return self.deadline

    def _note_extended(self) -> None:
        """Have the timeout count to the new deadline."""
        if not self._is_awaited and threading.get_ident() == self._thread:
            # The handler has caught the interrupt, and goes on: its new timeout is to interrupt it again. None is on
            # its way any more: it would have been raised in this thread by now.
            self._is_interrupted = False
        scope = self._scope
        if scope is not None:
            scope[0].call_soon_threadsafe(self._watch_deadline)

    def _extend_lease(self, lease: float) -> None:
        """Extend the lease outside of the handler's own transaction, and not on its connection.

        Inside that transaction nobody would see the new lease, a rollback would take it back, and a caller that cancels
        would wait for its end.
        """
        connection = connections[self.using]
        is_within = connection.in_atomic_block or not connection.get_autocommit()
        if self.extend_lease is None or (is_within and not connection.features.has_select_for_update):
            # Without locks on rows no other connection may write while this one does.
            answer = statements(self.using).extend([LeaseRenewal(self.id, self.deliveries, lease)])
            self.lost = self.id not in answer
            until = None if is_within else time.monotonic() + lease - self.lease
            self.note_renewal(until, cancel_requested=answer.get(self.id, False))
        else:
            self.extend_lease(self, time.monotonic() + lease)
        if self.lost:
            raise LeaseLost

    async def aextend(self, more: Duration) -> datetime | None:
        """Extend as ``extend`` does, in an async handler."""
        deadline: datetime | None = await sync_to_async(self.extend, thread_sensitive=True)(more)
        return deadline

    def retry_later(self, delay: Duration, reason: str = "", *, counts: bool = True, payload: Any = KEPT) -> None:
        """Answer this message of a batch with ``RetryLater``."""
        self._answer(RetryLater(delay, reason, counts=counts, payload=payload), 'raise RetryLater("60s")')

    def reject(self, reason: str = REJECTED) -> None:
        """Answer this message of a batch with ``Reject``."""
        self._answer(Reject(reason), _MEANT["abort"])

    def fail(self, error: BaseException) -> None:
        """Answer this message of a batch with an error. Raises ``TypeError`` for what is no exception."""
        if not isinstance(error, BaseException):
            raise TypeError(f"message.fail() needs an exception, not {shown(error)}")
        self._answer(error, "raise the error")

    def _answer(self, answer: BaseException, instead: str) -> None:
        if self.handler.batch == 1:
            raise AttributeError(f"only a batch handler answers single messages: {instead}")
        self.answered = answer

    # --- for the worker -----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of the message: its own, which retries the handler's exceptions, or else the handler's."""
        stored, policy = self.claimed.retry, self.handler.retry
        if stored is not None:
            policy = RetryPolicy.from_json(stored).for_errors_of(policy)
        return policy.limited(self.claimed.max_attempts)

    @property
    def timeout(self) -> float | None:
        """The seconds after which the handler is ended: the message's own, else the handler's; None: never."""
        own = self.claimed.timeout
        return self.handler.timeout if own is None else own or None

    @property
    def lease(self) -> float:
        """The seconds for which a claim or a renewal holds the message: its own, else the handler's."""
        return self.claimed.lease or self.handler.lease

    @property
    def waits_since(self) -> float:
        """When the delivery could have begun (monotonic), had a slot been free."""
        return max(self.queued_mono, self.due_mono)

    @property
    def begins_by(self) -> float:
        """When the message expires unless it has begun (monotonic)."""
        if self.expires_at is None:
            return math.inf
        return self.claimed_mono + (self.expires_at - self.claimed.claimed_at).total_seconds()

    @property
    def is_past_rate(self) -> bool:
        """Whether the delivery waited for a slot under a rate, which counted it at its claim: others may begin now."""
        if time.monotonic() - self.waits_since - self.handler.linger <= PUNCTUAL.total_seconds():
            return False
        limits = admission.limits_of(self.topic, self.queue, self.claimed.limit_key, self.using).values()
        return any(limit.interval is not None for limit in limits)

    @property
    def crashes(self) -> int:
        """The number of earlier deliveries that crashed: they ended without reporting."""
        return self.claimed.deliveries - 1 - self.claimed.reported - self.claimed.excused

    @property
    def lateness(self) -> float:
        """The seconds from the due time to the claim, by the record's clock; if claimed ahead, to the start."""
        if self.due_mono > self.claimed_mono:
            return max(0.0, (self.started_mono or time.monotonic()) - self.due_mono)
        return max(0.0, (self.claimed.claimed_at - self.due_at).total_seconds())

    @property
    def runtime(self) -> float:
        """The seconds for which the handler ran; 0 when it has not begun."""
        return self.ended_mono - (self.started_mono or self.ended_mono)

    @property
    def outcome(self) -> str | None:
        """The outcome in one word, for middleware; None until the handler has ended."""
        return None if self.decided is None else self.fate(self.decided)

    def fate(self, outcome: Outcome) -> str:
        """Return the word for what follows an outcome: a requested cancel wins over all but a success."""
        word = event(outcome)
        return "cancelled" if self.cancel_requested and word != "consumed" else word

    @property
    def overtime(self) -> float | None:
        """The seconds since the timeout ended (negative: until it ends); None without a timeout."""
        # ``together`` is read once, for the handler may end at any moment.
        deadline, together = self._deadline, self.together
        if deadline is None or self._is_closed or (together is not None and together[0]._is_closed):
            return None
        return time.monotonic() - deadline

    def is_overtime(self, by: float = 0.0) -> bool:
        """Return whether the handler still runs, ``by`` seconds after its timeout."""
        over = self.overtime
        return over is not None and over >= by

    def note_renewal(self, leased_mono: float | None, *, cancel_requested: bool) -> None:
        """Take note of an answer about the lease, and of its renewal at ``leased_mono`` (None: not renewed).

        Answers may come in any order: no lease gets shorter, and no request is forgotten.
        """
        if cancel_requested and not self.cancel_requested:
            self.cancel_requested = True
            if self.together is None:
                self.cancel_task("cancel requested")
        if leased_mono is not None:
            self.leased_mono = max(self.leased_mono, leased_mono)

    def enter(self) -> bool:
        """Connect this thread to the database if the handler is to have a transaction there.

        Comes before anything of the project is called, and before the timeout begins. Returns False when there is no
        connection: then the handler must not begin.
        """
        if self.handler.transactional:
            try:
                connect(self.using)
            except Exception as error:  # noqa: BLE001
                self.entry_error = error
        return self.entry_error is None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Surround a transactional handler with its transaction.

        The transaction begins at once, and not with the handler's first statement: a pooler, for example, connects to
        the server only then, and what it answers is no error of the handler.
        """
        has_begun, using = False, self.using
        self.has_own_transaction = not connections[using].in_atomic_block
        try:
            with transaction.atomic(using=using, durable=self.is_outermost):
                if self.has_own_transaction:
                    statements(using).begin()
                if self.is_outermost:
                    # Called before the functions that the handler has called on commit: when one of them fails, the
                    # outcome is known.
                    transaction.on_commit(self._note_commit, using=using)
                has_begun = True
                yield
        except (DatabaseError, HandlerTimeout) as error:
            if not has_begun:
                self.entry_error = error
            raise

    def _note_commit(self) -> None:
        self.is_committed = True
        for one in self.together or (self,):
            if one.answered is None:
                one.decided = Recorded()

    def begin(self) -> None:
        """Start the clock of the handler, in this thread. Raises ``Superseded`` when it must not begin any more.

        The messages of a process that was frozen may belong to another worker by now. The check comes as late as
        possible: if the process freezes after it, the handler runs twice.
        """
        self._thread = threading.get_ident()
        self._forks = _forks
        now = time.monotonic()
        if now - self.leased_mono > self.lease:
            raise Superseded("lease ran out before it began")
        if self.expires_at is not None and now >= self.begins_by:
            raise Superseded("expired before it began")
        timeout, self.started_mono = self.timeout, now
        self._deadline = None if timeout is None else now + timeout

    @property
    def comes_alone(self) -> bool:
        """Whether a batch handler gets the message alone: it has failed, crashed or met another transaction before."""
        return self.attempt > 1 or self.claimed.conflicts > 0 or self.crashes > 0

    @staticmethod
    def join(deliveries: Sequence[Delivery]) -> None:
        """Have deliveries that have begun end together: the shortest of their timeouts is that of the call."""
        deadline = min((one._deadline for one in deliveries if one._deadline is not None), default=None)
        for one in deliveries:
            one.together, one._deadline = deliveries, deadline

    @property
    def has_clock(self) -> bool:
        """True unless the delivery is one of a batch whose first delivery has the thread and the timeout."""
        return self.together is None or self.together[0] is self

    async def await_with_timeout(self, call: Callable[[Any], Any], given: Any) -> Any:
        """Await what an async handler returns. Raises ``HandlerTimeout`` when its timeout ends first."""
        # From here on the timeout watch leaves the thread alone. Should it have decided to interrupt just before, the
        # deadline is over, and the await below ends at once as well.
        self._is_awaited = True
        task = asyncio.current_task()
        assert task is not None
        try:
            self._scope = (asyncio.get_running_loop(), task)
            self._watch_deadline()
            if self.cancel_requested and self.together is None:
                # While the delivery waited for its slot.
                self.cancel_task("cancel requested")
            return await all_of(call(given))
        except (asyncio.CancelledError, TimeoutError) as error:
            if self._is_interrupted and not self.cancel_reason:
                # The traceback shows where the handler waited.
                raise HandlerTimeout().with_traceback(error.__traceback__) from None
            raise
        finally:
            self._scope = None
            self._watch_deadline()
            self.end_fork()

    def _watch_deadline(self) -> None:
        """Have the task of the handler cancelled at its deadline as it is now. In the loop's thread.

        A handler that caught the first cancellation and had its time extended is cancelled once more.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._scope is None or self._deadline is None:
            return
        self._timer = self._scope[0].call_later(self._deadline - time.monotonic(), self._end_in_time)

    def _end_in_time(self) -> None:
        """Cancel the task at its deadline. In the loop's thread."""
        assert self._scope is not None
        assert self._deadline is not None
        if time.monotonic() < self._deadline:
            # The loop is early, or the handler is about to have its time extended.
            self._watch_deadline()
        else:
            self._is_interrupted = True
            self._scope[1].cancel()

    def cancel_task(self, reason: str) -> bool:
        """Cancel the task of an async handler, and return whether there is one. Any thread may call this."""
        scope = self._scope
        if scope is None:
            return False
        # The loop of a handler in a thread ends with the handler.
        with contextlib.suppress(RuntimeError):
            scope[0].call_soon_threadsafe(self._cancel, reason)
        return True

    def _cancel(self, reason: str) -> None:
        # In the loop's thread: the handler cannot end between this check and the cancellation. A request may come here
        # twice, and the second time would cancel how the handler cleans up.
        if self._scope is not None and self.cancel_reason != reason:
            self.cancel_reason = reason
            self._scope[1].cancel()

    def end_fork(self) -> None:
        """End this process if it is a child that the handler forked, and that came out of the handler.

        It has copies of the worker's deliveries and the sockets of its connections, and must go on with neither.
        """
        if _forks == self._forks:
            return
        error = sys.exception()
        if isinstance(error, SystemExit):
            os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
        logger.error(
            "A process that the handler of topic %s forked came out of the handler, and is ended; "
            "a forked process ends itself with os._exit()",
            self.topic,
            exc_info=error,
        )
        os._exit(0 if error is None else 1)

    def interrupt(self) -> None:
        """Raise ``HandlerTimeout`` in the handler's thread, unless the handler has just ended. Never waits for it.

        Only once, unless the handler extends its time after that: the second would hit what tells of the first.
        """
        # A lock that is held means that the handler has ended: only ``close`` takes it besides.
        if self.handler.is_async or self._is_awaited or not self.has_clock or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_closed and not self._is_interrupted:
                self._is_interrupted = True
                self._raise_timeout()
        finally:
            self._lock.release()

    def _raise_timeout(self) -> None:
        """Have CPython raise ``HandlerTimeout`` in the handler's thread, at the next call or turn of a loop there."""
        error = ctypes.py_object(HandlerTimeout)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)

    def note_error(self, error: BaseException) -> None:
        """Take note of what the handler raised. A worker keeps no error; tests do."""

    def close(self) -> None:
        """End the delivery, and its timeout, so that no interrupt hits a later message.

        Forgets errors, which refer to the frames of this thread.
        """
        try:
            self.stop_clock()
        finally:
            self.decided = self.raised = self.entry_error = self.on_end = self.together = self.answered = None

    def stop_clock(self) -> None:
        """End the timeout: no interrupt comes any more, and one that is on its way comes here, and hits nothing."""
        try:
            with self._lock:
                self._is_closed = True
            if self._is_interrupted and not self.handler.is_async:
                # Nobody can tell whether an interrupt is on its way; this one would replace it. It is not taken back,
                # for CPython would go on to look for it: calls of all threads then cost half as much again (3.12), and
                # a function under a tracer never ends (3.11).
                self._raise_timeout()
                for _look in range(100):
                    pass
        except HandlerTimeout:
            pass


async def all_of(returned: Any) -> Any:
    """Await what a call returned, and what that returns in turn, until it is no awaitable any more."""
    while inspect.isawaitable(returned):
        returned = await returned
    return returned
