"""The pool: all deliveries that a process holds, and the lanes in which they run or wait for a place.

A lane has places in which handlers of one kind run: the handler threads are one, the event loop is another.
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

from ...core.outcomes import Outcome, Release, Retry, Unentered, storable
from ...extensions import Service
from ...project.registry import Handler
from ...record import crashes
from ..shared.lifetime import Budget
from ..shared.shared_state import ProcessLock, SharedState
from .delivery import Delivery
from .executor import outcome_of
from .recorder import Recorder

logger = logging.getLogger("django_delayq")

# How long before its due time a message is claimed at most, so that its handler begins on time. Seconds.
CLAIM_AHEAD = 0.05
# Messages that fall due within this time are claimed together. A claim for each would cost more, and with a longer time
# one process would take what several could share. Seconds.
TOGETHER = 0.005
# Messages are claimed so long before their due times at most where a claim takes something from others that are due
# already: a place under a limit, or a free thread while handlers are slow. Seconds.
NEAR = 0.01
# At most as many claims wait in this process for a place as end within this time. With fewer, handlers wait for claims.
# Seconds.
QUEUED_TIME = 0.05
# Never more than this many wait: a process ends them in a tenth of a second if handlers do nothing.
MOST_QUEUED = 1500
# A delivery whose handler the worker failed to begin is tried again after this time.
RETRY_FAILED_AFTER = timedelta(seconds=10)
# Async handlers that are cancelled because their process ends have this time to clean up. Seconds.
CANCEL_TIME = 2.0
# The time between two checks of timeouts. A check needs no query. Seconds.
TIMEOUT_CHECK_INTERVAL = 0.25
# A delivery that waits for a thread longer than this is released: the handlers before it turned out slow, and other
# processes may be idle. Seconds.
LONGEST_QUEUED = 1.0
# A handler that runs on for this long after its timeout is stuck: its process is replaced. Seconds.
STUCK_AFTER = 5.0
# A message that is to run alone waits in its process for this long at first, and twice as long the next time, up to
# some minutes: longer than most handlers run. The process takes nothing meanwhile; the supervisor soon starts another
# in its place. Seconds.
FIRST_WAIT = 5.0
# A message that has waited in vain is postponed by this much. Seconds.
POSTPONED = 30.0
# While another process of this worker runs a message alone, a further one is put off: if every process ran one alone,
# nothing else would be delivered. It comes back after a random time of up to this for each message that this process
# has put off lately, and up to this part of the time for which the other one has run; but up to POSTPONED at most. So
# one is there soon after that has ended, and neither many nor a long one keep the process busy with it. Seconds.
DETOUR = 0.2
PART_OF_RUN = 1 / 4
# The reason in the log of a message that was put off.
ALONE = "is to run alone"


class HeldDeliveries:
    """The held deliveries of a process, in the order in which they came. Each method is one operation of a dict.

    The consumer adds deliveries; a handler thread, the timeout watch or the main thread removes those that it ends; the
    timeout watch, the lease renewer and the main thread read them.
    """

    def __init__(self) -> None:
        self._deliveries: dict[Delivery, None] = {}

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Hold these deliveries."""
        self._deliveries.update(dict.fromkeys(deliveries))

    def remove(self, delivery: Delivery) -> None:
        """Hold this delivery no longer."""
        del self._deliveries[delivery]

    def all(self) -> list[Delivery]:
        """Return all held deliveries."""
        return list(self._deliveries)

    def __len__(self) -> int:
        return len(self._deliveries)


