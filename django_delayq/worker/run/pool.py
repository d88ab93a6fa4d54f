"""The pool: all deliveries that a process holds, and the lanes in which they run or wait for a slot.

A lane has slots in which handlers of one kind run: the handler threads are one lane, the event loop is another.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ...core.callables import never
from ...core.outcomes import Outcome, Release, Retry, Unentered, storable
from ...extensions import Service
from ...project.registry import Handler
from ...record import crashes
from ..shared.lifetime import Budget
from ..shared.shared_state import ProcessLock, SharedState
from .delivery import Delivery
from .executor import outcome_of
from .lines import QueueLines
from .recorder import Recorder
from .run_tuning import RunTuning

logger = logging.getLogger("django_delayq")

# The reason in the log of a message that was put off.
ALONE = "is to run alone"


class Lane:
    """What handler threads and the event loop have in common.

    A delivery waits in ``_queue`` until a slot is free; the thread that takes it out of there ends it. ``held`` and
    ``_queue`` are safe from any thread. The main thread writes ``_is_releasing``. The threads that run handlers write
    ``_mean``, and the timeout watch raises it: it is an estimate, in which a write may get lost. They also clear
    ``on_room``, which the consumer sets: at worst it wakes needlessly. The consumer writes ``_filled``. Others only
    read.
    """

    def __init__(self, slots: int, recorder: Recorder, worker: str, shared: SharedState, budget: Budget) -> None:
        self._all_slots = slots
        self.recorder = recorder
        self.tuning = recorder.tuning
        self.worker = worker
        self.shared = shared
        self.budget = budget
        self.held = recorder.held.of_new_lane()
        self.members: Sequence[threading.Thread] = ()
        # The services that look after the lane.
        self.services: Sequence[Service] = ()
        # The consumer sets it while it waits for room in the lane. It is called once, when the lane is worth filling.
        self.on_room: Callable[[], None] | None = None
        # The size of the lane when the consumer last began to wait. The size itself follows each run, and its highest
        # values would have the consumer come early for a few messages.
        self._filled = 0
        self._queue = QueueLines()
        self._is_releasing = False
        # The mean run time of handlers (seconds). Until handlers turn out quicker, the mean is assumed to be so high
        # that no delivery is queued.
        self._mean = self._slow = max(1.0, 2 * slots * self.tuning.queued_time)

    def start(self) -> None:
        """Start the threads."""
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        raise NotImplementedError

    def keep_order(self, queues: Sequence[str]) -> None:
        """Have deliveries of these queues begin in strict order. Otherwise their queues take turns."""
        self._queue.order = queues

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Have held deliveries run as soon as slots are free."""
        self._queue.put_all(deliveries)

    @property
    def slots(self) -> int:
        """The number of deliveries that may run at once."""
        return self._all_slots

    @property
    def size(self) -> int:
        """The number of deliveries that may be held: one for each slot, and more when handlers are quick."""
        slots, tuning = self.slots, self.tuning
        return slots + min(tuning.most_queued, int(slots * tuning.queued_time / max(self._mean, 1e-6)))

    @property
    def claimable(self) -> int:
        """The number of messages that may be claimed now: for free slots, and to be queued."""
        return max(0, self.size - len(self.held))

    @property
    def is_quick(self) -> bool:
        """True when handlers end so soon that as many deliveries may wait for a slot as have one."""
        return self.size >= 2 * self.slots

    @property
    def outlasts_a_round(self) -> bool:
        """True when a full lane has work for ``queued_time``. So many quick handlers might end before a round does."""
        return self.size < self.slots + self.tuning.most_queued

    @property
    def is_worth_filling(self) -> bool:
        """True when the lane is half empty, or a slot is free."""
        held = len(self.held)
        return held < self.slots or 0 < 2 * held <= self._filled

    def await_room(self, on_room: Callable[[], None] | None) -> None:
        """Have ``on_room`` called once, when the lane is worth filling; None: not any more."""
        self._filled = self.size
        self.on_room = on_room

    # --- release ------------------------------------------------------------------------------------------------------

    def release_all_queued(self) -> None:
        """Release deliveries that have not begun, at once and from now on: the slots may be taken for long."""
        self._is_releasing = True
        self.release(self._queued(), Release("shutdown"))

    def release_queued(self) -> None:
        """Release all deliveries that wait for a slot, when one has waited too long."""
        latest = time.monotonic() - self.tuning.longest_queued
        # A delivery that was claimed ahead does not wait for a slot before it is due.
        if any(not d.started_mono and d.waits_since < latest - d.handler.linger for d in self.held.all()):
            # The handlers that keep them waiting have not ended, so their run times are not known yet.
            self._mean = max(self._mean, self._slow)
            self.release(self._queued(), Release("waited too long for a thread"))

    def release(self, deliveries: Iterable[Delivery], outcome: Release) -> None:
        """Release deliveries that have not begun, and that were taken out of the queue or the due timer."""
        for delivery in deliveries:
            self.recorder.submit(delivery, outcome, f"worker:{self.worker}")
            # Before it is no longer held: a process without budget that holds nothing ends.
            self.budget.refund()
            self.held.remove(delivery)

    def _queued(self) -> Iterator[Delivery]:
        """Take deliveries out of the queue until it is empty."""
        with suppress(queue.Empty):
            while (delivery := self._queue.get_nowait()) is not None:
                yield delivery

    # --- run ----------------------------------------------------------------------------------------------------------

    def _note_freed(self) -> None:
        """Wake the consumer if it waits for room: a delivery has ended, or the lane has more slots."""
        on_room = self.on_room
        if on_room is not None and self.is_worth_filling:
            self.on_room = None
            on_room()

    def _refuse(self, delivery: Delivery, actor: str) -> bool:
        """Release a delivery that must not begin any more, and return whether it is one.

        Receivers of ``message_delivered`` are not asked yet: they may be slow each time, and it would never begin.
        """
        if self._is_releasing:
            reason = "shutdown"
        elif delivery.lost:
            reason = "lease lost"
        elif delivery.is_past_rate:
            reason = "waited too long for its rate"
        else:
            return False
        self.recorder.submit(delivery, Release(reason), actor)
        self.budget.refund()
        return True

    def _note_outcome(self, delivery: Delivery, outcome: Outcome, actor: str, among: int = 1) -> None:
        """Hand an outcome to the recorder. ``among`` deliveries shared the run of their handler."""
        now = time.monotonic()
        if delivery.started_mono:
            self._mean += ((now - delivery.started_mono) / among - self._mean) * 0.1
        if not delivery.started_mono or isinstance(outcome, Unentered):
            self.budget.refund()
        self.recorder.submit(delivery, outcome, actor, now)

    def _note_failure(self, delivery: Delivery, error: BaseException, actor: str) -> None:
        """Have a delivery end that the worker failed to run to its end.

        When the handler has begun, its retry policy decides: asyncio closes all that a task awaits, and so also what
        turns errors into outcomes, when a future raises GeneratorExit. Before that it is no error of the handler, but,
        for example, of a receiver of a signal, which may raise anything. Then it costs no attempt.
        """
        logger.error("The worker failed to run %r", delivery, exc_info=error)
        if delivery.started_mono:
            self._note_outcome(delivery, outcome_of(delivery, error), actor)
            return
        text = storable(f"the worker failed: {type(error).__name__}")
        self._note_outcome(delivery, Retry(self.tuning.retry_failed_after, text, counts=False), actor)


