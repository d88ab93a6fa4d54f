"""Compares two ways to notice the end of many messages: ``python -m benchmarks.fan_in [--messages 2000]``.

*A row that counts*: each transactional handler adds one to the same row, and the one that reaches the number goes on.
*A message that looks*: the many are in a queue of their own, and one more message looks for what is left there. Both on
servers of their own, with a worker as a user starts it; beside them, in another queue, a message falls due each 0.1 s.
"""

from __future__ import annotations

import argparse
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=2000)
    arguments = parser.parse_args()
    os.environ["BENCH_FAN_IN"] = "1"
    from .own_servers import own_servers

    with own_servers():
        for topic in ("bench.counts", "bench.plain", "bench.counts", "bench.plain"):
            measure(topic, arguments.messages)


def measure(topic: str, number: int) -> None:
    """Print how fast the messages of a topic ended, when that was noticed, and how late others were."""
    from benchmarks.app.models import Row
    from django_delayq import schedule_message, schedule_messages
    from django_delayq.models import Message

    from .limits import say_late
    from .recovery import worker

    Message._base_manager.all()._raw_delete("default")
    Row.objects.all().delete()
    row = Row.objects.create(topic="fan-in", payload=0, due_at="2100-01-01T00:00:00Z")
    with worker("-v", "0"):
        began = time.monotonic()
        schedule_messages({"topic": topic, "payload": row.pk, "queue": "mailing"} for _ in range(number))
        if topic == "bench.plain":
            schedule_message("bench.looks", {"queue": "mailing", "row": row.pk}, delay=1)
        beside: list[int] = []
        while not (Row.objects.get(pk=row.pk).done or Row.objects.get(pk=row.pk).payload == number):
            beside.append(schedule_message("bench.noop", queue="other").pk)
            time.sleep(0.1)
        took = time.monotonic() - began
    title = "a row that counts" if topic == "bench.counts" else "a message that looks"
    print(f"{title}: {number} messages in {took:.1f} s, {number / took:,.0f} a second")
    say_late("in another queue", beside)


if __name__ == "__main__":
    main()