class Lane:
    """What handler threads and the event loop have in common.

    A delivery waits in ``_queue`` until a place is free, and whoever takes it out of there ends it. ``held``
    and ``_queue`` are safe from any thread. ``_is_releasing`` is written by the main thread; others only read it.
    """

    def __init__(self, places: int, recorder: Recorder, worker: str, shared: SharedState) -> None:
        self._all_places = places
        self.recorder = recorder
        self.worker = worker
        self.shared = shared
        self.held = HeldDeliveries()
        self.members: Sequence[threading.Thread] = ()
        # The services that look after the lane.
        self.services: Sequence[Service] = ()
        # Set before the threads start: called when a delivery has ended, and for each one released unstarted, which is
        # still held then.
        self.on_freed: Callable[[], None] = lambda: None
        self.on_released: Callable[[], None] = lambda: None
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._is_releasing = False
        # The mean run time of handlers (seconds), an estimate, which may miss a run. So high a mean is assumed, until
        # handlers turn out quicker, that no delivery is queued.
        self._mean = self._slow = max(1.0, 2 * places * QUEUED_TIME)

    def start(self) -> None:
        """Start the threads."""
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        raise NotImplementedError

    def put(self, delivery: Delivery) -> None:
        """Have a held delivery run as soon as a place is free."""
        self._queue.put(delivery)

    @property
    def places(self) -> int:
        """The number of deliveries that may run at once."""
        return self._all_places

    @property
    def size(self) -> int:
        """The number of deliveries that may be held: one for each place, and more when handlers are quick."""
        return self.places + min(MOST_QUEUED, int(self.places * QUEUED_TIME / max(self._mean, 1e-6)))

    @property
    def room(self) -> int:
        """The number of messages that may be claimed now."""
        return max(0, self.size - len(self.held))

    @property
    def is_quick(self) -> bool:
        """True when handlers end so soon that as many deliveries may wait for a place as have one."""
        return self.size >= 2 * self.places

    @property
    def is_worth_filling(self) -> bool:
        """True when the lane is half empty, or a place is free."""
        held, size = len(self.held), self.size
        return held < self.places or 0 < 2 * held <= size

    # --- release ------------------------------------------------------------------------------------------------------

    def release_all_queued(self) -> None:
        """Release deliveries that have not begun, at once and from now on: the places may be taken for long."""
        self._is_releasing = True
        self.release(self._queued(), Release("shutdown"))

    def release_queued(self, longest: float) -> None:
        """Release all deliveries that wait for a place, when one has waited longer than ``longest`` seconds."""
        now = time.monotonic()
        # A delivery that was claimed ahead does not wait for a place before it is due.
        if any(not d.started_mono and now - max(d.queued_mono, d.due_mono) > longest for d in self.held.all()):
            # The handlers that keep them waiting have not ended, so their run times are not known yet.
            self._mean = max(self._mean, self._slow)
            self.release(self._queued(), Release("waited too long for a thread"))

    def release(self, deliveries: Iterable[Delivery], outcome: Release) -> None:
        """Release deliveries that were taken out of their places."""
        for delivery in deliveries:
            self.recorder.submit(delivery, outcome, f"worker:{self.worker}")
            self.on_released()
            self.held.remove(delivery)

    def _queued(self) -> Iterator[Delivery]:
        """Take deliveries out of the queue until it is empty."""
        with suppress(queue.Empty):
            while (delivery := self._queue.get_nowait()) is not None:
                yield delivery

    # --- run ----------------------------------------------------------------------------------------------------------

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
        self.on_released()
        return True

    def _note_outcome(self, delivery: Delivery, outcome: Outcome, actor: str) -> None:
        now = time.monotonic()
        if delivery.started_mono:
            self._mean += (now - delivery.started_mono - self._mean) * 0.1
        if not delivery.started_mono or isinstance(outcome, Unentered):
            self.on_released()
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
        self._note_outcome(delivery, Retry(RETRY_FAILED_AFTER, text, counts=False), actor)


