"""Measures how late messages are when Redis is far away: ``python -m benchmarks.far [--trips 0 50 200]``.

Prints for each round trip (ms) the lateness of messages that were scheduled three seconds ahead, and of those that are
due at once, up to ten of each a second, and how long a call that schedules takes. The database stays near.
"""

from __future__ import annotations

import argparse
import os
import time

from redis import Redis

from tests.support.proxy import Proxy

from .own_servers import servers, set_up_django

# Seconds between a call and the due time of half of the messages.
AHEAD = 3.0
PACE = 0.1
PASSWORD = "far"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trips", type=int, nargs="+", default=[0, 20, 50, 100, 200, 400], help="ms there and back")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long messages are scheduled")
    arguments = parser.parse_args()
    with servers() as (redis, postgres), Proxy(redis.port) as network:
        with Redis.from_url(redis.url) as server:
            server.config_set("requirepass", PASSWORD)
        # A connection takes three round trips: TCP, the password, and the number of the database.
        url = f"redis://:{PASSWORD}@127.0.0.1:{network.port}/1"
        names = {"DJANGO_SETTINGS_MODULE": "benchmarks.settings", "DATABASE_URL": postgres.url, "DEBUG": "0"}
        os.environ.update(names, REDIS_URL=url)
        set_up_django()
        for trip in arguments.trips:
            network.delay = trip / 2000
            measure(trip, arguments.seconds)


def measure(trip: int, seconds: float) -> None:
    """Schedule for so many seconds, and print one line."""
    from django_delayq import schedule_message
    from django_delayq.models import Message

    from .recovery import quantiles, starts, until, worker

    ids: dict[float, list[int]] = {AHEAD: [], 0.0: []}
    calls = []
    with worker("--processes", "1", "-v", "1"):
        time.sleep(3.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for delay, made in ids.items():
                began = time.monotonic()
                made.append(schedule_message("bench.noop", delay=delay).pk)
                calls.append((time.monotonic() - began) * 1000)
            time.sleep(PACE)
        until(lambda: not Message.objects.exclude(state="consumed").exists())
        lates = [sorted(late[0] * 1000 for late in starts(made).values()) for made in ids.values()]
    shown = [f"p50 {p50:.0f}, p99 {p99:.0f}, at most {most:.0f}" for p50, p99, most in map(quantiles, lates)]
    slowest = quantiles(sorted(calls))
    call = f"a call {slowest[0]:.1f}, at most {slowest[2]:.0f}"
    print(f"{trip:4} ms: ahead {shown[0]}; at once {shown[1]}; {call}", flush=True)


if __name__ == "__main__":
    main()
