"""The parts of the time to schedule one message: ``python -m benchmarks.parts [--calls 400] [--rounds 15]``.

Prints one table, from an empty query up to ``schedule_message()``, and the time of the ORM alone for one row. All parts
take turns, on a private PostgreSQL and Redis; ``TMPDIR`` chooses their disk. The columns, in µs: the median and the
least of the rounds from call to return, the CPU time of the caller, and the time from call to return when the server
does not wait for its disk (``synchronous_commit = off``, which a queue must not use).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, NamedTuple

from .own_servers import own_servers

PAYLOAD = {"order": 1, "text": "x" * 170}
# Calls before anything is measured: the server keeps a plan after five.
WARM_CALLS = 50


class Part(NamedTuple):
    name: str
    call: Callable[[], object]
    around: AbstractContextManager[Any] = nullcontext()


class Cost(NamedTuple):
    """The cost of a call in µs."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=400, help="in each measurement")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with own_servers(max_wal_size="8GB", checkpoint_timeout="1h"):
        parts = _parts()
        flushed: dict[str, list[Cost]] = {}
        unflushed: dict[str, list[Cost]] = {}
        for part in parts:
            _measure(part, WARM_CALLS)
        for _ in range(arguments.rounds):
            for setting, costs in (("on", flushed), ("off", unflushed)):
                _set(setting)
                for part in random.sample(parts, len(parts)):
                    costs.setdefault(part.name, []).append(_measure(part, arguments.calls))
        _print(parts, flushed, unflushed)


def _parts() -> list[Part]:
    from django.conf import settings
    from django.test import override_settings

    from benchmarks.app.models import Row
    from django_delayq import schedule_message
    from django_delayq.models import Message
    from django_delayq.record import transitions
    from django_delayq.record.identity import identity
    from django_delayq.record.sql.rows import NewMessage

    from .floors import postgres_alone

    due = datetime.now(UTC) + timedelta(minutes=5)
    payload = json.dumps(PAYLOAD)
    new = NewMessage(payload, None, due, "bench.mark", "default", "{}", None, 0, timedelta(0), None, None, None)
    fields = {"topic": "bench.mark", "payload": PAYLOAD, "due_at": due}

    def insert() -> object:
        return transitions.insert("default", new, "")

    def schedule() -> object:
        return schedule_message("bench.mark", PAYLOAD, due_at=due)

    # As after the start of a worker. Each new row would bring it along.
    identity("default")
    postgres_alone.setup()
    raw = postgres_alone.connection()
    raw.execute("CREATE TABLE one_number (a int)")
    without_redis = override_settings(DELAYQ={**settings.DELAYQ, "REDIS": None})
    return [
        Part("SELECT 1, by psycopg", lambda: raw.execute("SELECT 1")),
        Part("a row of one number, by psycopg", lambda: raw.execute("INSERT INTO one_number VALUES (1)")),
        Part("a narrow row and a log row, by psycopg", lambda: postgres_alone.send(PAYLOAD, due.timestamp())),
        Part("our row", insert),
        Part("schedule_message() without Redis", schedule, without_redis),
        Part("schedule_message()", schedule),
        Part("create() of a narrow row", lambda: Row.objects.create(**fields)),
        Part("create() of our row", lambda: Message(queue="default", **fields).save_base(force_insert=True)),
    ]


def _set(flush: str) -> None:
    from django.db import connection

    from .floors import postgres_alone

    for one in (connection.connection, postgres_alone.connection()):
        one.execute(f"SET synchronous_commit = {flush}")


def _measure(part: Part, calls: int) -> Cost:
    with part.around:
        # The first call with changed settings connects anew.
        part.call()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            part.call()
        return Cost((time.perf_counter() - began) * 1e6 / calls, (time.process_time() - cpu) * 1e6 / calls)


def _print(parts: list[Part], flushed: dict[str, list[Cost]], unflushed: dict[str, list[Cost]]) -> None:
    print(f"{'µs':<42}{'median':>8}{'least':>8}{'CPU':>8}{'no flush':>10}")
    for part in parts:
        walls, cpus = zip(*flushed[part.name], strict=True)
        other = median(cost.wall for cost in unflushed[part.name])
        print(f"{part.name:<42}{median(walls):8.0f}{min(walls):8.0f}{median(cpus):8.0f}{other:10.0f}")


if __name__ == "__main__":
    main()