class ClaimAhead(threading.Thread):
    """Decides how early this process asks for messages, and holds early claims until they fall due.

    A claim is a commit, which waits for the disk: usually a millisecond, but up to a tenth of a second while the disk
    is busy. The process asks so early that slow claims end in time, too. The thread calls ``begin`` with each delivery
    when it is due, never before, so that no handler thread has to wait for it.

    Any thread may hold and release deliveries: ``_changed`` guards the heap and ``_stopping``.
    """

    def __init__(self, longest: float, begin: Callable[[Delivery], object]) -> None:
        """``longest`` (seconds) says how early a message is claimed at most. ``begin`` is called under a lock, and must
        not block."""
        super().__init__(name="delayq-due-timer", daemon=True)
        self.longest = longest
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
        return max(reach - TOGETHER, reach / 2)

    def reach(self, *, quick: bool) -> float:
        """Return how many seconds ahead messages are taken. ``quick``: handlers take no thread for long."""
        if self._leaves_to_others:
            return 0.0
        return self.longest if quick else min(self.longest, NEAR)

    # --- until the due time -------------------------------------------------------------------------------------------

    def hold(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Keep the deliveries that are not due yet until they are, and return the others."""
        due = []
        for delivery in deliveries:
            if delivery.due_mono <= delivery.queued_mono:
                due.append(delivery)
            else:
                self._add(delivery)
        return due

    def release(self) -> list[Delivery]:
        """Return the held deliveries, and hold them no longer."""
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
    """The lanes of a process, and the deliveries that run in them or wait for a place or their due time.

    The consumer submits; the lanes run; the timeout watch and the main thread release deliveries that have not begun. A
    delivery is in one place at a time (the due timer, the queue of its lane, a place), and the thread that took it out
    of there ends it. ``isolated`` is written by the thread that makes the consumer's turns; other threads only read
    it.
    """

    def __init__(self, threads: Lane, loop: Lane | None, recorder: Recorder, shared: SharedState, ahead: float) -> None:
        """``loop``: None when no handler of this process runs on the event loop. Messages are claimed by ``ahead``
        seconds early at most."""
        self.threads = threads
        self.loop = loop
        self.lanes: tuple[Lane, ...] = (threads,) if loop is None else (threads, loop)
        self.recorder = recorder
        self.shared = shared
        # The delivery that waits to run alone until no other is held.
        self.isolated: Delivery | None = None
        self.claim_ahead = ClaimAhead(ahead, lambda delivery: self.lane_of(delivery.handler).put(delivery))
        self.members = [self.claim_ahead, *(member for lane in self.lanes for member in lane.members)]

    def lane_of(self, handler: Handler) -> Lane:
        """Return the lane in which a handler runs."""
        return self.loop if self.loop is not None and handler.runs_on_loop else self.threads

    def start(self) -> None:
        """Start the threads."""
        self.claim_ahead.start()
        for lane in self.lanes:
            lane.start()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        """Hold deliveries, and have each run when it is due and its lane has a place."""
        now = time.monotonic()
        for delivery in deliveries:
            delivery.queued_mono = now
        # All deliveries are held before the first of them can end.
        if self.loop is None:
            self.threads.held.add(deliveries)
        else:
            for lane in self.lanes:
                lane.held.add([delivery for delivery in deliveries if self.lane_of(delivery.handler) is lane])
        for delivery in self.claim_ahead.hold(deliveries):
            self.lane_of(delivery.handler).put(delivery)

    def held(self) -> list[Delivery]:
        """Return the deliveries that run or wait in this process. Safe from any thread."""
        isolated = self.isolated
        running = [delivery for lane in self.lanes for delivery in lane.held.all()]
        return [*running, *([] if isolated is None else [isolated])]

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

    def release_queued(self, longest: float) -> None:
        """Release all deliveries that wait for a place, when one of their lane has waited longer than ``longest``."""
        for lane in self.lanes:
            lane.release_queued(longest)

    def wait_idle(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no delivery is held. Return False after ``timeout`` seconds, or when ``give_up`` returns True."""
        deadline = time.monotonic() + timeout
        while self.is_busy:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(0.01)
        return True

    def finish(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no delivery is held, and after ``timeout`` seconds cancel the async handlers, which are released.

        Return False when a delivery is still held then.
        """
        if self.wait_idle(timeout, give_up):
            return True
        cancelled = [delivery for delivery in self.held() if delivery.cancel_task("shutdown")]
        return bool(cancelled) and self.wait_idle(CANCEL_TIME, give_up)

    def stop(self) -> None:
        """End the threads, each after what it runs."""
        self.claim_ahead.stop()
        for lane in self.lanes:
            lane.stop()


class Isolation:
    """A message that kept crashing its worker runs alone in its process, and harms only itself.

    The right is ``lock`` (None: there is no other process). The thread that makes the consumer's turns uses this
    object; other threads see the message that waits as ``Pool.isolated``.
    """

    def __init__(self, pool: Pool, worker: str, budget: Budget, lock: ProcessLock | None) -> None:
        self.pool = pool
        self.budget = budget
        self._worker = worker
        self._actor = f"worker:{worker}"
        self._lock = lock
        # True when a message of the last claim waits here, or waited: others that are to run alone often come with it,
        # so the process takes one message at a time.
        self.had_the_last = False
        # The moment until which the message may wait (monotonic).
        self._wait_ends = 0.0
        # The messages that were put off lately, and when (monotonic).
        self._put_off: dict[int, float] = {}

    @property
    def is_waiting(self) -> bool:
        """True when a message waits here to run alone."""
        return self.pool.isolated is not None

    @property
    def seconds_left(self) -> float:
        """The seconds for which the message may still wait."""
        return max(0.0, self._wait_ends - time.monotonic())

    def is_suspect(self, delivery: Delivery) -> bool:
        """Return whether a message is to run alone."""
        return delivery.crashes >= crashes.RULES.suspect

    def admit(self, suspects: Sequence[Delivery]) -> None:
        """Let the first suspect wait here, unless another process has the right; release the others.

        A message that only waits must not be held when another one kills the process: the crash would count for both.
        """
        admitted = self.had_the_last = bool(suspects) and (self._lock is None or self._lock.acquire(wait=False))
        if admitted:
            self.pool.isolated = suspects[0]
            self.budget.count(1)
            # A process whose last message this is takes nothing else anyway, and ends after it.
            self.pool.shared.suspect_since = 0.0 if self.budget.empty else time.monotonic()
            self._wait_ends = time.monotonic() + FIRST_WAIT * 2.0 ** _times_put_off(suspects[0])
        detour = None if admitted or not suspects else self._longest_detour(suspects)
        for delivery in suspects[admitted:]:
            # Random: messages that are put off together must not come back together.
            delay = None if detour is None else timedelta(seconds=random.uniform(0, detour))
            self.pool.recorder.submit(delivery, Release(ALONE, delay), self._actor)

    def _longest_detour(self, suspects: Sequence[Delivery]) -> float:
        """Return for how long messages are put off at most. Seconds."""
        now = time.monotonic()
        self._put_off = {pk: at for pk, at in self._put_off.items() if now - at < POSTPONED}
        self._put_off |= {delivery.id: now for delivery in suspects}
        held_for = 0.0 if self._lock is None else self._lock.held_for
        return min(POSTPONED, max(DETOUR * len(self._put_off), PART_OF_RUN * held_for))

    def run(self, begin: Callable[[], None], give_up: Callable[[], bool]) -> None:
        """Run the message that waits, unless another one runs, and return when it has ended.

        ``begin`` is called first; the wait for the end stops as soon as ``give_up`` returns True.
        """
        delivery = self.pool.isolated
        if delivery is None or give_up():
            return
        if delivery.cancel_requested:
            self.release(Release(ALONE))
            return
        if self.pool.is_busy or not self.pool.recorder.flush(1.0):
            if not self.seconds_left:
                self.release(Release(ALONE, timedelta(seconds=POSTPONED)))
            return
        crashes.mark_alone(delivery.using, delivery.id, delivery.deliveries, self._worker)
        begin()
        logger.warning(
            "%r runs alone in its process, because %d deliveries before it crashed", delivery, delivery.crashes
        )
        self.pool.submit([delivery])
        self.pool.isolated = None
        self.pool.wait_idle(float("inf"), give_up)
        # An outcome that is not recorded yet would be evidence against the next message.
        self.pool.recorder.flush(1.0)
        self._return_right()

    def release(self, outcome: Release) -> None:
        """Release the message that waits here, if there is one."""
        delivery = self.pool.isolated
        if delivery is not None:
            self.pool.recorder.submit(delivery, outcome, self._actor)
            self.budget.refund()
            self.pool.isolated = None
            self._return_right()

    def _return_right(self) -> None:
        self.pool.shared.suspect_since = 0.0
        if self._lock is not None:
            self._lock.release()


def _times_put_off(delivery: Delivery) -> int:
    """Return how often a message was put off at most, up to six: other deliveries that cost no attempt count too."""
    return min(6, delivery.claimed.reported - delivery.claimed.attempts)


class TimeoutWatch(Service):
    """Checks deliveries. It uses no database: a handler must end in time also while the database does not answer."""

    name = "timeout watch"
    thread = "timeout-watch"
    longest_backoff = 1.0

    def __init__(self, pool: Pool, on_stuck: Callable[[list[Delivery]], None]) -> None:
        """``on_stuck`` is called with the deliveries that are stuck."""
        self.pool = pool
        self.on_stuck = on_stuck

    def tick(self) -> float:
        """Interrupt handlers past their timeout; return when the next timeout ends, or a quarter of a second."""
        held = self.pool.held()
        self._end_overtime(held)
        self.pool.release_queued(LONGEST_QUEUED)
        return min([TIMEOUT_CHECK_INTERVAL, *(-over for d in held if (over := d.overtime) is not None and over < 0)])

    def _end_overtime(self, held: list[Delivery]) -> None:
        overtime = [d for d in held if d.is_overtime()]
        for delivery in overtime:
            delivery.interrupt()
        stuck = [d for d in overtime if d.is_overtime(STUCK_AFTER)]
        if stuck:
            self.on_stuck(stuck)
