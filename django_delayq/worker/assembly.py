"""Wires the parts of a worker: for a process of ``run_delayq``, for ``--once``, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .. import conf, registry
from ..extensions import WorkerExtensions
from .broker_switch import Source
from .budget import Budget
from .consumer import Consumer
from .options import Options, worker_name
from .pool import Pool
from .processlock import ProcessLock
from .queue_finder import QueueFinder
from .reaper import Reaper
from .recorder import Recorder


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one worker process, wired to each other and not started."""

    options: Options
    name: str
    budget: Budget
    extensions: WorkerExtensions
    source: Source
    queues: QueueFinder
    recorder: Recorder
    pool: Pool
    consumer: Consumer
    reaper: Reaper


def assemble(
    options: Options,
    *,
    budget: Budget | None = None,
    redis: bool = True,
    quarantine_lock: ProcessLock | None = None,
    stopping: threading.Event | None = None,
    on_recorded: Callable[[int], None] = lambda count: None,
    queues: Callable[[], tuple[str, ...]] | None = None,
    poll: float | None = None,
) -> Parts:
    """Wire the parts of a worker process.

    ``redis=False`` delivers by query only. ``on_recorded`` is called with the number of deliveries that the recorder
    has written down. ``queues`` replaces the queue finder for the consumer, ``poll`` the setting ``POLL_INTERVAL``.
    """
    using, name = options.using, worker_name(options)
    budget = Budget(options.max_messages) if budget is None else budget
    extensions = WorkerExtensions(using, name)
    source = Source(using, registry.handlers, redis=redis)
    finder = QueueFinder(using, options.queues, source.wake)
    recorder = Recorder(using, on_recorded, extensions)
    pool = Pool(options.threads, recorder, name, lambda: consumer.freed(), budget.give_back)  # noqa: PLW0108  there is no consumer yet
    consumer = Consumer(
        using,
        source,
        pool,
        queues or finder,
        name,
        budget,
        conf.get().POLL_INTERVAL if poll is None else poll,
        extensions,
        quarantine_lock,
        stopping,
    )
    reaper = Reaper(using, f"worker:{name}", extensions)
    return Parts(options, name, budget, extensions, source, finder, recorder, pool, consumer, reaper)
