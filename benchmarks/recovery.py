"""Measures the promises on private servers: ``python -m benchmarks.recovery [--rows 1000000]``.

With ``--overdue 1000000`` only how late others are after a loss of Redis, while so many messages are overdue.

Prints one table: lateness of a message, a schedule while Redis is stopped, a flush with messages waiting, a worker
killed with handlers running, a restore, and the log of a message that was retried twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis as redis_client

from testproject.servers import RedisServer

from .own_servers import own_servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages in the restore")
    parser.add_argument("--overdue", type=int, metavar="ROWS", help="only lose Redis while so many are overdue")
    arguments = parser.parse_args()
    with own_servers() as (redis, _postgres):
        if arguments.overdue:
            overdue(redis, arguments.overdue)
            return
        lateness()
        redis_stopped(redis)
        flush(redis)
        killed()
        retried()
        restore(redis.url, arguments.rows)


@contextmanager
def worker(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``run_delayq`` in a process; it is ready to deliver."""
    from django_delayq.models import Worker

    Worker.objects.all().delete()
    with subprocess.Popen([sys.executable, "-m", "django", "run_delayq", *options]) as process:
        until(Worker.objects.exists)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def until(done: Callable[[], bool], limit: float = 60.0) -> float:
    """Wait until ``done`` returns True, and return the seconds that it took."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > limit:
            raise RuntimeError("did not happen")
        time.sleep(0.02)
    return time.monotonic() - began


def say(what: str, value: str) -> None:
    print(f"{what:<72} {value}", flush=True)


def messages() -> Any:
    from django_delayq.models import Message

    return Message.objects


def are(ids: list[int], state: str) -> bool:
    return bool(messages().filter(pk__in=ids, state=state).count() == len(ids))


def starts(ids: list[int]) -> dict[int, list[float]]:
    """Return the lateness in seconds of each delivery, by message; 0 for one that was claimed a moment early."""
    from django_delayq.models import Transition

    found: dict[int, list[float]] = {}
    rows = Transition.objects.filter(message_id__in=ids, to_state="running").values_list("message_id", "at", "due_at")
    for pk, at, due in rows:
        found.setdefault(pk, []).append(max(0.0, (at - due).total_seconds()))
    return found


def lateness() -> None:
    from django_delayq import schedule_message

    with worker():
        message = schedule_message("bench.noop", delay=3)
        until(lambda: messages().filter(pk=message.pk, state="consumed").exists())
        say("a message due in 3 s: late by", f"{starts([message.pk])[message.pk][0] * 1000:.1f} ms")


def redis_stopped(redis: RedisServer) -> None:
    from django_delayq import schedule_message
    from django_delayq.broker import publisher

    with worker():
        schedule_message("bench.noop")
        redis.stop()
        times = []
        ids = []
        for _ in range(20):
            began = time.monotonic()
            ids.append(schedule_message("bench.noop").pk)
            times.append(time.monotonic() - began)
        until(lambda: messages().filter(pk__in=ids, state="consumed").count() == len(ids))
        late = sorted(late for each in starts(ids).values() for late in each)
        say("schedule_message() with Redis stopped: slowest of 20", f"{max(times) * 1000:.1f} ms")
        say("  … delivered from the database: latest", f"{late[-1] * 1000:.0f} ms")
        redis.start()
        # Wait until this process tries Redis again.
        time.sleep(publisher.usual.retry_after)


def flush(redis: RedisServer) -> None:
    from django_delayq import schedule_messages

    with worker():
        scheduled = schedule_messages([{"topic": "bench.noop", "delay": 4 + i / 2500} for i in range(10_000)])
        client = redis_client.Redis.from_url(redis.url)
        key = "{delayq}:default:delayed"
        until(lambda: client.zcard(key) == 10_000)
        client.flushall()
        reloaded = until(lambda: client.zcard(key) > 9_000)
        ids = [message.pk for message in scheduled]
        until(lambda: messages().filter(pk__in=ids, state="consumed").count() == len(ids))
        each = starts(ids)
        late = sorted(late for found in each.values() for late in found)
        say("FLUSHALL with 10,000 waiting and a worker running: loaded again after", f"{reloaded:.2f} s")
        say("  … delivered / delivered twice", f"{len(each)} / {sum(len(f) > 1 for f in each.values())}")
        say("  … lateness p50 / p99 / max", " / ".join(f"{q * 1000:.0f}" for q in quantiles(late)) + " ms")


def quantiles(ordered: list[float]) -> tuple[float, float, float]:
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed() -> None:
    from django_delayq import schedule_messages

    options = ("--processes", "1", "--threads", "100")
    for whole in (False, True):
        with worker(*options) as process:
            scheduled = schedule_messages([{"topic": "bench.sleep", "payload": 1.0} for _ in range(100)])
            ids = [message.pk for message in scheduled]
            until(partial(are, ids, "running"))
            victims = children(process.pid)
            if whole:
                process.kill()
            for child in victims:
                os.kill(child, signal.SIGKILL)
            began = time.monotonic()
            if whole:
                process.wait()
                with worker(*options):
                    until(partial(are, ids, "consumed"))
            else:
                until(partial(are, ids, "consumed"))
            what = "the whole worker, another started at once (lease 5 s)" if whole else "a child process"
            say(f"kill -9 of {what}, 100 handlers of 1 s running:", "")
            say("  … all consumed after", f"{time.monotonic() - began:.1f} s")


def retried() -> None:
    from django_delayq import schedule_message

    with worker():
        message = schedule_message("bench.twice")
        until(lambda: messages().filter(pk=message.pk, state="consumed").exists())
    print("\nThe log of a message that was retried twice:")
    for row in message.transitions.all():
        wait = "" if row.ready_at is None else f"ready {row.ready_at:%H:%M:%S.%f}"[:-3]
        print(f"  {row.at:%H:%M:%S.%f}"[:-3], f"{row.from_state or 'new':>9} → {row.to_state:<9}", wait, row.error)
    print()


INSERT_ROWS = """
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, attempts,
    deliveries, reported, excused, moves, worker, cancel_requested)
