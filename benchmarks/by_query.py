"""Measures delivery without Redis behind many rows that it has to pass: ``python -m benchmarks.by_query``.

The rate of one process, and the time of single looks, before and after ``--dead 400000`` messages have come and gone
while another transaction holds its snapshot, so that no vacuum removes their rows. Then the time of a look, and of the
numbers that the console's page of queues shows, beside messages of 1,000 keys whose limits are full. On servers of its
own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

NUMBER = 20_000
KEYS = 1000
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dead", type=int, default=400_000, help="rows that a snapshot holds")
    arguments = parser.parse_args()
    os.environ["BENCH_LIMITS"] = "1"
    from .own_servers import own_servers

    with own_servers():
        # For this process and the workers that it starts.
        os.environ["REDIS_URL"] = ""
        behind_dead_rows(arguments.dead)
        beside_full_keys()


def behind_dead_rows(number: int) -> None:
    """Print rates and times without dead rows, and behind so many."""
    drain(1000)
    before = drain(NUMBER)
    print(f"without dead rows: {before:,.0f} messages a second", flush=True)
    looks()
    with snapshot():
        come_and_go(number)
        after = drain(NUMBER)
        print(f"behind {number} dead rows: {after:,.0f} messages a second, {after / before:.2f} times as many")
        looks()
        single()


def drain(number: int) -> float:
    """Return how many messages a second one process delivers."""
    from django_delayq import schedule_messages
    from django_delayq.models import Message, Transition

    from .recovery import until, worker

    ids = [message.pk for message in schedule_messages({"topic": "bench.noop"} for _ in range(number))]
    with worker("--processes", "1", "-v", "0"):
        until(lambda: not Message.objects.filter(pk__gte=ids[0]).exclude(state="consumed").exists(), 600)
    times = Transition.objects.filter(message_id__gte=ids[0])
    first = times.filter(to_state="running").order_by("at").values_list("at", flat=True)[0]
    last = times.filter(to_state="consumed").order_by("-at").values_list("at", flat=True)[0]
    return number / (last - first).total_seconds()


def single() -> None:
    """Print how late a message of an idle worker begins that is due at once."""
    from django_delayq import schedule_message

    from .recovery import quantiles, starts, until, worker

    with worker("--processes", "1", "-v", "0"):
        ids = []
        for place in range(20):
            time.sleep(0.23)
            ids.append(schedule_message("bench.noop").pk)
            until(lambda: len(starts(ids)) == place + 1)  # noqa: B023
        p50, _p99, most = quantiles(sorted(lates[0] * 1000 for lates in starts(ids).values()))
    print(f"    single messages (a look a second): late by p50 {p50:.0f}, at most {most:.0f} ms", flush=True)


def looks() -> None:
    """Print the times of single looks, in milliseconds."""
    from django_delayq.broker.database import DatabaseBroker
    from django_delayq.record import crashes
    from django_delayq.record.low_water import LowWater
    from django_delayq.record.sql import statements

    broker = DatabaseBroker("default", lambda: ["bench.noop", "bench.keyed"])
    report("a look at one queue", lambda: broker.take("default", 10))
    report("a look at all queues", lambda: broker.due_queues(None))
    report("the list of queues, for the process on duty", lambda: statements("default").queues())
    marks = LowWater(), LowWater()
    report("the reaper's look", lambda: crashes.anything_expired("default", *marks))


def report(what: str, look: Callable[[], Any]) -> None:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        look()
        times.append((time.perf_counter() - began) * 1000)
    print(f"    {what}: {median(times):.1f} ms, the first time {times[0]:.1f}, at most {max(times):.1f}", flush=True)


@contextmanager
def snapshot() -> Iterator[None]:
    """Hold a snapshot in another session."""
    from django.db import connection

    other = connection.copy()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM delayq_message")
        cursor.fetchone()
    try:
        yield
    finally:
        other.close()


def come_and_go(number: int) -> None:
    """Write messages, as if they had been claimed and deleted."""
    from django.db import connection

    from django_delayq import schedule_messages

    ids = [message.pk for message in schedule_messages({"topic": "bench.noop"} for _ in range(number))]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE delayq_message SET state = 'running', deliveries = 1, leased_until = clock_timestamp()"
            " WHERE id BETWEEN %s AND %s",
            [ids[0], ids[-1]],
        )
        cursor.execute("DELETE FROM delayq_message WHERE id BETWEEN %s AND %s", [ids[0], ids[-1]])


def beside_full_keys() -> None:
    """Print how long looks take while the limits of many keys are full."""
    from django_delayq import schedule_messages
    from django_delayq.core.limits import topic_name
    from django_delayq.inspector.stats import take_snapshot
    from django_delayq.record import admission
    from django_delayq.record.sql.rows import ALL_CHANGES, Claiming, Ticket

    from .limits import empty

    empty()
    keys = [f"key-{place}" for place in range(KEYS)]
    first = schedule_messages({"topic": "bench.keyed", "limit_key": key} for key in keys)
    limits = {message.pk: [topic_name("bench.keyed", key)] for message, key in zip(first, keys, strict=True)}
    tickets = [Ticket(message.pk) for message in first]
    admission.admit("default", Claiming(tickets, {"bench.keyed": 600.0}, "w", None, 0.0, ALL_CHANGES), limits)
    schedule_messages({"topic": "bench.keyed", "limit_key": keys[place % KEYS]} for place in range(NUMBER))
    print(f"beside {NUMBER} messages of {KEYS} keys whose limits are full", flush=True)
    assert len(admission.full("default")) == KEYS
    report("the names of full limits", lambda: admission.full("default"))
    looks()
    report("the numbers of the queues", lambda: take_snapshot("default"))


if __name__ == "__main__":
    main()
