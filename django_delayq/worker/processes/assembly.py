"""Wires the parts of a worker: for a process of ``run_delayq``, for ``--once``, and for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ... import middleware
from ...core.worker_options import Options
from ...extensions import WorkerExtensions
from ...project import conf, registry
from ...record import admission
from ...worker.parts.roles import worker_name
from ..claim.consumer import Consumer
from ..claim.freed_places import FreedPlaces
from ..parts.begun_page import BegunPage
from ..parts.broker_switch import BrokerSwitch
from ..parts.budget import Budget
from ..parts.processlock import ProcessLock
from ..parts.queue_finder import QueueFinder
from ..parts.service import ServiceTurns
from ..run.claim_ahead import CLAIM_AHEAD, NEAR
from ..run.event_loop import EventLoop
from ..run.handler_threads import HandlerThreads
from ..run.lease_renewer import LeaseRenewer
from ..run.pool import Pool
from ..run.recorder import Recorder
from ..upkeep.reaper import Reaper


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one worker process, wired to each other and not started."""

    options: Options
    name: str
    budget: Budget
    extensions: WorkerExtensions
    brokers: BrokerSwitch
    queues: QueueFinder
    recorder: Recorder
    pool: Pool
    consumer: Consumer
    reaper: Reaper


def assemble(
    options: Options,
    *,
    name: str | None = None,
    redis: bool = True,
    quarantine_lock: ProcessLock | None = None,
    page: BegunPage | None = None,
    on_recorded: Callable[[int], None] = lambda count: None,
    on_idle: Callable[[], None] | None = None,
    claim_ahead: float | None = None,
) -> Parts:
    """Wire the parts of a worker process.

    ``name`` is the name of the worker (None: a new one). It shares its ``page`` with its supervisor. With
    ``redis=False`` the worker delivers by query only.
    ``on_recorded`` is called with the number of deliveries that the recorder has written. If there is an ``on_idle``,
    the consumer ends when nothing can begin, and calls it. ``claim_ahead`` (seconds) replaces what is usual.
    """
    using = options.using
    name = worker_name(options) if name is None else name
    settings = conf.get()
    # A wrong path in the settings is an error now, not in each handler.
    middleware.chain()
    budget = Budget(options.max_messages)
    if claim_ahead is None:
        claim_ahead = NEAR if admission.any_declared() else CLAIM_AHEAD
    # The consumer is made after the brokers and the pool.
    brokers = BrokerSwitch(using, lambda: consumer.wanted.topics, redis=redis)
    freed = FreedPlaces(using, name, brokers.wake) if admission.any_declared() else None
    extensions = WorkerExtensions(using, name, () if freed is None else (freed,))
    queues = QueueFinder(using, options.queues, brokers.wake)
    recorder = Recorder(using, on_recorded, extensions)
    tasks = options.async_concurrency if any(h.runs_on_loop for h in registry.handlers().values()) else 0
    page = BegunPage(options.threads, tasks) if page is None else page
    pool = Pool(
        HandlerThreads(options.threads, recorder, name, page),
        EventLoop(tasks, options.threads, recorder, name, page) if tasks else None,
        recorder,
        on_freed=lambda: consumer.on_freed(),  # noqa: PLW0108
        on_released=budget.refund,
        claim_ahead=claim_ahead,
        page=page,
    )
    consumer = Consumer(
        using,
        brokers,
        pool,
        queues,
        name,
        budget,
        settings.POLL_INTERVAL,
        extensions,
        quarantine_lock,
        freed,
        dict(zip(options.queues, options.weights, strict=True)) if options.weights else None,
        on_idle,
    )
    recorder.meanwhile = ServiceTurns([LeaseRenewer(using, pool), recorder.log])
    reaper = Reaper(using, f"worker:{name}", extensions)
    return Parts(options, name, budget, extensions, brokers, queues, recorder, pool, consumer, reaper)
