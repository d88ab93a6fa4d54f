"""One worker process: its parts, wired to each other, its threads, how they start, and the order in which they stop."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ... import extensions, middleware
from ...core import actors
from ...core.callables import never, nothing
from ...core.readable import Waker, wait_readable
from ...core.worker_options import Options
from ...extensions import Service, WorkerExtensions
from ...project import process_start, registry
from ...record.sql.sessions import name_sessions
from ..claim.consumer import Consumer
from ..claim.known_limits import KnownLimits
from ..claim.queues import QueueFinder
from ..claim.tuning import Tuning
from ..claim.wanted import Wanted
from ..run.delivery import Delivery
from ..run.event_loop import EventLoop
from ..run.executor import timed_out
from ..run.handler_threads import HandlerThreads
from ..run.held import HeldByProcess
from ..run.pool import Isolation, Pool, TimeoutWatch
from ..run.recorder import Recorder
from ..run.run_tuning import RunTuning
from ..shared import connections
from ..shared.broker_switch import BrokerSwitch
from ..shared.due_services import DueServices, in_threads
from ..shared.lifetime import Budget
from ..shared.shared_state import ProcessLock, SharedState
from ..upkeep.heartbeat import Heartbeat
from ..upkeep.janitor import Janitor
from ..upkeep.leadership import Leadership
from ..upkeep.loader import Loader
from ..upkeep.mover import Mover
from ..upkeep.reaper import Reaper
from ..upkeep.sweeper import Sweeper
from ..upkeep.upkeep_tuning import USUAL

logger = logging.getLogger("django_delayq")

# The roles that a worker has by itself; extensions add theirs.
ROLES = ("loader", "sweeper", "mover", "consumer", "recorder", "reaper", "janitor")
# The exit codes of a process. UNFINISHED: it was told to end, and handlers still ran, or outcomes were left.
# STUCK: a handler did not end at its timeout, and another process takes its place. EXHAUSTED: ``--max-messages`` is
# reached, and no process takes its place. BROKEN: one of its threads has died, and another process takes its place.
FINISHED, UNFINISHED, STUCK, EXHAUSTED, BROKEN = 0, 70, 71, 72, 73


def all_roles() -> tuple[str, ...]:
    """Return the names that ``--roles`` takes."""
    return (*ROLES, *extensions.roles())


def collect_less_often(young_objects: int) -> None:
    """Have the garbage collector of this process search the messages under way, which go by themselves, less often.

    It looks for garbage after this many new objects. A project that chose more, or no collections (0), has its way.
    """
    youngest, *older = gc.get_threshold()
    if youngest and youngest < young_objects:
        gc.set_threshold(young_objects, *older)


class Parts:
    """The parts of one worker process, wired to each other and not started."""

    # The usual numbers.
    tuning = Tuning()
    upkeep = USUAL
    run_tuning = RunTuning()

    def __init__(
        self,
        options: Options,
        *,
        name: str | None = None,
        redis: bool = True,
        isolation_lock: ProcessLock | None = None,
        shared: SharedState | None = None,
        on_idle: Callable[[], None] | None = None,
        on_retired: Callable[[], None] = nothing,
        tuning: Tuning | None = None,
        run_tuning: RunTuning | None = None,
    ) -> None:
        """``name`` is the name of the worker (None: a new one). The supervisor reads ``shared``.

        With ``redis=False`` the worker delivers by query only. If there is an ``on_idle``, the consumer ends when
        nothing can begin, and calls it. ``on_retired`` is called when the process has reached a limit of its lifetime.
        ``tuning`` and ``run_tuning`` replace the usual numbers.
        """
        # A wrong path in the settings is an error now, not in each handler.
        middleware.chain()
        self.options = options
        self.name = name = name or actors.worker_name(options.name, os.getpid(), actors.new_run())
        using = options.using
        tuning = tuning or replace(self.tuning)
        limits = KnownLimits(using, name, tuning)
        self.extensions = WorkerExtensions(using, name, (limits,))
        run_tuning = run_tuning or replace(self.run_tuning)
        self.recorder = Recorder(using, self.extensions, HeldByProcess(), run_tuning)
        tasks = options.async_concurrency if any(one.runs_on_loop for one in registry.handlers().values()) else 0
        shared = shared or SharedState(options.threads, tasks, registry.largest_batch())
        self.budget = Budget(options, shared, name, on_retired)
        own = (self.recorder, name, shared, self.budget)
        threads = HandlerThreads(options.threads, *own)
        loop = EventLoop(tasks, options.threads, *own) if tasks else None
        ahead = run_tuning.claim_ahead_limited if limits.any_declared else run_tuning.claim_ahead
        self.pool = Pool(threads, loop, self.recorder, shared, ahead)
        isolation = Isolation(self.pool, name, self.budget, isolation_lock)
        wanted = Wanted(self.pool, self.budget, isolation, registry.handlers, tuning)
        self.brokers = BrokerSwitch(using, wanted.topics, redis=redis)
        self.queues = QueueFinder(using, options.queues, self.brokers.wake, tuning)
        if self.queues.named and not options.weights:
            for lane in self.pool.lanes:
                lane.keep_order(self.queues.named)
        self.consumer = Consumer(options, self.brokers, wanted, self.queues, name, limits, on_idle)
        self.reaper = Reaper(using, f"worker:{name}", self.extensions, self.recorder.sender, self.upkeep)


class WorkerProcess:
    """One worker process with its threads.

    The main thread owns the state. The thread of the timeout watch adds to ``_stuck`` and sets ``code`` before it stops
    the process; ``_stopping`` is only ever set, by that thread or a signal handler, which must take no lock.
    """

    def __init__(
        self,
        options: Options,
        isolation_lock: ProcessLock | None = None,
        shared: SharedState | None = None,
        name: str | None = None,
        wake_supervisor: Callable[[], None] = nothing,
    ) -> None:
        self.options = options
        self.code = FINISHED
        self._wake_supervisor = wake_supervisor
        # A bool, not an Event: a signal handler that sets an Event may wait forever for a lock that its own thread
        # holds.
        self._stopping = False
        self._waker = Waker()
        # The deliveries whose handlers do not end at their timeout. More may be added while the process ends.
        self._stuck: set[Delivery] = set()
        self._started = time.monotonic()
        self.parts = parts = self._assemble(isolation_lock, shared, name)
        self.name = parts.name
        self.pool = parts.pool
        self.recorder = parts.recorder
        self.consumer = parts.consumer if options.has("consumer") else None
        self.loader: Loader | None = None
        topics = registry.handlers() if self.consumer is not None else ()
        self.heartbeat = Heartbeat(
            options.using, parts.name, parts.queues, options.threads, topics, self.recorder.hangs, parts.upkeep
        )
        self.leadership = Leadership(
            parts.brokers, parts.name, parts.queues.named, registry.handlers(), self._roles(), parts.upkeep
        )
        self.runners = in_threads(self._services(), self.leadership.is_leader)

    def _assemble(self, lock: ProcessLock | None, shared: SharedState | None, name: str | None) -> Parts:
        return Parts(self.options, name=name, isolation_lock=lock, shared=shared, on_retired=self._on_retired)

    def _roles(self) -> frozenset[str]:
        return frozenset(role for role in all_roles() if self.options.has(role))

    def _services(self) -> Iterator[Service]:
        """Yield the services of the roles that this process has."""
        parts, using = self.parts, self.options.using
        roles = self._roles()
        yield from (self.leadership, parts.queues, self.heartbeat)
        if "reaper" in roles:
            yield parts.reaper
        yield from self._upkeep(roles)
        if self.consumer is not None:
            yield from self._watches()
        if parts.brokers.redis is None:
            return
        if "loader" in roles:
            parts.brokers.has_loader = True
            self.loader = Loader(using, parts.brokers, parts.name, parts.upkeep)
            yield self.loader
        if "sweeper" in roles:
            yield Sweeper(using, parts.brokers, parts.queues.search, registry.handlers, parts.upkeep)
        if "mover" in roles:
            beside = self.consumer is not None
            yield Mover(parts.brokers, parts.queues.named, beside_consumer=beside, tuning=parts.upkeep)

    def _upkeep(self, roles: frozenset[str]) -> Iterator[Service]:
        """Yield the services that look after the record: the janitor, and those of extensions."""
        if "janitor" in roles:
            yield Janitor(self.options.using, self.parts.upkeep)
        yield from self.parts.extensions.services(roles)

    def _watches(self) -> Iterator[Service]:
        """Yield the services that look after handlers."""
        yield TimeoutWatch(self.pool, self._on_stuck)
        for lane in self.pool.lanes:
            yield from lane.services

    def stop(self) -> None:
        """Have the process end in order. Safe in a signal handler."""
        self._stopping = True
        self.look()

    def look(self) -> None:
        """Have the main thread look at once whether the process is to end. Safe in a signal handler."""
        self._waker.wake()

    def _on_retired(self) -> None:
        self._wake_supervisor()
        self.look()

    @property
    def beat(self) -> float:
        """When the consumer last began a round (monotonic)."""
        return time.monotonic() if self.consumer is None else self.consumer.beat

    def run(self, watch: Callable[[], bool] = never) -> int:
        """Work until stopped, or until ``watch``, called twice a second, returns True. Return the exit code."""
        self._name_sessions()
        is_done = False
        try:
            with process_start.in_process():
                # A function with @worker_started may have left a connection dirty.
                connections.after_task()
                self._work(watch)
                is_done = True
        except BaseException:
            if not is_done:
                raise
            # The process has done its work. With another code it would be replaced, for ever with --max-messages.
            logger.exception("A function with @worker_started failed at the end of its process")
        return self.code

    def _name_sessions(self) -> None:
        name_sessions(self.name)

    def _work(self, watch: Callable[[], bool]) -> None:
        """Start the threads, watch over them until the process is to end, and shut down."""
        self.recorder.sender.start()
        self.recorder.start()
        self.pool.start()
        for runner in self.runners:
            runner.start()
        if self.consumer is not None:
            self.consumer.start()
        while not self._stopping:
            # A retired process has to end soon: it counts toward the greatest number of processes.
            wait_readable([self._waker], 0.05 if self.pool.shared.retired else 0.5)
            self._waker.forget()
            if self.parts.budget.check():
                self.parts.brokers.wake()
            if watch() or self.is_over() or self._is_broken():
                break
        self._shut_down()

    def is_over(self) -> bool:
        """Return whether ``--max-messages`` or ``--max-runtime`` is reached, or this process was replaced."""
        if self.pool.shared.replaced and not self.pool.held():
            return True
        # Claimed messages are counted, and are still delivered. The budget is read twice: a held delivery may just be
        # released.
        if self.parts.budget.empty and not self.pool.held() and self.parts.budget.empty:
            self.code = EXHAUSTED
            return True
        limit = self.options.max_runtime
        return limit is not None and time.monotonic() - self._started >= limit

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The threads that live as long as this process, but for the consumer, which may end by itself."""
        return (self.recorder, self.recorder.sender, *self.pool.members, *self.runners)

    def _is_broken(self) -> bool:
        """Return whether a thread has died: the process would look alive and do half of its work."""
        dead = [thread.name for thread in self.threads if not thread.is_alive()]
        # ``is_done`` is read last: the consumer may have ended by itself a moment ago.
        if self.consumer is not None and not self.consumer.is_alive() and not self.consumer.is_done:
            dead.append(self.consumer.name)
        if dead and not self._stopping:
            self.code = BROKEN
            logger.critical("Thread %s has died; this process ends", ", ".join(dead))
        return bool(dead)

    def _on_stuck(self, deliveries: list[Delivery]) -> None:
        """End this process: handlers do not end at their timeouts."""
        for delivery in deliveries:
            if delivery not in self._stuck:
                self._stuck.add(delivery)
                logger.error("%r does not end at its timeout; this process ends", delivery)
        self.code = STUCK
        self.stop()

    def _only_stuck_left(self) -> bool:
        """Return whether every held delivery is stuck: then there is nothing left to wait for."""
        return self._stuck.issuperset(self.pool.held())

    def _shut_down(self) -> None:
        """End all parts, in an order in which nothing is lost."""
        # First stop claiming, or the rest would never end.
        if self.consumer is not None:
            self.consumer.stop()
            self.consumer.join(timeout=5)
            if self.consumer.is_alive():
                # The consumer hangs in the database. The supervisor releases what it may still claim.
                self.code = self.code or UNFINISHED
        # Deliveries that have not begun are released; those that run may finish, and their leases are renewed
        # meanwhile.
        held = self.pool.held()
        self.pool.release_unstarted()
        if self.pool.held():
            logger.info("Worker process %s takes no more messages and waits for its handlers", self.name)
        finished = self.pool.finish(self.options.graceful_timeout, self._only_stuck_left)
        if not finished:
            self.code = self.code or UNFINISHED
            for delivery in self.pool.held():
                if delivery.is_overtime():
                    self.recorder.submit(delivery, timed_out(delivery), f"worker:{self.name}")
        # Outcomes are recorded before the threads end that could still add to them.
        for runner in self.runners:
            runner.stop()
        last = time.monotonic() + max(5.0, self.options.graceful_timeout)
        if not self.recorder.flush(last - time.monotonic()):
            logger.error("Outcomes could not be recorded before the end; their messages will be delivered again")
            self.code = self.code or UNFINISHED
        self.pool.stop()
        self.recorder.stop()
        for runner in self.runners:
            runner.join(timeout=2)
        self.recorder.join(timeout=2)
        # No thread is left that hands signals over.
        self.recorder.sender.finish(max(0.0, last - time.monotonic()))
        self.parts.extensions.stop()
        self._sign_off()
        self.parts.brokers.close()
        self._log_end(held)

    def _sign_off(self) -> None:
        """Remove what tells others that this process lives."""
        if self.loader is not None:
            self.loader.release()
        self.leadership.release()
        try:
            self.heartbeat.delete()
        except Exception as error:  # noqa: BLE001
            logger.debug("The worker's row could not be deleted; the janitor deletes it in a day: %s", error)
        connections.close_all()

    def _log_end(self, held: list[Delivery]) -> None:
        """Log what became of the deliveries that were held when the process began to end."""
        left = self.pool.held()
        logger.info(
            "Worker process %s has ended; handlers finished: %d, not ended: %d; deliveries released unstarted: %d",
            self.name,
            sum(bool(delivery.started_mono) and delivery not in left for delivery in held),
            len(left),
            sum(not delivery.started_mono and delivery not in left for delivery in held),
        )


