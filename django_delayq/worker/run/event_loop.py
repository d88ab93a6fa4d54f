"""The event loop of a process: async handlers run on it as tasks, hundreds at a time, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from sys import _current_frames
from typing import Any

from asgiref.sync import sync_to_async

from ... import signals
from ...core import actors
from ...extensions import Service
from ...project import process_start
from ..shared.lifetime import Budget
from ..shared.shared_state import SharedState
from .delivery import Delivery
from .executor import execute_on_loop
from .pool import Lane
from .recorder import Recorder
from .reporting import report_delivered
from .sync_calls import SyncCalls

logger = logging.getLogger("django_delayq")


class EventLoop(Lane):
    """Runs async handlers on one event loop, in a thread of its own: at most ``concurrency`` at once.

    The loop's thread owns ``_tasks``, ``_taken_on``, ``_pace_at`` and ``_context``; the watch reads ``_tasks``, and the
    consumer the next two. ``_is_woken`` is set by the thread that queues a delivery, and cleared by the loop's thread
    before that takes from the queue. The main thread writes ``_loop``, ``_sync_calls`` and ``_stopping``.
    """

    def __init__(
        self,
        concurrency: int,
        sync_threads: int,
        recorder: Recorder,
        worker: str,
        shared: SharedState,
        budget: Budget,
    ) -> None:
        """``sync_threads`` threads make the sync calls of handlers."""
        super().__init__(concurrency, recorder, worker, shared, budget)
        self._sync_threads = sync_threads
        self._actor = f"worker:{worker}/async"
        self._tasks: dict[asyncio.Task[Any], tuple[Delivery, int]] = {}
        self._is_woken = False
        # The number of handlers that may run at once, and the next appointment (monotonic); None while nothing runs.
        self._taken_on = min(self.tuning.first_tasks, concurrency)
        self._pace_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync_calls: SyncCalls | None = None
        self._stopping = False
        # Done when the loop may run handlers, or with the error of a function of the project.
        self._begun: Future[None] = Future()
        self._context = contextvars.Context()
        self.thread = threading.Thread(target=self._serve, name="delayq-event-loop", daemon=True)
        self.members = [self.thread]
        self.services = [LoopWatch(self)]

    def start(self) -> None:
        """Make the event loop, and start its thread. Raises what a function with ``@worker_started`` raises there."""
        loop = _new_event_loop()
        self._sync_calls = SyncCalls(loop, self._sync_threads, self.tuning)
        self._is_woken = True
        self._loop = loop
        super().start()
        self._begun.result()

    def stop(self) -> None:
        """End the loop. Tasks that still run are left where they are: their process ends."""
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
        if self._loop is not None and self.thread.ident is None:
            # The system has refused the thread.
            self._loop.close()
        elif not self._tasks and self.thread.is_alive():
            self.thread.join(most := self.tuning.loop_end_time)
            if self.thread.is_alive():
                logger.warning("An async function with @worker_started does not end in %g s, and is left", most)

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Have held deliveries begin on the loop as soon as there are free slots."""
        super().enqueue(deliveries)
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._begin_queued)

    @property
    def slots(self) -> int:
        """The number of handlers that may run at once: as many as the loop can serve by what it has shown."""
        return min(self._all_slots, self._taken_on)

    @property
    def claimable(self) -> int:
        """The number of messages that may be claimed now: none while the loop is blocked."""
        due = self._pace_at
        is_blocked = due is not None and time.monotonic() - due > self.tuning.blocked_after
        return 0 if is_blocked else super().claimable

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _keep_pace(self) -> None:
        """Ask the loop for a call a moment later (the next appointment), and see how late the call comes."""
        assert self._loop is not None
        assert self._pace_at is not None
        late = time.monotonic() - self._pace_at
        before = self.slots
        if late > self.tuning.pace_interval:
            self._taken_on = min(self._all_slots, max(before // 2, self.tuning.first_tasks))
        elif self._tasks:
            # A loop without handlers is on time, too, and shows nothing by it.
            self._taken_on = min(self._all_slots, 2 * before)
        self._pace_at = time.monotonic() + self.tuning.pace_interval if self._tasks else None
        if self._pace_at is not None:
            self._loop.call_later(self.tuning.pace_interval, self._keep_pace)
        if self._taken_on > before:
            self._begin_queued()
            self._note_freed()

    def _serve(self) -> None:
        """Run the loop from the functions with ``@worker_started`` until the end of the process. This is its thread."""
        assert self._loop is not None
        assert self._sync_calls is not None
        with actors.acting_as(self._actor):
            self._sync_calls.enter()
            self._context = contextvars.copy_context()
            asyncio.set_event_loop(self._loop)
            around = process_start.on_loop()
            try:
                self._complete(around.__aenter__())
            except BaseException as error:  # noqa: BLE001
                self._sync_calls.stop()
                self._loop.close()
                self._begun.set_exception(error)
                return
            self._begun.set_result(None)
            self._loop.call_soon(self._begin_queued)
            while not self._stopping:
                try:
                    self._loop.run_forever()
                except BaseException:
                    # asyncio lets SystemExit and KeyboardInterrupt of a task that a handler started through.
                    logger.exception("A task that a handler started tried to end the worker; the worker goes on")
            if not self._tasks:
                try:
                    self._complete(around.__aexit__(None, None, None))
                except BaseException:
                    logger.exception("An async function with @worker_started failed at the end of its process")
        self._sync_calls.stop()
        if not self._tasks:
            self._loop.close()

    def _complete(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end while no handler runs. Handlers begin with what it sets in context variables."""
        assert self._loop is not None
        self._loop.run_until_complete(self._loop.create_task(work, context=self._context))

    def _begin_queued(self) -> None:
        """Begin queued deliveries while there are free slots."""
        self._is_woken = False
        while len(self._tasks) < self.slots:
            try:
                delivery = self._queue.get_nowait()
            except queue.Empty:
                return
            if delivery is not None:
                self._begin(delivery)

    def _begin(self, delivery: Delivery) -> None:
        """Begin a delivery as a task, unless it must not begin any more."""
        if self._refuse(delivery, self._actor):
            self.held.remove(delivery)
            self._note_freed()
            return
        assert self._loop is not None
        # Whatever follows may kill the process.
        entry = self.shared.note_task(delivery.id)
        # Whatever a handler sets in its context ends with it.
        task = self._loop.create_task(self._run(delivery), context=self._context.copy())
        self._tasks[task] = delivery, entry
        if self._pace_at is None:
            self._pace_at = time.monotonic() + self.tuning.pace_interval
            self._loop.call_later(self.tuning.pace_interval, self._keep_pace)
        task.add_done_callback(self._end)

    async def _run(self, delivery: Delivery) -> None:
        """Run the handler of a delivery, and hand its outcome to the recorder. This is the task."""
        assert self._sync_calls is not None
        try:
            caller = self._sync_calls.enter_delivery(delivery)
            if signals.message_delivered.receivers:
                # A receiver is sync, and may use the database.
                await sync_to_async(report_delivered)(delivery)
            else:
                report_delivered(delivery)
            self._note_outcome(delivery, await execute_on_loop(delivery, caller.ended), self._actor)
        except BaseException as error:  # noqa: BLE001
            self._note_failure(delivery, error, self._actor)

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Free the slot of a task that has ended, and begin the next deliveries."""
        delivery, entry = self._tasks.pop(task)
        if task.cancelled():
            # Before its first step, by a handler that cancels tasks which are not its own: none of its code ran.
            self._note_failure(delivery, asyncio.CancelledError(), self._actor)
        self.shared.free(entry)
        self.held.remove(delivery)
        self._begin_queued()
        self._note_freed()

    # --- for the watch ------------------------------------------------------------------------------------------------

    def ask(self, answer: threading.Event) -> None:
        """Have the loop set ``answer`` as soon as it can."""
        if self._loop is not None and not self._stopping:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(answer.set)

    @property
    def step(self) -> asyncio.Task[Any] | None:
        """The task that the loop runs at this moment."""
        return None if self._loop is None else asyncio.current_task(self._loop)

    def topic_of(self, task: asyncio.Task[Any]) -> str | None:
        """Return the topic of a handler's task; None for a task that a handler started."""
        found = self._tasks.get(task)
        return None if found is None else found[0].topic

    @property
    def stack(self) -> str:
        """The last five lines of the code that the loop's thread runs at this moment."""
        frame = _current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-5:])


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: that of uvloop if it is installed."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop  # type: ignore[import-not-found, unused-ignore]

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopWatch(Service):
    """Notices that a handler blocks the event loop with sync code, which holds up all others, and logs which one."""

    name = "event loop watch"
    thread = "timeout-watch"
    longest_backoff = 1.0

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.tuning = loop.tuning
        self._answer = threading.Event()
        self._answer.set()
        # When the loop was asked, and, since it did not answer, in which task it is and since when (monotonic).
        self._asked = 0.0
        self._step: asyncio.Task[Any] | None = None
        self._topic = ""
        self._say_at = 0.0
        self._pause = self.tuning.say_again_after

    def tick(self) -> float:
        """Ask the loop for a sign of life, and log which handler keeps it from one."""
        now = time.monotonic()
        if self._answer.is_set():
            if self._topic:
                logger.warning("The event loop goes on, which the handler of %s had blocked", self._topic)
            self._step, self._topic, self._asked = None, "", now
            if self.loop.held:
                self._answer = threading.Event()
                self.loop.ask(self._answer)
            return self.tuning.check_interval
        step = self.loop.step
        if step is None or step is not self._step:
            # Busy with many tasks, perhaps.
            self._step, self._topic, self._pause = step, "", self.tuning.say_again_after
            self._say_at = now + self.tuning.blocked_after
        elif now >= self._say_at:
            topic = self.loop.topic_of(step)
            self._topic = "a task that a handler started" if topic is None else f"topic {topic}"
            logger.error(
                "The handler of %s has blocked the event loop for %.1f s, and so all async handlers of this process: "
                "await instead, or call sync code through sync_to_async. It is here:\n%s",
                self._topic,
                now - self._asked,
                self.loop.stack,
            )
            self._say_at, self._pause = now + self._pause, 2 * self._pause
        return self.tuning.blocked_after