class ClaimAhead(threading.Thread):
    """Decides how early this process asks for messages, and holds early claims until they fall due.

    A claim is a commit, which waits for the disk: usually a millisecond, but up to a tenth of a second while the disk
    is busy. The process asks so early that slow claims end in time, too. The thread calls ``begin`` with each delivery
    when it is due, never before, so that no handler thread has to wait for it.

    Any thread may give deliveries and release them: ``_changed`` guards the heap and ``_stopping``. The consumer's
    thread writes ``_leaves_to_others``, and reads it.
    """

    def __init__(self, longest: float, begin: Callable[[Delivery], object], tuning: RunTuning) -> None:
        """A message is claimed up to ``longest`` seconds early. ``begin`` runs under a lock: it must not block."""
        super().__init__(name="delayq-due-timer", daemon=True)
        self.longest = longest
        self.tuning = tuning
        self._leaves_to_others = False
        self._begin = begin
        # Each with its due time, its priority, the greatest first, and a number: deliveries cannot be compared.
        self._waiting: list[tuple[float, int, int, Delivery]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False

    def leave_to_others(self) -> None:
        """Claim nothing ahead in this process any more: it would take messages that only other processes can run."""
        self._leaves_to_others = True

    def lead(self, *, quick: bool) -> float:
        """Return how many seconds before the next due time the process asks. ``quick``: as in ``reach``."""
        reach = self.reach(quick=quick)
        return max(reach - self.tuning.together, reach / 2)

    def reach(self, *, quick: bool) -> float:
        """Return how many seconds ahead messages are taken. ``quick``: handlers take no thread for long."""
        if self._leaves_to_others:
            return 0.0
        return self.longest if quick else min(self.longest, self.tuning.claim_ahead_limited)

    # --- until the due time -------------------------------------------------------------------------------------------

    def keep_early(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Keep the deliveries that are not due yet until they are, and return the others."""
        due = []
        for delivery in deliveries:
            if delivery.due_mono <= delivery.queued_mono:
                due.append(delivery)
            else:
                self._add(delivery)
        return due

    def release(self) -> list[Delivery]:
        """Return the deliveries that are kept here, and keep them no longer."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        return [delivery for *_, delivery in waiting]

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Sleep until the first delivery is due or an earlier one is added."""
        with self._changed:
            while not self._stopping:
                early = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if early is None or early > 0:
                    self._changed.wait(early)
                else:
                    self._begin(heapq.heappop(self._waiting)[-1])

    def _add(self, delivery: Delivery) -> None:
        with self._changed:
            waiting = (delivery.due_mono, -delivery.priority, next(self._numbers), delivery)
            heapq.heappush(self._waiting, waiting)
            if self._waiting[0] is waiting:
                self._changed.notify()


class Pool:
    """The lanes of a process, and the deliveries that run in them or wait for a slot or their due time.

    The consumer submits; the lanes run; the timeout watch and the main thread release deliveries that have not begun. A
    delivery stands in the due timer, in the queue of its lane or in a slot, in one of them at a time; the thread that
    takes it out of there ends it. No attribute changes after the threads have started.
    """

    def __init__(self, threads: Lane, loop: Lane | None, recorder: Recorder, shared: SharedState, ahead: float) -> None:
        """``loop``: None when no handler runs on the event loop. A message is claimed up to ``ahead`` seconds early."""
        self.threads = threads
        self.loop = loop
        self.lanes: tuple[Lane, ...] = (threads,) if loop is None else (threads, loop)
        self.recorder = recorder
        self.tuning = recorder.tuning
        self.shared = shared
        # Return the deliveries that run or wait in this process. Safe from any thread.
        self.held = recorder.held.all
        self.claim_ahead = ClaimAhead(ahead, self._enqueue, self.tuning)
        self.members = [self.claim_ahead, *(member for lane in self.lanes for member in lane.members)]

    def lane_of(self, handler: Handler) -> Lane:
        """Return the lane in which a handler runs."""
        return self.loop if self.loop is not None and handler.runs_on_loop else self.threads

    def _enqueue(self, delivery: Delivery) -> None:
        self.lane_of(delivery.handler).enqueue([delivery])

    def _by_lane(self, deliveries: Sequence[Delivery]) -> dict[Lane, Sequence[Delivery]]:
        if self.loop is None:
            return {self.threads: deliveries}
        return {lane: [one for one in deliveries if self.lane_of(one.handler) is lane] for lane in self.lanes}

    def start(self) -> None:
        """Start the threads."""
        self.claim_ahead.start()
        for lane in self.lanes:
            lane.start()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        """Hold deliveries, and have each run when it is due and its lane has a free slot."""
        now = time.monotonic()
        for delivery in deliveries:
            delivery.queued_mono = now
        by_lane = self._by_lane(deliveries)
        # All deliveries are held before the first of them can end.
        for lane, some in by_lane.items():
            lane.held.add(some)
        for lane, some in by_lane.items():
            if due := self.claim_ahead.keep_early(some):
                lane.enqueue(due)

    @property
    def is_busy(self) -> bool:
        """True when a delivery is held."""
        return any(len(lane.held) > 0 for lane in self.lanes)

    def release_unstarted(self) -> None:
        """Release deliveries that have not begun, at once and from now on."""
        # First those that are not due: a delivery that falls due meanwhile is then in a queue.
        for delivery in self.claim_ahead.release():
            self.lane_of(delivery.handler).release([delivery], Release("shutdown"))
        for lane in self.lanes:
            lane.release_all_queued()

    def wait_idle(self, timeout: float, give_up: Callable[[], bool] = never) -> bool:
        """Wait until no delivery is held. Return False after ``timeout`` seconds, or when ``give_up`` returns True."""
        deadline = time.monotonic() + timeout
        while self.is_busy:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(0.01)
        return True

    def finish(self, timeout: float, give_up: Callable[[], bool] = never) -> bool:
        """Wait until no delivery is held, and after ``timeout`` seconds cancel the async handlers, which are released.

        Return False when a delivery is still held then.
        """
        if self.wait_idle(timeout, give_up):
            return True
        cancelled = [delivery for delivery in self.held() if delivery.cancel_task("shutdown")]
        return bool(cancelled) and self.wait_idle(self.tuning.cancel_time, give_up)

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        self.claim_ahead.stop()
        for lane in self.lanes:
            lane.stop()


class Isolation:
    """A message that kept crashing its worker runs isolated: alone in its process, where it harms only itself.

    One process at a time may isolate a message: the one that has ``lock`` (None: there is no other process). The
    consumer's thread owns this object; other threads see the message that waits as ``HeldByProcess.isolated``.
    """

    def __init__(self, pool: Pool, worker: str, budget: Budget, lock: ProcessLock | None) -> None:
        self.pool = pool
        self.tuning = pool.tuning
        self.held = pool.recorder.held
        self.budget = budget
        self._worker = worker
        self._actor = f"worker:{worker}"
        self._lock = lock
        # True when a message of the last claim was admitted here: other suspects often come with it, so the process
        # then takes one message at a time.
        self.had_the_last = False
        # The moment until which the message may wait (monotonic).
        self._wait_ends = 0.0
        # The messages that were put off lately, and when (monotonic).
        self._put_off: dict[int, float] = {}

    @property
    def is_waiting(self) -> bool:
        """True when a message waits here to be isolated."""
        return self.held.isolated is not None

    @property
    def seconds_left(self) -> float:
        """The seconds for which the message may still wait."""
        return max(0.0, self._wait_ends - time.monotonic())

    def is_suspect(self, delivery: Delivery) -> bool:
        """Return whether a message is to be isolated."""
        return delivery.crashes >= crashes.RULES.suspect

    def admit(self, suspects: Sequence[Delivery]) -> None:
        """Let the first suspect wait here, unless another process isolates a message; release the others.

        A message that only waits must not be held when another one kills the process: the crash would count for both.
        """
        admitted = self.had_the_last = bool(suspects) and (self._lock is None or self._lock.acquire(wait=False))
        if admitted:
            self.held.isolated = suspects[0]
            self.budget.count(1)
            # If this is the last message of the process, that takes nothing else anyway, and ends after it.
            self.pool.shared.suspect_since = 0.0 if self.budget.empty else time.monotonic()
            self._wait_ends = time.monotonic() + self.tuning.isolation_wait * 2.0 ** _times_put_off(suspects[0])
        detour = None if admitted or not suspects else self._longest_detour(suspects)
        for delivery in suspects[admitted:]:
            # Random: messages that are put off together must not come back together.
            delay = None if detour is None else timedelta(seconds=random.uniform(0, detour))
            self.pool.recorder.submit(delivery, Release(ALONE, delay), self._actor)

    def _longest_detour(self, suspects: Sequence[Delivery]) -> float:
        """Return the longest time for which messages are put off. Seconds."""
        now = time.monotonic()
        self._put_off = {pk: at for pk, at in self._put_off.items() if now - at < self.tuning.postponed}
        self._put_off |= {delivery.id: now for delivery in suspects}
        held_for, tuning = 0.0 if self._lock is None else self._lock.held_for, self.tuning
        return min(tuning.postponed, max(tuning.detour * len(self._put_off), tuning.detour_part * held_for))

    def run(self, give_up: Callable[[], bool], begin: Callable[..., None], *given: Any) -> None:
        """Run the message that waits, unless another one runs, and return when it has ended.

        ``begin`` is called with what is ``given`` before it begins; the wait for its end stops as soon as ``give_up``
        returns True.
        """
        delivery = self.held.isolated
        if delivery is None or give_up():
            return
        if delivery.cancel_requested:
            self.release(Release(ALONE))
            return
        if self.pool.is_busy or not self.pool.recorder.flush(1.0):
            if not self.seconds_left:
                self.release(Release(ALONE, timedelta(seconds=self.tuning.postponed)))
            return
        crashes.mark_alone(delivery.using, delivery.id, delivery.deliveries, self._worker)
        begin(*given)
        logger.warning(
            "%r runs alone in its process, because %d deliveries before it crashed", delivery, delivery.crashes
        )
        self.pool.submit([delivery])
        self.held.isolated = None
        self.pool.wait_idle(float("inf"), give_up)
        # An outcome that is not recorded yet would be evidence against the next message.
        self.pool.recorder.flush(1.0)
        self._return_right()

    def release(self, outcome: Release) -> None:
        """Release the message that waits here, if there is one."""
        delivery = self.held.isolated
        if delivery is not None:
            self.pool.recorder.submit(delivery, outcome, self._actor)
            self.budget.refund()
            self.held.isolated = None
            self._return_right()

    def _return_right(self) -> None:
        self.pool.shared.suspect_since = 0.0
        if self._lock is not None:
            self._lock.release()


def _times_put_off(delivery: Delivery) -> int:
    """Return how often a message was put off, six at most. Other deliveries that cost no attempt count too."""
    return min(6, delivery.claimed.reported - delivery.claimed.attempts)


class TimeoutWatch(Service):
    """Checks deliveries. It uses no database: a handler must end in time also while the database does not answer."""

    name = "timeout watch"
    thread = "timeout-watch"
    longest_backoff = 1.0

    def __init__(self, pool: Pool, on_stuck: Callable[[list[Delivery]], None]) -> None:
        """``on_stuck`` is called with the deliveries that are stuck."""
        self.pool = pool
        self.tuning = pool.tuning
        self.on_stuck = on_stuck

    def tick(self) -> float:
        """Interrupt handlers past their timeout; return when the next timeout ends, or a quarter of a second."""
        held = self.pool.held()
        self._end_overtime(held)
        for lane in self.pool.lanes:
            lane.release_queued()
        left = (-over for d in held if (over := d.overtime) is not None and over < 0)
        return min([self.tuning.check_interval, *left])

    def _end_overtime(self, held: list[Delivery]) -> None:
        """Interrupt handlers past their timeouts, and report those that do not end."""
        overtime = [d for d in held if d.is_overtime()]
        for delivery in overtime:
            delivery.interrupt()
        stuck = [d for d in overtime if d.is_overtime(self.tuning.stuck_after)]
        if stuck:
            self.on_stuck(stuck)
