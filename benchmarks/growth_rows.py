"""Fills the tables for the measurements of growth, in a realistic mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Rollups that a queue with a topic of its own has at most: for two days one a minute, and for two months one an hour.
ROLLUPS = ({"seconds": 60, "first": -60, "last": 2880}, {"seconds": 3600, "first": 49, "last": 1440})


def fill(finished: int, waiting: int, names: int) -> None:
    """Write messages of ``names`` queues, each with a topic of its own, and what a month leaves besides.

    Of those that were due in the past, in the order of their ids, nearly all are consumed, and some are dead,
    cancelled, expired, running or overdue. The others fall due within the next week, in no order.
    """
    from django.core.management import call_command
    from django.db import connection

    # With many names few of them have messages in each minute.
    every = max(1, names // 100)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE delayq_message, delayq_log, delayq_rollup RESTART IDENTITY CASCADE")
        cursor.execute("SELECT setseed(0.5)")
        with _without_indexes(cursor):
            cursor.execute(_MESSAGES.format(finished=finished, rows=finished + waiting, names=names))
        cursor.execute(_LOG)
        for rollups in ROLLUPS:
            cursor.execute(_ROLLUP.format(names=names, every=every, **rollups))
    _act()
    _show_workers()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    call_command("delayq_restore", json=True, verbosity=0)


@contextmanager
def _without_indexes(cursor: Any) -> Iterator[None]:
    """Build the indexes at the end: that takes half the time."""
    cursor.execute(
        """
        SELECT i.indexrelid::regclass, pg_get_indexdef(i.indexrelid) FROM pg_index i
         WHERE i.indrelid = 'delayq_message'::regclass AND NOT i.indisprimary
        """
    )
    indexes: Sequence[tuple[str, str]] = cursor.fetchall()
    for name, _definition in indexes:
        cursor.execute(f"DROP INDEX {name}")
    yield
    for _name, definition in indexes:
        cursor.execute(definition)


_ERROR = """(ARRAY['TimeoutError', 'ConnectionError: refused', 'ValueError: invalid literal', 'KeyError',
                   'HTTPError: 503', 'crashed'])[1 + n % 6]"""

_MESSAGES = f"""
INSERT INTO delayq_message (topic, queue, key, priority, payload, headers, due_at, created_at, state, finished_at,
    attempts, deliveries, reported, excused, moves, leased_until, worker, cancel_requested, error,
    created_by, claimed_at, claimed_by, consumed_by)
SELECT 'grown.' || n % {{names}}, 'queue-' || n % {{names}},
       CASE WHEN n % 5 = 0 OR state = 'dead' THEN 'order-' || n END, 0,
       jsonb_build_object('order', jsonb_build_object('id', n, 'total', n % 1000), 'customer', md5(n::text)),
       '{{{{}}}}', due, least(due, now()) - interval '1 day', state,
       CASE WHEN state IN ('consumed', 'dead', 'cancelled', 'expired') THEN due + chance * interval '20 s' END,
       failed, delivered, failed + (state = 'consumed')::int, 0, 1 + 2 * delivered,
       CASE state WHEN 'running' THEN now() + interval '1 day' END,
       CASE state WHEN 'running' THEN 'worker-' || n % 4 ELSE '' END, false,
       CASE WHEN failed > 0 THEN {_ERROR} ELSE '' END,
       CASE WHEN usual THEN 'process:web/1' END, CASE WHEN usual AND delivered > 0 THEN due + interval '1 ms' END,
       CASE WHEN usual AND delivered > 0 THEN 'worker-1' END,
       CASE WHEN usual AND state = 'consumed' THEN 'worker:worker-1' END
  FROM (SELECT n, chance, state, due, failed,
               -- The row of a message is the log of its usual life.
               state IN ('scheduled', 'running', 'consumed') AND failed = 0 AS usual,
               CASE WHEN state IN ('consumed', 'dead', 'running') THEN greatest(failed + (state <> 'dead')::int, 1)
                    ELSE failed END AS delivered
          FROM (SELECT n, chance, state, due,
                       CASE WHEN state = 'dead' THEN 5 WHEN another < 0.002 THEN 1 ELSE 0 END AS failed
                  FROM (SELECT n, chance, random() AS another,
                               CASE WHEN n > {{finished}} THEN 'scheduled'
                                    WHEN chance < 0.0025 THEN 'scheduled'
                                    WHEN chance < 0.0026 THEN 'running'
                                    WHEN chance < 0.0400 THEN 'dead'
                                    WHEN chance < 0.0450 THEN 'cancelled'
                                    WHEN chance < 0.0475 THEN 'expired'
                                    ELSE 'consumed' END AS state,
                               CASE WHEN n > {{finished}} THEN now() + interval '1 h' + random() * interval '7 days'
                                    WHEN chance < 0.0026 THEN now() - random() * interval '2 h' - interval '60 s'
                                    ELSE now() - interval '30 days' * (1.0001 - n::float / {{finished}})
                                         - random() * interval '60 s' END AS due
                          FROM (SELECT n, random() AS chance FROM generate_series(1, {{rows}}) n) numbers) rolled
               ) told
       ) counted
