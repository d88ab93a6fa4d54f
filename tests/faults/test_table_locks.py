"""A lock on a table that lasts longer than the leases: of VACUUM FULL, of a migration, of LOCK TABLE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Ticket
from testproject.servers import PostgresServer
from tests.support.processes import Gate, Start
from tests.support.record_of import log_of, wait_until
from tests.support.rows import unguarded
from tests.support.workers import eventually

WAITING = "SELECT count(DISTINCT pid) >= 3 FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
LAST = "greatest(m.leased_until, l.until)"
LEASES = (
    "SELECT coalesce(bool_and({} < clock_timestamp()), false) FROM delayq_message m"
    " LEFT JOIN delayq_lease l ON l.message_id = m.id WHERE m.state = 'running'"
)


@contextmanager
def locked(server: PostgresServer, table: str, mode: str) -> Iterator[psycopg.Connection]:
    """Lock a table in a transaction that lasts as long as the block."""
    with psycopg.connect(server.url) as other:
        other.execute(f"LOCK TABLE {table} IN {mode} MODE")
        yield other


def is_true(other: psycopg.Connection, sql: str, *values: object) -> bool:
    row = other.execute(sql, values).fetchone()
    assert row is not None
    return bool(row[0])


def left_by_a_dead_worker() -> Message:
    """Return a message whose lease has run out, and whose worker will never be heard of again."""
    message = schedule_message("t.queued")
    assert transitions.claim("default", [Ticket(message.pk)], {"t.queued": 1.0}, "a dead worker")
    unguarded(Message).filter(pk=message.pk).update(leased_until=reads.now("default") - timedelta(hours=1))
    return message


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        ("delayq_message", "ACCESS EXCLUSIVE"),
        # Everybody may read.
        ("delayq_message", "EXCLUSIVE"),
        # Rows can be locked, and not be changed.
        ("delayq_message", "SHARE"),
        ("delayq_lease", "ACCESS EXCLUSIVE"),
        ("delayq_lease", "EXCLUSIVE"),
    ],
)
def test_a_handler_whose_lease_ran_out_behind_a_lock_on_a_table_runs_once(
    start: Start, postgres_server: PostgresServer, gate: Gate, table: str, mode: str
) -> None:
    workers = [start("--queue", "default"), start("--queue", "default")]
    messages = [schedule_message("t.short_lease", gate.payload) for _ in workers]
    eventually(lambda: gate.how_many_began() == 2, "both handlers run")
    with locked(postgres_server, table, mode) as other:
        if mode == "SHARE":
            eventually(lambda: is_true(other, LEASES.format("m.leased_until")), "the first leases run out")
            eventually(lambda: is_true(other, f"SELECT NOT ({LEASES.format(LAST)})"), "the leases are renewed")
        else:
            eventually(lambda: is_true(other, LEASES.format(LAST)), "the leases run out")
            eventually(lambda: is_true(other, WAITING, table), "both renewals and a reaper wait")
    # Each reaper acts on this one after the lock.
    dead = left_by_a_dead_worker()
    wait_until(dead, State.SCHEDULED)
    assert log_of(dead)[-1].reason == "lease ran out"
    gate.open()
    for message in messages:
        wait_until(message, State.CONSUMED)
        assert (message.deliveries, message.crashes) == (1, 0)
    assert gate.how_many_began() == 2
    for worker in workers:
        assert worker.count("lease of .* is lost") == 0
