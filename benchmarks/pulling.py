"""Measures programs that pull: ``python -m benchmarks.pulling [--messages 20000] [--seconds 10]``.

How many messages a second one process takes and acknowledges, in batches and one by one; how late a message reaches a
program that waits, at 500 a second; and what callers cost that wait for nothing. On servers of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import TypeVar

from .own_servers import own_servers
from .recovery import say

T = TypeVar("T")

QUEUE = "bench.pull"
BATCH = 100
RATE = 500
WAITERS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--producer", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.producer:
        produce(arguments.producer)
        return
    with own_servers():
        say(f"take and ack, batches of {BATCH}, messages/s", f"{drained(arguments.messages, BATCH):,.0f}")
        say("take and ack, one by one, messages/s", f"{drained(arguments.messages // 10, 1):,.0f}")
        say(f"due → waiting program at {RATE}/s", late(arguments.seconds))
        say(f"{WAITERS:,} coroutines that wait", waiting(arguments.seconds))


def drained(number: int, most: int) -> float:
    """Return how many messages a second are taken and acknowledged."""
    from django_delayq import schedule_messages
    from django_delayq.pull import ack, take

    schedule_messages({"topic": "bench.row", "payload": {"n": n}, "queue": QUEUE} for n in range(number))
    done = 0
    began = time.perf_counter()
    while messages := take(QUEUE, max=most):
        ack([message.receipt for message in messages])
        done += len(messages)
    assert done == number
    return number / (time.perf_counter() - began)


def produce(seconds: float) -> None:
    """Schedule messages one by one at an even rate."""
    from .own_servers import set_up_django

    set_up_django()
    from django_delayq import schedule_message

    began = time.perf_counter()
    for number in range(int(seconds * RATE)):
        time.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        schedule_message("bench.row", {"at": time.time()}, queue=QUEUE)


def late(seconds: float) -> str:
    """Return how late messages are taken by a program that waits for them, while another process schedules them."""
    from django_delayq.pull import ack, take

    command = [sys.executable, "-m", "benchmarks.pulling", "--producer", str(seconds)]
    lags: list[float] = []
    with subprocess.Popen(command, env=os.environ):
        while len(lags) < int(seconds * RATE):
            messages = take(QUEUE, max=BATCH, wait="10s")
            now = time.time()
            lags += [now - message.due_at.timestamp() for message in messages]
            ack([message.receipt for message in messages])
    cuts = quantiles(lags, n=100)
    return f"p50 {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms"


def waiting(seconds: float) -> str:
    """Return the share of a core and the memory of callers that wait for nothing."""
    from asgiref.sync import sync_to_async

    from django_delayq.pull.taking import PullCall

    async def in_thread(act: Callable[[], T]) -> T:
        return await sync_to_async(act)()

    async def wait_together() -> tuple[float, float]:
        before = _resident()
        # The two halves of ``atake``: the first look of each is made before the time is taken.
        calls = [PullCall(QUEUE, 1, 10 * seconds + 60, None, None) for _ in range(WAITERS)]
        await asyncio.gather(*[call.afetch(in_thread) for call in calls])
        callers = [asyncio.create_task(call.alater(in_thread)) for call in calls]
        await asyncio.sleep(0)
        used = time.process_time()
        await asyncio.sleep(seconds)
        share = (time.process_time() - used) / seconds
        memory = (_resident() - before) / WAITERS
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        return share, memory

    share, memory = asyncio.run(wait_together())
    return f"{share:.2%} of a core, {memory / 1024:.1f} kB each"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