"""

_LOG = """
INSERT INTO delayq_log (message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor, reason,
    error, traceback)
SELECT m.id, step, CASE step WHEN 1 THEN created_at ELSE due_at + step * interval '1 s' END,
       CASE WHEN step = 1 THEN NULL WHEN step % 2 = 0 THEN 'scheduled' ELSE 'running' END,
       CASE WHEN step = moves THEN state WHEN step % 2 = 0 THEN 'running' ELSE 'scheduled' END,
       step / 2, due_at, NULL, 'worker:worker-1', '', CASE WHEN step % 2 = 1 AND step > 1 THEN error ELSE '' END, ''
  FROM (SELECT * FROM delayq_message WHERE created_by IS NULL ORDER BY finished_at DESC LIMIT 200000) m,
       generate_series(1, moves) step
"""

_ROLLUP = """
INSERT INTO delayq_rollup (seconds, at, queue, topic, consumed, retried, dead, expired, late_1, late_2, late_5, late_10,
    late_20, late_50, late_100, late_200, late_500, late_1000, late_2000, late_5000, late_10000, late_30000, late_60000,
    late_600000, late_more, run_1, run_5, run_20, run_100, run_500, run_us)
SELECT {seconds}, date_trunc('hour', now()) - step * interval '{seconds} s', 'queue-' || n % {names},
       'grown.' || n % {names},
       4 * {seconds} / 60, 1, 1, 0, 2, 3, 5, 20, 10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 20, 8, 3, 1, 500000
  FROM generate_series({first}, {last}) step, generate_series(0, {names} - 1) n
 WHERE (n + step) % {every} = 0
"""


def _act() -> None:
    """Write operations, and the audit of what people did."""
    from django_delayq.console.models import AuditEvent, Operation

    common = {"action": "requeue", "reason": "the server is back"}
    Operation.objects.bulk_create(
        [Operation(described="state is dead", started_by="user:anna", state="done", **common) for _ in range(1000)]
    )
    AuditEvent.objects.bulk_create(
        [AuditEvent(actor="user:anna", target="state is dead", **common) for _ in range(20_000)], batch_size=5000
    )


def _show_workers() -> None:
    """Write the rows of four worker processes that are alive now."""
    from datetime import timedelta

    from django.utils import timezone

    from django_delayq.models import Worker

    Worker.objects.all().delete()
    now = timezone.now()
    seen = now + timedelta(minutes=1)
    Worker.objects.bulk_create(
        Worker(name=f"worker-{n}", host="web", pid=n, threads=50, started_at=now, seen_at=seen) for n in range(4)
    )
