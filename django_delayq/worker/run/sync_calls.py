"""Threads for the sync code that async handlers call through ``sync_to_async``, as Django's async ORM does.

asgiref would run the thread-sensitive calls of all handlers in one thread, so that one slow query held up all of them.
Here there are several threads, each with its own database connections. All thread-sensitive calls of one delivery run
in the same thread, one after another, and a delivery ends only when they have ended. Those of functions with
``@worker_started`` and of the tasks that they start, which may go on for ever, have one more thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

from asgiref.sync import SyncToAsync, ThreadSensitiveContext

from ...core import once
from ..shared import connections
from .delivery import Delivery
from .run_tuning import RunTuning

logger = logging.getLogger("django_delayq")


Call = tuple[Future[Any], Callable[[], Any], str]


class Caller:
    """The thread of one delivery, or of the functions with ``@worker_started``, and the calls that have not ended.

    Used by the loop's thread.
    """

    __slots__ = ("__weakref__", "name", "pending", "thread")

    def __init__(self, name: str, thread: _Thread | None = None) -> None:
        self.name = name
        # The thread of a delivery is chosen with its first call.
        self.thread = thread
        self.pending: set[Future[Any]] = set()

    async def ended(self) -> None:
        """Wait until the calls of a handler that has ended, perhaps at its timeout, have ended too."""
        while calls := [call for call in self.pending if not call.done()]:
            # A call that is still queued does not begin any more.
            running = [asyncio.wrap_future(call) for call in calls if not call.cancel()]
            if running:
                await asyncio.gather(*running, return_exceptions=True)
        if self.thread is not None:
            self.thread.callers.discard(self)


_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("django_delayq_caller")


class _Thread:
    """A thread that makes calls one after another. It starts with the first one.

    The loop's thread owns ``load``: the number of calls that have not ended. It changes ``callers``, whose
    deliveries go on; this thread asks whether there are any. A task that a handler left behind may add it once more.
    """

    def __init__(self, name: str, tuning: RunTuning) -> None:
        self.load = 0
        self.callers: WeakSet[Caller] = WeakSet()
        self._name = name
        self._tuning = tuning
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def enqueue(self, call: Call) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            # Where the system refuses it, the next call tries again.
            thread.start()
            self._thread = thread
        self._queue.put(call)

    def stop(self) -> None:
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            self._make(*item)
            del item
        connections.close_all()

    def _next(self) -> Call | None:
        """Wait for the next call; close idle connections when no delivery needs them. None: the thread ends."""
        while True:
            with suppress(queue.Empty):
                return self._queue.get(timeout=self._tuning.idle_closed_after)
            # Between two calls of a delivery a cursor may be open, with the rows that an iterator has not come to.
            if not self.callers:
                connections.close_all()

    def _make(self, future: Future[Any], call: Callable[[], Any], caller: str) -> None:
        """Make a call, and set its result in ``future``."""
        if not future.set_running_or_notify_cancel():
            return
        connections.before_task()
        returned: Any = None
        error: BaseException | None = None
        try:
            returned = call()
        except BaseException as raised:  # noqa: BLE001
            error = raised
        # Before the handler goes on: other handlers use this connection too.
        if (how := connections.after_task()) and once.is_first("dirty connection", caller):
            logger.warning(
                "%s left a database connection %s when a sync call had returned; that connection is closed. Do in one "
                "call what belongs together, or make the handler transactional",
                caller,
                how,
            )
        if error is None:
            future.set_result(returned)
        else:
            future.set_exception(error)
            # It refers to this frame.
            error = None


class _OtherExecutor(ThreadPoolExecutor):
    """The loop's default executor. A call has the context of its caller, and leaves no database connection open."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(contextvars.copy_context().run, _call_and_close, fn, *args, **kwargs)


def _call_and_close(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    finally:
        connections.close_all()


class SyncCalls(Executor):
    """The threads for sync code of one event loop.

    As asgiref's executor it gives each thread-sensitive call to the thread of its delivery; the loop's thread submits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, tuning: RunTuning) -> None:
        self._loop = loop
        self._threads = [_Thread(name=f"delayq-sync-{number}", tuning=tuning) for number in range(threads)]
        # The caller of functions with ``@worker_started``.
        self._started = _Thread(name=f"delayq-sync-{threads}", tuning=tuning)
        self._other = _OtherExecutor(tuning.other_threads, thread_name_prefix="delayq-other")
        loop.set_default_executor(self._other)

    def enter(self) -> None:
        """Have the sync calls in this context, which is that of the loop, made by these threads."""
        _caller.set(Caller("A function with @worker_started", self._started))
        executors = getattr(SyncToAsync, "context_to_thread_executor", None)
        if executors is not None:
            # By this object asgiref finds the executor of a context. Only contexts may hold it, not the executor:
            # asgiref forgets the executor when this object is gone.
            context = ThreadSensitiveContext()
            executors[context] = self
            SyncToAsync.thread_sensitive_context.set(context)

    @staticmethod
    def enter_delivery(delivery: Delivery) -> Caller:
        """Have the sync calls in this context, which is that of a delivery's task, made by a thread of the delivery."""
        caller = Caller(f"The handler of topic {delivery.topic}")
        _caller.set(caller)
        return caller

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call the function; all calls of one handler go to the same thread."""
        caller = _caller.get()
        thread = caller.thread = caller.thread or min(self._threads, key=attrgetter("load"))
        future: Future[Any] = Future()
        thread.load += 1
        thread.callers.add(caller)
        caller.pending.add(future)
        future.add_done_callback(partial(self._end, thread, caller))
        thread.enqueue((future, partial(fn, *args, **kwargs), caller.name))
        return future

    def _end(self, thread: _Thread, caller: Caller, future: Future[Any]) -> None:
        """Have the loop's thread count a call as ended."""

        def end() -> None:
            thread.load -= 1
            caller.pending.discard(future)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)

    def stop(self) -> None:
        """End the threads, each after its call."""
        threads = (*self._threads, self._started)
        for thread in threads:
            thread.stop()
        self._other.shutdown(wait=False, cancel_futures=True)
        for thread in threads:
            thread.join(1.0)
