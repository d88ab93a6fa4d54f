"""``run_delayq --once``: deliver all that is due now, and return."""

from __future__ import annotations

import threading

from . import connections
from .assembly import assemble
from .delivery import Delivery
from .executor import timed_out
from .lease_renewer import LeaseRenewer, Watch
from .options import Options
from .service import in_threads


def drain(options: Options, stop: threading.Event | None = None) -> int:
    """Deliver what is due, straight from the record: it cannot miss what Redis has lost. Returns how many."""
    stop = stop or threading.Event()
    delivered = 0

    def count(number: int) -> None:
        nonlocal delivered
        delivered += number

    parts = assemble(options, redis=False, stopping=stop, on_recorded=count)
    recorder, pool, budget, consumer = parts.recorder, parts.pool, parts.budget, parts.consumer
    failed: list[Delivery] = []

    def stuck(deliveries: list[Delivery]) -> None:
        if not failed:
            failed.extend(deliveries)
            stop.set()

    runners = in_threads([Watch(pool, stuck), LeaseRenewer(options.using, pool)])
    recorder.start()
    pool.start()
    for runner in runners:
        runner.start()
    try:
        parts.reaper.tick()
        while not stop.is_set() and (consumer.quarantine.waits or not budget.empty):
            parts.queues.tick()
            before = delivered
            consumer.turn()
            pool.wait_idle(float("inf"), stop.is_set)
            recorder.flush(60.0)
            if delivered == before and not consumer.quarantine.waits:
                break
    finally:
        consumer.give_back()
        pool.drain()
        pool.wait_idle(0 if failed else options.graceful_timeout)
        for delivery in failed:
            recorder.submit(delivery, timed_out(delivery), f"worker:{parts.name}")
        for runner in runners:
            runner.stop()
        recorder.flush(options.graceful_timeout)
        pool.stop()
        recorder.stop()
        recorder.join(timeout=5)
        parts.extensions.stop()
        parts.source.close()
        connections.after_task()
    return delivered