class OnceProcess(WorkerProcess):
    """Delivers all messages that are due, and ends when none can begin: ``run_delayq --once``.

    It finds messages by query, since Redis may have lost some. Before that it does each periodic duty once.
    """

    def _assemble(self, lock: ProcessLock | None, shared: SharedState | None, name: str | None) -> Parts:
        return Parts(self.options, redis=False, on_idle=self.look)

    def _services(self) -> Iterator[Service]:
        return self._watches()

    @property
    def delivered(self) -> int:
        """The number of deliveries whose outcomes were recorded."""
        return self.recorder.delivered

    def run(self, watch: Callable[[], bool] = never) -> int:
        """Free the messages of workers that are gone, and work until nothing can begin. Return the exit code.

        Raises the error of the database when that goes away meanwhile.
        """
        reaper = self.parts.reaper
        reaper.tick()
        if reaper.is_confirming:
            wait_readable([self._waker], reaper.tuning.confirm_after)
            reaper.tick()
        code = super().run(watch)
        if self.parts.consumer.error is not None:
            raise self.parts.consumer.error
        return code

    def _work(self, watch: Callable[[], bool]) -> None:
        """Do each periodic duty once, then deliver."""
        for service in self._upkeep(self._roles()):
            services = DueServices([service])
            # A service goes on with what it has begun. One with a thread of its own may take long: it does one step.
            while not (services.run_due() or service.thread != Service.thread or self._stopping or super().is_over()):
                pass
        super()._work(watch)

    def is_over(self) -> bool:
        return self.parts.consumer.is_done or super().is_over()

    def _sign_off(self) -> None:
        connections.after_task()
