"""The adapter of django-delayq itself, and what only it is asked."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")

TABLES = ["delayq_message", "delayq_transition", "delayq_worker", "benchmarks_effect", "benchmarks_row"]

# So many rows in each statement of a fill.
FILL = 1_000_000

# What the next messages are for: "bench.mark" does nothing, "bench.insert" inserts a row in its transaction.
topic = "bench.mark"

# A payload of 200 bytes.
PAYLOAD = "jsonb_build_object('n', n, 'due', 0, 'pad', repeat('x', 168))"

# Half of them within the horizon of the growth workloads (see workloads.HORIZON), half beyond it, one by one; the due
# times of each half in no order.
WAITING = f"""
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, attempts, deliveries,
    reported, excused, moves, worker, cancel_requested)
SELECT 'bench.mark', 'default', 0, 'scheduled', {PAYLOAD}, '{{}}',
       now() + (n %% 2) * interval '1 d' + interval '3 h' + floor(7200000 * random()) * interval '1 ms',
       now(), 0, 0, 0, 0, 1, '', false
  FROM generate_series(1, %(rows)s::int) n
"""

# All due within ``%(within)s`` ms, from the epoch time ``%(due)s`` (ms) on.
BURST = """
INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, attempts, deliveries,
    reported, excused, moves, worker, cancel_requested)
SELECT 'bench.mark', 'default', 0, 'scheduled',
       jsonb_build_object('n', n, 'due', ms / 1000.0, 'pad', repeat('x', 160)), '{}',
       'epoch'::timestamptz + ms * interval '1 ms', now(), 0, 0, 0, 0, 1, '', false
  FROM generate_series(1, %(rows)s::int) n, LATERAL (SELECT %(due)s::bigint + n * %(within)s::bigint / %(rows)s) d(ms)
"""

# Over the last 20 days: what is older than the retention would be deleted meanwhile.
HISTORY = f"""
WITH m AS (
    INSERT INTO delayq_message (topic, queue, priority, state, payload, headers, due_at, created_at, finished_at,
        attempts, deliveries, reported, excused, moves, worker, cancel_requested)
    SELECT 'bench.mark', 'default', 0, 'consumed', {PAYLOAD}, '{{}}', at, at, at, 0, 1, 1, 0, 3, '', false
      FROM generate_series(1, %(rows)s::int) n,
           LATERAL (SELECT now() - (20 - 19.0 * n / %(rows)s) * interval '1 d') d(at)
    RETURNING id, due_at
)
INSERT INTO delayq_transition (message_id, number, at, from_state, to_state, attempt, due_at, actor, reason, error,
    traceback)
SELECT id, number, due_at, nullif((ARRAY['', 'scheduled', 'running'])[number], ''),
       (ARRAY['scheduled', 'running', 'consumed'])[number], (ARRAY[0, 1, 1])[number], due_at, '', '', '', ''
  FROM m, generate_series(1, 3) number
"""


def setup() -> None:
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)


def ready() -> None:
    """Redis was emptied: give it a horizon, as a worker that has run would have."""
    django.setup()
    from django.core.management import call_command

    from django_delayq import cancel_message, schedule_message

    message = schedule_message("bench.mark", delay=3600)
    call_command("delayq_restore", json=True)
    cancel_message(message)
    _execute("TRUNCATE delayq_message, delayq_transition")


def choose(name: str) -> None:
    global topic  # noqa: PLW0603
    topic = name


def send(payload: dict[str, Any], due: float | None) -> None:
    from django_delayq import schedule_message

    schedule_message(topic, payload, due=_datetime(due))


def send_many(payloads: list[dict[str, Any]], due: float | None) -> None:
    from django_delayq import schedule_messages

    at = _datetime(due)
    schedule_messages({"topic": topic, "payload": payload, "due": at} for payload in payloads)


def inside() -> AbstractContextManager[Any]:
    from django.db import transaction

    return transaction.atomic()


def worker() -> list[str]:
    return ["-m", "django", "run_delayq", "--processes", "1"]


def settled() -> bool:
    """Whether the outcome of everything that is due is written down. Asks along the indexes, whatever else is there."""
    from django.db.models.functions import Now

    from django_delayq.models import Message
    from django_delayq.states import State

    running = Message.objects.filter(state=State.RUNNING)
    waiting = Message.objects.filter(state=State.SCHEDULED, queue="default", due_at__lte=Now())
    return not (running.exists() or waiting.exists())


def fill(rows: int, what: str) -> None:
    """So many more messages waiting (half of them in Redis too), or so many more finished ones."""
    from django.core.management import call_command

    _execute("SET maintenance_work_mem = '512MB'")
    for start in range(0, rows, FILL):
        _execute(WAITING if what == "waiting" else HISTORY, {"rows": min(FILL, rows - start)})
    _execute("VACUUM ANALYZE delayq_message, delayq_transition")
    _execute("CHECKPOINT")
    if what == "waiting":
        call_command("delayq_restore", json=True)


def fill_due(rows: int, due: float, within: float) -> None:
    """So many messages, all due within so many seconds from that epoch time on, and in Redis."""
    from django.core.management import call_command

    _execute(BURST, {"rows": rows, "due": round(due * 1000), "within": round(within * 1000)})
    _execute("VACUUM ANALYZE delayq_message")
    call_command("delayq_restore", json=True)


def urgent(number: int, due: float) -> None:
    """One message with the highest priority."""
    from benchmarks.peers.line import payload
    from django_delayq import schedule_message

    schedule_message(topic, payload(number, due), due=_datetime(due), priority=100)


def workers() -> int:
    """How many worker processes have told that they are there."""
    from django_delayq.models import Worker

    return Worker.objects.count()


def restore(rows: int) -> dict[str, float]:
    """Restores of so many rows, each into an empty Redis: see ``recovery.Restored``."""
    from . import recovery

    return recovery.restore(os.environ["REDIS_URL"], rows)._asdict()


def killed() -> dict[str, float]:
    """Seconds until what ran is done, after SIGKILL of a worker process, and of a whole worker."""
    from . import recovery

    process, whole = recovery.killed()
    return {"process": process, "worker": whole}


def _datetime(due: float | None) -> datetime | None:
    return None if due is None else datetime.fromtimestamp(due, UTC)


def _execute(sql: str, parameters: Any = None) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
