"""Measures what a message costs PostgreSQL and Redis, and writes the table of ``docs/howto/sizing.rst``.

``python -m tools.sizing [MESSAGES]`` starts servers of its own, schedules and delivers so many messages (20,000 unless
named), with a payload of 200 bytes, and prints the table.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from testproject.servers import PostgresServer, RedisServer

RATES = (1, 10, 100, 1000)
DAY = 86_400
RETENTION_DAYS = 30
HORIZON_SECONDS = 600
PATIENCE = 60
TOPIC = "sizing.message"
PAYLOAD = {"text": "x" * 188}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one message costs, in bytes: its row and log with indexes, its write-ahead log, and its id in Redis."""

    disk: float
    wal: float
    redis: float


def measure(number: int, postgres: PostgresServer, redis: RedisServer) -> Cost:
    """Schedule and deliver so many messages, and as many that wait for a while in Redis."""
    os.environ |= {
        "DATABASE_URL": postgres.url,
        "REDIS_URL": redis.url,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
    }
    import django

    django.setup()

    from django.core.management import call_command

    from django_delayq import handler

    handler(TOPIC)(lambda message: None)
    call_command("migrate", verbosity=0)
    before = _disk(), _wal()
    _schedule(number, delay=0)
    call_command("run_delayq", "--once", verbosity=0)
    after = _disk(), _wal()
    used = _redis(redis, 0)
    _schedule(number, delay="5m")
    # No worker has filled this Redis before, so nobody has put anything into it.
    call_command("delayq_restore", verbosity=0)
    waiting = _redis(redis, number) - used
    return Cost((after[0] - before[0]) / number, (after[1] - before[1]) / number, waiting / number)


def _schedule(number: int, delay: str | int) -> None:
    from django_delayq import schedule_messages

    for first in range(0, number, 1000):
        schedule_messages([{"topic": TOPIC, "payload": PAYLOAD, "delay": delay}] * min(1000, number - first))


def _disk() -> int:
    return _ask("SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname LIKE 'delayq%' AND relkind = 'r'")


def _wal() -> int:
    return _ask("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")


def _ask(statement: str) -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])


def _redis(server: RedisServer, ids: int) -> int:
    """Return the memory in use, once so many ids wait."""
    import redis

    with redis.Redis(port=server.port) as client:
        deadline = time.monotonic() + PATIENCE
        while _waiting(client) < ids:
            if time.monotonic() > deadline:
                sys.exit(f"Redis has {_waiting(client)} of {ids} ids after {PATIENCE} s.")
            time.sleep(0.1)
        info: Any = client.info("memory")
        return int(info["used_memory"])


def _waiting(client: Any) -> int:
    return sum(client.zcard(key) for key in client.scan_iter("*:delayed"))


def table(cost: Cost) -> str:
    """Return the table: what messages at each rate cost, with the default retention and horizon."""
    rows: list[tuple[str, ...]] = [("messages a second", "rows kept", "disk", "WAL a second", "WAL a day", "Redis")]
    for rate in RATES:
        kept = rate * DAY * RETENTION_DAYS
        amounts = (kept * cost.disk, rate * cost.wal, rate * DAY * cost.wal, rate * HORIZON_SECONDS * cost.redis)
        rows.append((f"{rate:,}", f"{kept / 1e6:,.4g} million", *map(size, amounts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join("=" * width for width in widths)
    head, *body = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([line, head, line, *body, line])


def size(amount: float) -> str:
    """Return bytes in the unit that a reader wants: ``4.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.2g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.2g} TB" if amount < 100 else f"{amount:.0f} TB"


def main(number: int) -> None:
    with PostgresServer() as postgres, RedisServer() as redis:
        cost = measure(number, postgres, redis)
    each = f"{cost.disk:,.0f} bytes on disk, {cost.wal:,.0f} of WAL, {cost.redis:,.0f} in Redis"
    print(f"One of {number:,} messages: {each}\n")
    print(table(cost))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
