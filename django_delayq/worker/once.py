"""``run_delayq --once``: deliver all that is due now, and return."""

from __future__ import annotations

import threading

from .. import conf, registry
from . import connections
from .budget import Budget
from .consumer import Consumer
from .delivery import Delivery
from .executor import timed_out
from .keeper import Keeper
from .pool import Pool
from .process import Options, worker_name
from .queues import Queues
from .reaper import Reaper
from .recorder import Recorder
from .service import Runner
from .source import Source


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
    recorder = Recorder(options.using, count)
    pool = Pool(options.threads, recorder, name, lambda: None)
    consumer = Consumer(
        options.using, source, pool, queues, name, Budget(options.max_messages), conf.get().POLL_INTERVAL
    )
    failed: list[Delivery] = []

    def stuck(deliveries: list[Delivery]) -> None:
        if not failed:
            failed.extend(deliveries)
            stop.set()

    keeper = Runner("keeper", [Keeper(options.using, pool, stuck)])
    recorder.start()
    pool.start()
    keeper.start()
    try:
        Reaper(options.using, f"worker:{name}").tick()
        while not stop.is_set() and not consumer.exhausted.is_set():
            queues.tick()
            before = delivered
            consumer.turn()
            pool.wait_idle(float("inf"), stop.is_set)
            recorder.flush(60.0)
            if delivered == before and not consumer.has_suspects:
                break
    finally:
        pool.drain()
        pool.wait_idle(0 if failed else options.graceful_timeout)
        for delivery in failed:
            recorder.submit(delivery, timed_out(delivery), f"worker:{name}")
        keeper.stop()
        recorder.flush(options.graceful_timeout)
        pool.stop()
        recorder.stop()
        recorder.join(timeout=5)
        source.close()
        connections.scrub()
    return delivered
