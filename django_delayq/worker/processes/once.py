"""``run_delayq --once``: delivers all messages that are due now, and returns."""

from __future__ import annotations

import threading

from ...core.worker_options import Options
from ...extensions import Service
from ..parts import connections
from ..parts.delivery import Delivery
from ..parts.service import in_threads
from ..run.event_loop import LoopWatch
from ..run.executor import timed_out
from ..run.timeouts import TimeoutWatch
from .assembly import assemble


def drain(options: Options, stop: threading.Event | None = None) -> int:
    """Deliver due messages, found by query: Redis may have lost some. Return how many deliveries were recorded.

    This thread makes the turns of the consumer. ``stop`` ends the work early.
    """
    stop = stop or threading.Event()
    delivered = 0

    def count(number: int) -> None:
        nonlocal delivered
        delivered += number

    parts = assemble(options, redis=False, stopping=stop, on_recorded=count)
    recorder, pool, budget, consumer = parts.recorder, parts.pool, parts.budget, parts.consumer
    # Filled by the thread of the timeout watch, once, before it sets ``stop``.
    stuck: list[Delivery] = []

    def on_stuck(deliveries: list[Delivery]) -> None:
        if not stuck:
            stuck.extend(deliveries)
            stop.set()

    watches: list[Service] = [TimeoutWatch(pool, on_stuck)]
    if pool.loop is not None:
        watches.append(LoopWatch(pool.loop))
    runners = in_threads(watches)
    recorder.start()
    pool.start()
    for runner in runners:
        runner.start()
    try:
        parts.reaper.tick()
        if parts.reaper.is_confirming:
            stop.wait(parts.reaper.confirm_after)
            parts.reaper.tick()
        while not stop.is_set() and (consumer.quarantine.is_waiting or not budget.empty):
            parts.queues.tick()
            before = delivered
            consumer.turn()
            pool.wait_idle(float("inf"), stop.is_set)
            recorder.flush(60.0)
            # After a refusal the next turn passes over the limit, which is full now, and may find others.
            if delivered == before and not consumer.quarantine.is_waiting and not consumer.refused:
                break
    finally:
        consumer.release()
        pool.release_unstarted()
        pool.finish(0 if stuck else options.graceful_timeout)
        for delivery in stuck:
            recorder.submit(delivery, timed_out(delivery), f"worker:{parts.name}")
        for runner in runners:
            runner.stop()
        recorder.flush(options.graceful_timeout)
        pool.stop()
        recorder.stop()
        recorder.join(timeout=5)
        parts.extensions.stop()
        parts.brokers.close()
        connections.after_task()
    return delivered
