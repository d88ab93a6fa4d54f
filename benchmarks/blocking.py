"""Measures what async handlers cost that block their event loop: ``python -m benchmarks.blocking [--messages 400]``.

So many messages are due at once whose async handler computes for 29 ms, as ``httpx.AsyncClient()`` does when each
message makes one. Beside them, in another queue, a message for the handler threads falls due each 0.1 s. One process,
on servers of its own. Each message should be delivered once.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=400)
    arguments = parser.parse_args()
    os.environ["BENCH_BLOCKS"] = "1"
    from .own_servers import own_servers

    with own_servers():
        measure(arguments.messages)


def measure(number: int) -> None:
    """Print how often the messages were delivered, and how late the others were."""
    from django_delayq import schedule_message, schedule_messages
    from django_delayq.models import Message, Transition

    from .limits import say_late
    from .recovery import worker

    with worker("--processes", "1", "-v", "0"):
        schedule_messages({"topic": "bench.block"} for _ in range(number))
        beside = []
        began = time.monotonic()
        while Message.objects.filter(topic="bench.block").exclude(state="consumed").exists():
            beside.append(schedule_message("bench.noop", queue="other").pk)
            time.sleep(0.1)
        took = time.monotonic() - began
    log = Transition.objects.filter(message__topic="bench.block")
    deliveries = log.filter(to_state="running").count()
    ends = Counter(log.filter(from_state="running").values_list("to_state", "reason"))
    print(f"{number} messages that block the loop for 29 ms each: {deliveries} deliveries in {took:.1f} s")
    for (state, reason), times in ends.most_common():
        print(f"    {times} × {state} {reason}")
    say_late("in another queue", beside)


if __name__ == "__main__":
    main()
