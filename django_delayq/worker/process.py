"""One worker process: its services and threads, how they start, and the order in which they stop."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from .. import actors, conf, registry
from . import connections
from .budget import Budget
from .consumer import Consumer
from .delivery import Delivery
from .executor import timed_out
from .janitor import Janitor
from .keeper import HARD, Keeper, Watch
from .loader import Loader
from .mover import Mover
from .operator import Operator
from .pool import Pool
from .presence import Presence
from .processlock import ProcessLock
from .queues import Queues
from .reaper import Reaper
from .recorder import Recorder
from .rollup import Counts, RollupWriter
from .service import Runner, Service
from .source import Source
from .sweeper import Sweeper

logger = logging.getLogger("django_delayq")

ROLES = ("loader", "sweeper", "mover", "consumer", "recorder", "reaper", "janitor", "operator")

# What a process says with its exit code.
DONE = 0
UNFINISHED = 70  # it was told to end, and handlers were still running
STUCK = 71  # a handler did not let go; start another process in its place
EXHAUSTED = 72  # --max-messages is reached
BROKEN = 73  # one of its threads has died; start another process in its place


@dataclass(frozen=True, slots=True)
class Options:
    """What run_delayq was asked for."""

    using: str
    queues: tuple[str, ...] = ()
    processes: int = 1
    threads: int = 8
    roles: frozenset[str] = frozenset(ROLES)
    max_messages: int | None = None
    max_runtime: float | None = None
    graceful_timeout: float = 30.0
    name: str = ""
    heartbeat_file: str | None = None


def worker_name(options: Options) -> str:
    """Unique for this run of this process: a host that reuses a pid must not inherit its claims."""
    base = options.name or actors.host()
    return f"{base}/{os.getpid()}/{secrets.token_hex(3)}"


class WorkerProcess:
    """Everything that runs in one process."""

    def __init__(
        self, options: Options, budget: Budget, solo: ProcessLock | None = None, *, hard: float = HARD
    ) -> None:
        self.options = options
        self.name = worker_name(options)
        self.code = DONE
        self._budget = budget
        # Not an Event: a signal handler that sets one may wait for ever for the lock that its own thread holds.
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        # What does not let go; more may join it while the process ends.
        self._stuck: set[tuple[int, int]] = set()
        self._started = time.monotonic()
        settings = conf.get()
        using, roles = options.using, options.roles
        self.source = Source(using, registry.handlers)
        self.queues = Queues(using, options.queues, self.source.wake)
        self.counts = Counts()
        self.rollup = RollupWriter(using, self.counts)
        self.recorder = Recorder(using, lambda count: None, self.counts)
        self.pool = Pool(options.threads, self.recorder, self.name, self._freed, budget.give_back)
        self.consumer: Consumer | None = None
        if "consumer" in roles:
            self.consumer = Consumer(
                using, self.source, self.pool, self.queues, self.name, budget, settings.POLL_INTERVAL, self.counts, solo
            )
        self.presence = Presence(using, self.name, self.queues, options.threads)
        upkeep: list[Service] = [self.queues, self.presence, self.rollup]
        if "reaper" in roles:
            upkeep.append(Reaper(using, f"worker:{self.name}", self.counts))
        if "janitor" in roles:
            upkeep.append(Janitor(using))
        self.runners = [Runner("upkeep", upkeep)]
        self.operator: Operator | None = None
        if "operator" in roles:
            self.operator = Operator(using, self.name)
            self.runners.append(Runner("operator", [self.operator]))
        if self.consumer is not None:
            self.runners.append(Runner("watch", [Watch(self.pool, self._on_stuck, hard)]))
            self.runners.append(Runner("keeper", [Keeper(using, self.pool)]))
        if self.source.redis is not None:
            timing: list[Service] = []
            if "loader" in roles:
                self.source.has_loader = True
                self.runners.append(Runner("loader", [Loader(using, self.source, self.queues, self.name)]))
            if "sweeper" in roles:
                timing.append(Sweeper(using, self.source, self.queues, registry.handlers))
            if "mover" in roles and self.consumer is None:
                timing.append(Mover(self.source, self.queues))
            if timing:
                self.runners.append(Runner("timing", timing))

    def stop(self) -> None:
        """Begin to end; safe in a signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    @property
    def beat(self) -> float:
        """When the consumer last went round (monotonic)."""
        return time.monotonic() if self.consumer is None else self.consumer.beat

    def run(self, watch: Callable[[], bool] = lambda: False) -> int:
        """Work until told to stop, or until ``watch`` (asked twice a second) says so. Returns the exit code."""
        self.recorder.start()
        self.pool.start()
        for runner in self.runners:
            runner.start()
        if self.consumer is not None:
            self.consumer.start()
        while not self._stopping:
            select.select([self._wake_read], [], [], 0.5)
            if watch() or self._is_over() or self._is_broken():
                break
        self._shut_down()
        return self.code

    def _freed(self) -> None:
        if self.consumer is not None:
            self.consumer.freed()

    def _is_over(self) -> bool:
        # What is claimed has been counted: it is delivered too. Asked twice, for what is held may just be given back.
        if self._budget.empty and not self.pool.held() and self._budget.empty:
            self.code = EXHAUSTED
            return True
        limit = self.options.max_runtime
        return limit is not None and time.monotonic() - self._started >= limit

    def _is_broken(self) -> bool:
        """A thread that is gone would leave a process that looks alive and does half of its work."""
        threads = [self.recorder, *self.pool.members, *self.runners]
        if self.consumer is not None:
            threads.append(self.consumer)
        dead = [thread.name for thread in threads if not thread.is_alive()]
        if dead and not self._stopping:
            self.code = BROKEN
            logger.critical("Thread %s has died; this process will be replaced", ", ".join(dead))
        return bool(dead)

    def _on_stuck(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if (delivery.id, delivery.deliveries) not in self._stuck:
                self._stuck.add((delivery.id, delivery.deliveries))
                logger.error("%r does not end at its timeout; this process will be replaced", delivery)
        self.code = STUCK
        self.stop()

    def _is_all_stuck(self) -> bool:
        """Waiting longer would be for nothing."""
        return {(d.id, d.deliveries) for d in self.pool.held()} <= self._stuck

    def _shut_down(self) -> None:
        # Take no more before anything else, or the rest would never end.
        if self.consumer is not None:
            self.consumer.stop()
            self.consumer.join(timeout=5)
            if self.consumer.is_alive():
                # It hangs in the database; what it may still claim is given back by the supervisor.
                self.code = self.code or UNFINISHED
        # What has not begun is given back, what runs may finish. The leases must be kept meanwhile.
        self.pool.drain()
        finished = self.pool.wait_idle(self.options.graceful_timeout, self._is_all_stuck)
        if not finished:
            self.code = self.code or UNFINISHED
            for delivery in self.pool.held():
                if delivery.is_late():
                    self.recorder.submit(delivery, timed_out(delivery), f"worker:{self.name}")
        # Outcomes are written before the threads go that could still add to them.
        for runner in self.runners:
            runner.stop()
        if not self.recorder.flush(max(5.0, self.options.graceful_timeout)):
            logger.error("Outcomes could not be recorded before the end; their messages will be delivered again")
            self.code = self.code or UNFINISHED
        self.pool.stop()
        self.recorder.stop()
        for runner in self.runners:
            runner.join(timeout=2)
        self.recorder.join(timeout=2)
        for last in (self.rollup.tick, self.presence.leave, *([self.operator.leave] if self.operator else [])):
            try:
                last()
            except Exception as error:  # noqa: BLE001
                logger.debug("Could not sign off: %s", error)
        self.source.close()
        connections.close_all()
