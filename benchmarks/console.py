"""Measures each page of the console: ``python -m benchmarks.console [--rows 300000]``.

On servers of its own, without fsync, it fills the tables with a realistic mix, and prints for each page its statements,
the best time of five, and what a busy machine touches less: the CPU time of Python, the time that PostgreSQL counts for
the statements, and the blocks of 8 kB that they read. Then it asks for each page once behind locked tables, before a
database that takes no writes, before a busy one, and while Redis is frozen: each must answer, with all or with a
sentence. ``*`` marks what misses its goal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg

from . import tables
from .growth import NAMES, Task, answers, measure, pages
from .growth_rows import fill
from .own_servers import set_up_django

TURNS, SCHEDULES = 5, 300
# Milliseconds of a page, of an answer, and of a page during a fault; and statements of a page.
PAGE, ANSWER, FAULT, STATEMENTS = 300.0, 1000.0, 2000.0, 25
BUSY = "SELECT count(*) FROM delayq_message a, generate_series(1, 100000) b"


def main() -> None:
    from testproject.servers import PostgresServer, RedisServer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--only", default="", help="only what has this in its name")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
    settings["shared_preload_libraries"] = "pg_stat_statements"
    with RedisServer() as redis, PostgresServer(**settings) as postgres:
        _set_up(redis.url, postgres.url)
        waiting = arguments.rows // 10
        fill(arguments.rows - waiting, waiting, NAMES)
        _schedules()
        tasks = [task for task in [*pages(), *_schedule_pages()] if arguments.only in task.name]
        rows = [
            ["page", "statements", "best of five, ms", "of it Python, ms", "PostgreSQL, ms", "blocks"],
            *map(_measured, tasks),
        ]
        print(f"\n{arguments.rows:,} messages\n\n{tables.as_text(rows)}", flush=True)
        faults = {"locked": _locked, "read only": _read_only, "busy": _busy, "Redis frozen": redis_frozen(redis)}
        found = {name: _during(fault, tasks, postgres.url) for name, fault in faults.items()}
        told = [["page", *found], *([task.name, *(each[task.name] for each in found.values())] for task in tasks)]
        print(f"\nms during a fault\n\n{tables.as_text(told)}", flush=True)
        rows = [["answer", "ms"], *([task.name, _told(measure(task).times, ANSWER)] for task in answers())]
        print(f"\n{tables.as_text(rows)}", flush=True)


def _set_up(redis: str, postgres: str) -> None:
    import os

    settings = {"DJANGO_SETTINGS_MODULE": "testproject.settings", "REDIS_URL": redis, "DATABASE_URL": postgres}
    os.environ.update(settings, DEBUG="0")
    set_up_django()
    from django.db import connection

    from django_delayq import handler

    for name in ["bulk", *(f"grown.{number}" for number in range(NAMES))]:
        handler(name)(_nothing)
    with connection.cursor() as cursor:
        cursor.execute("CREATE EXTENSION pg_stat_statements")


def _nothing(message: Any) -> None: ...


def _schedules() -> None:
    from django_delayq.recurring import create_schedule, pause_schedule

    for number in range(SCHEDULES):
        create_schedule(f"schedule.{number}", f"grown.{number % NAMES}", every=f"{5 + number}m", tz="UTC")
    pause_schedule("schedule.7", duration="1h")


def _schedule_pages() -> Iterator[Task]:
    from django.urls import reverse

    from .growth import _client, _forget, _page

    client, change = _client(), reverse("admin:delayq_recurring_schedule_change", args=["schedule.3"])
    yield Task("page: a schedule", lambda prepared: _page(client, change, prepared), prepare=_forget)


def _measured(task: Task) -> list[str]:
    from django.db import connection

    times, python, statements, server, blocks = [], [], 0, 0.0, 0
    for _turn in range(TURNS):
        prepared = task.prepare()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_statements_reset()")
        began, used = time.perf_counter(), time.process_time()
        task.act(prepared)
        times.append((time.perf_counter() - began) * 1000)
        python.append((time.process_time() - used) * 1000)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT sum(calls), sum(total_exec_time + total_plan_time), sum(shared_blks_hit + shared_blks_read)"
                " FROM pg_stat_statements WHERE query !~* "
                "'^(SET|SHOW|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SELECT pg_stat|SELECT set_config)'"
            )
            statements, server, blocks = cursor.fetchone()
    mark = "*" if statements > STATEMENTS else ""
    row = [task.name, f"{statements}{mark}", _told(times, PAGE), f"{min(python):.0f}", f"{server:.0f}", f"{blocks:,}"]
    print(*row, sep=" | ", flush=True)
    return row


def _told(times: list[float], goal: float) -> str:
    return f"{min(times):.0f}{'*' if min(times) > goal else ''}" if times else "refused*"


def _during(fault: Callable[[str], Any], tasks: list[Task], url: str) -> dict[str, str]:
    with fault(url):
        found = {task.name: _told([_once(task)], FAULT) for task in tasks}
    print(fault.__name__, found, flush=True)
    return found


def _once(task: Task) -> float:
    prepared, began = task.prepare(), time.perf_counter()
    try:
        task.act(prepared)
    except Exception as error:  # noqa: BLE001
        # A sentence in place of the page has the status 503.
        if "503" not in str(error):
            print(f"{task.name}: {error!r}", flush=True)
    return (time.perf_counter() - began) * 1000


@contextmanager
def _locked(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        names = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'delayq%' AND relkind = 'r'")
        connection.execute(f"LOCK TABLE {', '.join(name for (name,) in names)} IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def _read_only(_url: str) -> Iterator[None]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")
    yield
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = off")


@contextmanager
def _busy(url: str) -> Iterator[None]:
    import threading

    with ExitStack() as stack:
        for _number in range(8):
            connection = stack.enter_context(psycopg.connect(url, autocommit=True))
            thread = threading.Thread(target=_spin, args=(connection,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(connection.cancel)
        yield


def _spin(connection: psycopg.Connection[Any]) -> None:
    try:
        connection.execute(BUSY)
    except psycopg.errors.QueryCanceled:
        return


def redis_frozen(redis: Any) -> Callable[[str], Any]:
    """Return a context in which this Redis answers nothing."""

    @contextmanager
    def frozen(_url: str) -> Iterator[None]:
        redis.freeze()
        yield
        redis.thaw()

    return frozen


if __name__ == "__main__":
    main()
