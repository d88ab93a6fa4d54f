"""Counts what a worker with nothing to do costs: ``python -m benchmarks.idle [--processes 20] [--seconds 20]``.

A worker as ``run_delayq`` starts it by default, or with so many processes, on servers of its own. Prints for each
second the commands of Redis, also those that scripts call, by their names and by who calls them; the transactions and
the connections; and the memory of all processes, with what they share counted once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis as redis_client

from .own_servers import own_servers
from .recovery import say, worker

# The first loads, heartbeats and searches are over then, and idle connections are closed.
SETTLE_SECONDS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, help="default: as many as run_delayq starts")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    options = [] if arguments.processes is None else ["--processes", str(arguments.processes)]
    with own_servers() as (redis, _postgres), worker(*options) as process:
        time.sleep(SETTLE_SECONDS)
        client = redis_client.Redis.from_url(redis.url)
        before, commits = _calls(client), _commits()
        with _callers(redis.url) as callers:
            time.sleep(arguments.seconds)
        used = {name: (calls - before.get(name, 0)) / arguments.seconds for name, calls in _calls(client).items()}
        family = _family(process.pid)
        say(f"{len(family) - 1} idle processes, each second: Redis commands", f"{sum(used.values()):.1f}")
        for name, each in sorted(used.items(), key=lambda item: -item[1]):
            if each >= 1 / arguments.seconds:
                say(f"  {name}", f"{each:.2f}")
        for text, number in callers.most_common(20):
            say(f"  … {text}"[:72], f"{number / arguments.seconds:.2f}")
        say("transactions", f"{(_commits() - commits) / arguments.seconds:.1f}")
        say("connections to the database", f"{_connections()}")
        for title, name in (("shared parts counted once", "Pss"), ("private", "Private_Dirty"), ("resident", "Rss")):
            say(f"memory of supervisor and processes, MB: {title}", f"{sum(_memory(pid, name) for pid in family):.0f}")


def _calls(client: redis_client.Redis) -> dict[str, int]:
    """Return how many times each command was called, also by scripts. What asks for that does not count.

    The INFO of the loader, each 5 s, counts.
    """
    stats = client.info("commandstats")
    ours = ("monitor", "client", "hello")
    return {
        name: each["calls"]
        for full, each in stats.items()
        if not (name := full.removeprefix("cmdstat_")).startswith(ours)
    }


@contextmanager
def _callers(url: str) -> Iterator[collections.Counter[str]]:
    """Yield a count of what clients and scripts call, by the command and its first key."""
    found: collections.Counter[str] = collections.Counter()
    monitor = redis_client.Redis.from_url(url).monitor()

    def listen() -> None:
        with contextlib.suppress(redis_client.RedisError, OSError, ValueError):
            for each in monitor.listen():
                words = each["command"].split()
                # A script is named by the beginning of its digest.
                keys = next((word for word in words[1:] if "{" in word or ":" in word), "")
                inside = "in a script: " if each["client_type"] == "lua" else ""
                found[f"{inside}{words[0]} {words[1][:8] if words[0] == 'EVALSHA' else ''} {keys}"] += 1

    monitor.__enter__()
    threading.Thread(target=listen, daemon=True).start()
    try:
        yield found
    finally:
        monitor.connection.disconnect()


def _commits() -> int:
    _query("SELECT pg_stat_clear_snapshot()")
    return _query("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")


def _connections() -> int:
    return _query("SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()")


def _query(statement: str) -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
        (value,) = cursor.fetchone()
    return int(value or 0)


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


def _memory(pid: int, name: str) -> float:
    """Return the MB of a process's memory that the kernel gives this name."""
    found = re.search(rf"^{name}: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
