"""The adapter of django-delayq itself, with calls that only this adapter has."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import django

from benchmarks.peers.adapter_process import AT_ONCE

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")

TABLES = ["delayq_message", "delayq_log", "delayq_place", "delayq_worker", "benchmarks_effect", "benchmarks_row"]

# Rows in each statement of a fill.
FILL_ROWS = 1_000_000

# The topic of the next messages: "bench.mark" does nothing, "bench.insert" inserts a row in its transaction, and
# "bench.await" waits for 100 ms on the event loop.
topic = "bench.mark"
# The queues that the next messages go to in turn.
queues = itertools.cycle(["default"])

# The limit keys that the next messages in bulk have in turn; None: they have none.
limit_keys: Iterator[str] | None = None

# A payload of 200 bytes.
PAYLOAD = "jsonb_build_object('n', n, 'due', 0, 'pad', repeat('x', 168))"

# Waiting messages: in turn one within the horizon of the growth workloads (workloads.HORIZON_SECONDS), and one beyond
# it. The due times of each half are in no order.
WAITING = f"""
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, attempts, deliveries,
    reported, excused, moves, worker, cancel_requested)
SELECT 'bench.mark', 'default', 0, 'scheduled', {PAYLOAD}, '{{}}',
       now() + (n %% 2) * interval '1 d' + interval '3 h' + floor(7200000 * random()) * interval '1 ms',
       now(), 0, 0, 0, 0, 1, '', false
  FROM generate_series(1, %(rows)s::int) n
"""

# Messages that are due within ``%(within)s`` ms, from the epoch time ``%(due)s`` (ms) on.
BURST = """
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, attempts, deliveries,
    reported, excused, moves, worker, cancel_requested)
SELECT 'bench.mark', 'default', 0, 'scheduled',
       jsonb_build_object('n', n, 'due', ms / 1000.0, 'pad', repeat('x', 160)), '{}',
       'epoch'::timestamptz + ms * interval '1 ms', now(), 0, 0, 0, 0, 1, '', false
  FROM generate_series(1, %(rows)s::int) n, LATERAL (SELECT %(due)s::bigint + n * %(within)s::bigint / %(rows)s) d(ms)
"""

# Finished messages of the last 20 days: older ones would be pruned meanwhile.
HISTORY = f"""
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, created_by,
    finished_at, claimed_at, claimed_by, consumed_by, attempts, deliveries, reported, excused, moves, worker,
    cancel_requested)
SELECT 'bench.mark', 'default', 0, 'consumed', {PAYLOAD}, '{{}}', at, at, '', at, at, 'bench/1/0123456789ab',
       'worker:bench/1/0123456789ab/1', 0, 1, 1, 0, 3, '', false
  FROM generate_series(1, %(rows)s::int) n,
       LATERAL (SELECT now() - (20 - 19.0 * n / %(rows)s) * interval '1 d') d(at)