SELECT %s, 'default', 0, 'scheduled', %s::jsonb, '{}',
       now() + %s * interval '1 s' + floor(100000 * random()) * interval '1 ms', now(), 0, 0, 0, 0, 1, '', false
  FROM generate_series(1, %s) n
"""


def insert_rows(topic: str, payload: Any, rows: int, due_in: float) -> None:
    """Write messages that are due within 100 s from ``due_in`` seconds on, of which Redis is not told."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(INSERT_ROWS, [topic, json.dumps(payload), due_in, rows])
        cursor.execute("ANALYZE delayq_message")


def overdue(redis: RedisServer, rows: int) -> None:
    """Lose Redis while ``rows`` messages are overdue, and look how late those are that nobody should keep waiting.

    One comes into an idle queue and one with priority into the queue of the backlog, a moment before the load and then
    five times a second, until everything is loaded.
    """
    from django_delayq import schedule_message

    # So slow that the backlog is there when Redis is lost.
    insert_rows("bench.sleep", 0.02, rows, -3600)
    client = redis_client.Redis.from_url(redis.url)
    with worker():
        until(partial(client.hexists, "{delayq}:meta", "loaded"), 600)
        client.flushall()
        began = time.monotonic()
        times: dict[str, list[int]] = {"idle queue": [], "priority": []}

        def is_loaded() -> bool:
            times["idle queue"].append(schedule_message("bench.noop", queue="idle").pk)
            times["priority"].append(schedule_message("bench.noop", priority=100).pk)
            time.sleep(0.2)
            loaded, horizon = client.hmget("{delayq}:meta", "loaded", "horizon")
            return horizon is not None and loaded == horizon

        until(is_loaded, 600)
        say(f"FLUSHALL with {rows:,} overdue: loaded again after", f"{time.monotonic() - began:.1f} s")
        for what, ids in times.items():
            until(partial(are, ids, "consumed"), 600)
            found = starts(ids)
            late = [found[pk][0] for pk in ids]
            say(f"  … {what}: the first one late by", f"{late[0]:.2f} s")
            figures = " / ".join(f"{q:.2f}" for q in quantiles(sorted(late)))
            say(f"  … {what}, {len(late)} messages: p50 / p99 / max", f"{figures} s")


def restore(redis_url: str, rows: int) -> None:
    """Restore ``rows`` rows, due in no order, several times, each time into an empty Redis."""
    from django.db import connection

    insert_rows("bench.noop", {"n": 1, "pad": "x" * 180}, rows, 300)
    client, key = redis_client.Redis.from_url(redis_url), "{delayq}:default:delayed"

    def timed() -> tuple[float, float]:
        client.flushall()
        began = time.monotonic()
        peak = _peak("delayq_restore", "--json")
        took = time.monotonic() - began
        if client.zcard(key) != rows:
            raise RuntimeError(f"{client.zcard(key)} of {rows} are in Redis")
        return took, peak

    took, peak = timed()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM delayq_message")
    vacuumed, _peak_again = timed()
    extra = peak - _peak("delayq_restore", "--json", "--queue", "nothing")
    say(f"delayq_restore of {rows:,} rows just written", f"{took:.1f} s")
    say("  … of rows that a vacuum has seen since", f"{vacuumed:.1f} s")
    say("  … peak memory above a restore of nothing", f"{extra:.0f} MB")
    used = client.memory_usage(key, samples=0)
    assert used
    say("  … Redis bytes per waiting message", f"{used / rows:.0f}")


# wait4() reports the memory of the parent process instead, when that was more.
PEAK = """
import re, sys
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", *sys.argv[1:]])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def _peak(*command: str) -> float:
    """Run a command in a process of its own, and return its peak memory in MB."""
    ran = subprocess.run([sys.executable, "-c", PEAK, *command], stdout=subprocess.PIPE, text=True, check=True)
    return int(ran.stdout.split()[-1]) / 1024


if __name__ == "__main__":
    main()
