"""``run_delayq --once``: deliver all that is due now, and return."""

from __future__ import annotations

import logging
import threading

from django.db import Error as DatabaseError

from .. import conf, registry
from . import connections
from .budget import Budget
from .consumer import Consumer
from .delivery import Delivery
from .executor import timed_out
from .keeper import Keeper, Watch
from .pool import Pool
from .process import Options, worker_name
from .queues import Queues
from .reaper import Reaper
from .recorder import Recorder
from .rollup import Counts, RollupWriter
from .service import Runner
from .source import Source

logger = logging.getLogger("django_delayq")


def drain(options: Options, stop: threading.Event | None = None) -> int:
    """Deliver what is due, straight from the record: it cannot miss what Redis has lost. Returns how many."""
    name = worker_name(options)
    stop = stop or threading.Event()
    delivered = 0

    def count(number: int) -> None:
        nonlocal delivered
        delivered += number

    source = Source(options.using, registry.handlers, redis=False)
    queues = Queues(options.using, options.queues)
    counts = Counts()
    recorder = Recorder(options.using, count, counts)
    budget = Budget(options.max_messages)
    pool = Pool(options.threads, recorder, name, lambda: None, budget.give_back)
    poll = conf.get().POLL_INTERVAL
    consumer = Consumer(options.using, source, pool, queues, name, budget, poll, counts, stopping=stop)
    failed: list[Delivery] = []

    def stuck(deliveries: list[Delivery]) -> None:
        if not failed:
            failed.extend(deliveries)
            stop.set()

    keepers = [Runner("watch", [Watch(pool, stuck)]), Runner("keeper", [Keeper(options.using, pool)])]
    recorder.start()
    pool.start()
    for keeper in keepers:
        keeper.start()
    try:
        Reaper(options.using, f"worker:{name}", counts).tick()
        while not stop.is_set() and (consumer.alone.waits or not budget.empty):
            queues.tick()
            before = delivered
            consumer.turn()
            pool.wait_idle(float("inf"), stop.is_set)
            recorder.flush(60.0)
            if delivered == before and not consumer.alone.waits:
                break
    finally:
        consumer.give_back()
        pool.drain()
        pool.wait_idle(0 if failed else options.graceful_timeout)
        for delivery in failed:
            recorder.submit(delivery, timed_out(delivery), f"worker:{name}")
        for keeper in keepers:
            keeper.stop()
        recorder.flush(options.graceful_timeout)
        pool.stop()
        recorder.stop()
        recorder.join(timeout=5)
        _write_down(options.using, counts)
        source.close()
        connections.scrub()
    return delivered


def _write_down(using: str, counts: Counts) -> None:
    try:
        RollupWriter(using, counts).tick()
    except DatabaseError as error:
        logger.warning("The statistics of this run are not written: %s: %s", type(error).__name__, error)