"""


def setup() -> None:
    from .own_servers import set_up_django

    set_up_django()


def ready() -> None:
    """Give the emptied Redis a horizon, as a worker that has run does. Does nothing without Redis."""
    django.setup()
    if not os.environ["REDIS_URL"]:
        return
    from django.core.management import call_command

    from django_delayq import cancel_message, schedule_message

    message = schedule_message("bench.mark", delay=3600)
    call_command("delayq_restore", json=True)
    cancel_message(message)
    _execute("TRUNCATE delayq_message, delayq_log")


def choose(name: str) -> None:
    global topic  # noqa: PLW0603
    topic = name


def spread(over: int) -> None:
    """Have the next messages go to so many queues."""
    global queues  # noqa: PLW0603
    queues = itertools.cycle([f"tenant-{n}" for n in range(over)])


def spread_over_keys(over: int) -> None:
    """Have the next messages in bulk have so many limit keys."""
    global limit_keys  # noqa: PLW0603
    limit_keys = itertools.cycle([f"customer-{n}" for n in range(over)])


def send(payload: dict[str, Any], due: float | None) -> None:
    from django_delayq import schedule_message

    schedule_message(topic, payload, due_at=_datetime(due), queue=next(queues))


def send_many(payloads: list[dict[str, Any]], due: float | None) -> None:
    from django_delayq import schedule_messages

    at = _datetime(due)
    if limit_keys is None:
        schedule_messages({"topic": topic, "payload": payload, "due_at": at} for payload in payloads)
        return
    schedule_messages(
        {"topic": topic, "payload": payload, "due_at": at, "limit_key": key}
        for payload, key in zip(payloads, limit_keys, strict=False)
    )


def send_together(messages: list[tuple[dict[str, Any], float]]) -> None:
    """Schedule some messages with one call, as a view does that makes several."""
    from django_delayq import schedule_messages

    schedule_messages({"topic": topic, "payload": payload, "due_at": _datetime(due)} for payload, due in messages)


def inside() -> AbstractContextManager[Any]:
    from django.db import transaction

    return transaction.atomic()


def recur(number: int) -> None:
    """Make schedules that have an occurrence each second."""
    from django.core.management import call_command

    from django_delayq.recurring import create_schedule

    call_command("migrate", verbosity=0)
    for n in range(number):
        create_schedule(f"bench.{n}", "bench.recurring", n, every="1s", missed="all")


def worker() -> list[str]:
    waiting = ["--async-concurrency", str(AT_ONCE)] if AT_ONCE else []
    return ["-m", "django", "run_delayq", "--processes", "1", *waiting]


def all_recorded() -> bool:
    """Return whether the outcome of every due message is recorded. Reads along indexes, however many rows there are."""
    from django.db.models.functions import Now

    from django_delayq.core.states import State
    from django_delayq.models import Message

    running = Message.objects.filter(state=State.RUNNING)
    waiting = Message.objects.filter(state=State.SCHEDULED, queue="default", due_at__lte=Now())
    return not (running.exists() or waiting.exists())


def fill(rows: int, what: str) -> None:
    """Add waiting messages (half of them in Redis too) or finished messages."""
    from django.core.management import call_command

    _execute("SET maintenance_work_mem = '512MB'")
    for start in range(0, rows, FILL_ROWS):
        _execute(WAITING if what == "waiting" else HISTORY, {"rows": min(FILL_ROWS, rows - start)})
    _execute("VACUUM ANALYZE delayq_message, delayq_log")
    _execute("CHECKPOINT")
    if what == "waiting":
        call_command("delayq_restore", json=True)


def fill_due(rows: int, due: float, within: float) -> None:
    """Add messages, in Redis too, that fall due within ``within`` seconds from the epoch time ``due`` on."""
    from django.core.management import call_command

    _execute(BURST, {"rows": rows, "due": round(due * 1000), "within": round(within * 1000)})
    _execute("VACUUM ANALYZE delayq_message")
    call_command("delayq_restore", json=True)


def urgent(number: int, due: float) -> None:
    """Schedule one message with the highest priority."""
    from benchmarks.peers.adapter_process import payload
    from django_delayq import schedule_message

    schedule_message(topic, payload(number, due), due_at=_datetime(due), priority=100)


def send_now(number: int, queue: str, topic: str) -> None:
    """Schedule one message that is due now. Its payload holds the time of the call as its due time."""
    from benchmarks.peers.adapter_process import payload
    from django_delayq import schedule_message

    schedule_message(topic, payload(number, time.time()), queue=queue)


def workers() -> int:
    """Return how many worker processes have a row in the table of workers."""
    from django_delayq.models import Worker

    return Worker.objects.count()


def restore(rows: int) -> dict[str, float]:
    """Restore ``rows`` rows several times, each time into an empty Redis: see ``recovery.Restored``."""
    from . import recovery

    return recovery.restore(os.environ["REDIS_URL"], rows)._asdict()


def finished_before(days: float) -> int:
    """Return how many messages finished more than so many days ago."""
    from django_delayq.models import Message

    return Message.objects.filter(finished_at__lt=datetime.now(UTC) - timedelta(days=days)).count()


def killed() -> dict[str, float]:
    """Return the seconds until all is consumed after SIGKILL of a worker process, and of a whole worker."""
    from . import recovery

    process, whole = recovery.killed()
    return {"process": process, "worker": whole}


def _datetime(due: float | None) -> datetime | None:
    return None if due is None else datetime.fromtimestamp(due, UTC)


def _execute(sql: str, parameters: Any = None) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
