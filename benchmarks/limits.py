"""Measures what limits cost others, and how well they are used: ``python -m benchmarks.limits``.

``--backlog 10000``: so many messages of ``limit=5`` that take 20 ms each fall due at one moment, and beside them, in
the same queue and in another one, a message without a limit each 0.1 s. The same beside 5,000 messages of
``rate="1/s"``, and beside 200,000 without a limit. Then the rates of 5,000 messages without a limit, of 5,000 under a
limit that is never reached, and of 5,000 under 1,000 keys of limit 1. One process, on servers of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from datetime import UTC, datetime

NUMBER = 5000
KEYS = 1000
# The topics of the backlogs, and how many messages of each can begin in a second: five at a time, of 20 ms each; one.
POSSIBLE = {"bench.five": 250, "bench.rated": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backlog", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--unlimited", type=int, default=200_000, help="messages without a limit that are due at once")
    parser.add_argument("--seconds", type=int, default=10, help="how long each backlog is watched")
    arguments = parser.parse_args()
    os.environ["BENCH_LIMITS"] = "1"
    from .own_servers import own_servers

    with own_servers():
        for number in arguments.backlog:
            beside_a_backlog("bench.five", number, arguments.seconds)
        beside_a_backlog("bench.rated", NUMBER, arguments.seconds)
        beside_a_backlog("bench.noop", arguments.unlimited, arguments.seconds)
        for topic, keys in (("bench.noop", 0), ("bench.roomy", 0), ("bench.keyed", KEYS)):
            rate(topic, keys)


def beside_a_backlog(topic: str, number: int, seconds: int) -> None:
    """Print how many messages of the limit began in each second, and how late the others were."""
    from django_delayq import schedule_message, schedule_messages
    from django_delayq.models import Transition

    from .recovery import worker

    empty()
    with worker("--processes", "1", "-v", "0"):
        due = time.time() + 3 + number / 20_000
        at = datetime.fromtimestamp(due, UTC)
        schedule_messages({"topic": topic, "due_at": at} for _ in range(number))
        time.sleep(max(0.0, due - time.time()))
        beside: list[int] = []
        elsewhere: list[int] = []
        while time.time() < due + seconds:
            beside.append(schedule_message("bench.noop").pk)
            elsewhere.append(schedule_message("bench.noop", queue="other").pk)
            time.sleep(0.1)
        time.sleep(0.5)
    began_at = Transition.objects.filter(to_state="running", message__topic=topic).values_list("at", flat=True)
    began = Counter(int(moment.timestamp() - due) for moment in began_at)
    numbers = [began[second] for second in range(seconds)]
    print(f"{number} of {topic} due at once; begun in each second, of {POSSIBLE.get(topic, 'all')} possible: {numbers}")
    say_late("in the first second", beside[:10])
    say_late("after it", beside[10:])
    say_late("in another queue", elsewhere)


def say_late(which: str, ids: list[int]) -> None:
    """Print how late these messages began."""
    from .recovery import quantiles, starts

    if not ids:
        return
    found = starts(ids)
    p50, p99, most = quantiles(sorted(min(found.get(pk, [float("inf")])) * 1000 for pk in ids))
    print(f"    others {which}: late by p50 {p50:.1f}, p99 {p99:.1f}, at most {most:.1f} ms", flush=True)


def empty() -> None:
    """Delete all messages, and what Redis knows of them."""
    import redis
    from django.db import connection

    if os.environ["REDIS_URL"]:
        redis.Redis.from_url(os.environ["REDIS_URL"]).flushall()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE delayq_message, delayq_place, delayq_rate CASCADE")


def rate(topic: str, keys: int) -> None:
    """Print how many messages a second a process delivers that are due at once."""
    from django_delayq import schedule_messages
    from django_delayq.models import Message, Transition

    from .recovery import until, worker

    empty()
    schedule_messages({"topic": topic, "limit_key": f"key-{place % keys}" if keys else None} for place in range(NUMBER))
    with worker("--processes", "1", "-v", "0"):
        until(lambda: not Message.objects.exclude(state="consumed").exists())
    times = Transition.objects.filter(message__topic=topic)
    first = times.filter(to_state="running").order_by("at").values_list("at", flat=True)[0]
    last = times.filter(to_state="consumed").order_by("-at").values_list("at", flat=True)[0]
    print(f"{topic:12} {NUMBER / (last - first).total_seconds():8,.0f} messages a second", flush=True)


if __name__ == "__main__":
    main()
