"""Wires the parts of a worker: for a process of ``run_delayq``, for ``--once``, and for tests."""

from __future__ import annotations

import os
from collections.abc import Callable

from ... import middleware
from ...core import actors
from ...core.worker_options import Options
from ...extensions import WorkerExtensions
from ...project import conf, registry
from ...record import admission
from ..claim.consumer import Consumer
from ..claim.freed_places import FreedPlaces
from ..claim.queues import QueueFinder
from ..parts.broker_switch import BrokerSwitch
from ..parts.lifetime import BegunPage, Budget, ProcessLock
from ..parts.reporting import guard_log
from ..parts.service_turns import ServiceTurns
from ..run.claim_ahead import CLAIM_AHEAD, NEAR
from ..run.event_loop import EventLoop
from ..run.handler_threads import HandlerThreads
from ..run.pool import Pool
from ..run.recorder import LeaseRenewer, Recorder
from ..upkeep.reaper import Reaper


class Parts:
    """The parts of one worker process, wired to each other and not started."""

    def __init__(
        self,
        options: Options,
        *,
        name: str | None = None,
        redis: bool = True,
        quarantine_lock: ProcessLock | None = None,
        page: BegunPage | None = None,
        on_idle: Callable[[], None] | None = None,
        claim_ahead: float | None = None,
    ) -> None:
        """``name`` is the name of the worker (None: a new one). It shares its ``page`` with its supervisor.

        With ``redis=False`` the worker delivers by query only. If there is an ``on_idle``, the consumer ends when
        nothing can begin, and calls it. ``claim_ahead`` (seconds) replaces what is usual.
        """
        guard_log()
        # A wrong path in the settings is an error now, not in each handler.
        middleware.chain()
        self.options = options
        self.name = name = name or actors.worker_name(options.name, os.getpid(), actors.new_run())
        using, knows_limits = options.using, admission.any_declared()
        self.brokers = BrokerSwitch(using, lambda: self.consumer.wanted.topics, redis=redis)
        freed = FreedPlaces(using, name, self.brokers.wake) if knows_limits else None
        self.extensions = WorkerExtensions(using, name, () if freed is None else (freed,))
        self.queues = QueueFinder(using, options.queues, self.brokers.wake)
        self.recorder = Recorder(using, self.extensions)
        self.pool = self._pool(page, (NEAR if knows_limits else CLAIM_AHEAD) if claim_ahead is None else claim_ahead)
        self.budget = Budget(options, self.pool.page, name)
        self.consumer = Consumer(
            using,
            self.brokers,
            self.pool,
            self.queues,
            name,
            self.budget,
            conf.get().POLL_INTERVAL,
            self.extensions,
            quarantine_lock,
            freed,
            dict(zip(options.queues, options.weights, strict=True)) if options.weights else None,
            on_idle,
        )
        for lane in self.pool.lanes:
            lane.on_freed, lane.on_released = self.consumer.on_freed, self.budget.refund
        self.recorder.meanwhile = ServiceTurns([LeaseRenewer(using, self.pool.held), self.recorder.log])
        self.recorder.sender.on_room = self.brokers.wake
        self.reaper = Reaper(using, f"worker:{name}", self.extensions, self.recorder.sender)

    def _pool(self, page: BegunPage | None, claim_ahead: float) -> Pool:
        options, recorder, name = self.options, self.recorder, self.name
        has_loop = any(handler.runs_on_loop for handler in registry.handlers().values())
        tasks = options.async_concurrency if has_loop else 0
        if page is None:
            page = BegunPage(options.threads, tasks)
        threads = HandlerThreads(options.threads, recorder, name, page)
        loop = EventLoop(tasks, options.threads, recorder, name, page) if tasks else None
        return Pool(threads, loop, recorder, page, claim_ahead)
