"""PgBouncer in transaction mode, with nothing set for it: each transaction may get another server connection."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record.sql.sessions import known_session
from testproject.binaries import PGBOUNCER_ADVICE
from testproject.servers import PgBouncerServer, PostgresServer, find_pgbouncer
from tests.support.processes import Gate, Start
from tests.support.record_of import consumed, effects_per_message, once_each, wait_until
from tests.support.workers import ROOT, eventually

from .program import Program

THREADS, EACH = 8, 25

# Threads that schedule by turns, as views do, each with another kind of call.
PRODUCER = f"""
import threading
import django
django.setup()
from django.db import connection
from django_delayq import cancel_message, reschedule_message, schedule_message, schedule_messages
errors = []
def schedule(number):
    try:
        for turn in range({EACH}):
            if turn % 5 == 0:
                schedule_messages([{{"topic": "t.tx"}}])
            elif turn % 5 == 1:
                message = schedule_message("t.tx", key=f"{{number}}-{{turn}}", delay="1h")
                assert reschedule_message(message, delay=0)
            else:
                schedule_message("t.tx", {{"number": number, "turn": turn}})
        assert cancel_message(schedule_message("t.tx", delay="1h"))
    except BaseException as error:
        errors.append(repr(error))
    finally:
        connection.close()
threads = [threading.Thread(target=schedule, args=(number,)) for number in range({THREADS})]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""


@pytest.fixture
def pooler(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[PgBouncerServer]:
    """A pooler between the database and the processes that the test starts from now on."""
    if find_pgbouncer() is None:
        pytest.skip(f"no pgbouncer found. {PGBOUNCER_ADVICE}")
    with PgBouncerServer(postgres_server) as server:
        monkeypatch.setenv("DATABASE_URL", server.url)
        yield server


def producer() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    return subprocess.Popen(
        [sys.executable, "-c", PRODUCER],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_views_and_workers_share_server_connections_without_any_setting(start: Start, pooler: PgBouncerServer) -> None:
    workers = [start("--threads", "4"), start("--threads", "4")]
    with producer() as process:
        said, _errors = process.communicate(timeout=120)
    assert process.returncode == 0, said
    live = Message.objects.exclude(state=State.CANCELLED)
    assert live.count() == THREADS * EACH
    eventually(lambda: not live.exclude(state=State.CONSUMED).exists(), "all are delivered")
    assert effects_per_message() == once_each(list(live))
    for worker in workers:
        assert worker.count("prepared statement|does not exist|failed|claims nothing") == 0


def test_commands_work_behind_a_pooler(start: Start, pooler: PgBouncerServer) -> None:
    worker = start()
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    for arguments in (["delayq_stats"], ["delayq_check"], ["delayq_check", "redis"], ["delayq_restore", "--dry-run"]):
        with Program("django", *arguments) as command:
            assert command.wait() == 0, (arguments, command.log)
    assert worker.stop() == 0


def test_a_long_handler_keeps_its_lease_behind_a_pooler(start: Start, pooler: PgBouncerServer, gate: Gate) -> None:
    start("--threads", "2")
    message = schedule_message("t.short_lease_tx", gate.payload)
    eventually(lambda: gate.begun(message.pk), "the handler begins")
    others = [schedule_message("t.tx") for _ in range(20)]
    eventually(consumed(len(others)), "the others are delivered beside it")
    gate.open()
    wait_until(message, State.CONSUMED)
    assert message.deliveries == 1


@pytest.mark.django_db(transaction=True)
def test_statements_are_prepared_on_a_direct_connection_only(pooler: PgBouncerServer) -> None:
    schedule_message("t.ok")
    session = known_session(connection)
    assert session is not None
    assert session.keeps_plans
    with psycopg.connect(pooler.url) as pooled:
        assert pooled.info.backend_pid != pooled.execute("SELECT pg_backend_pid()").fetchone()[0]  # type: ignore[index]


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql
def test_a_prepared_statement_that_the_server_lost_is_sent_again_unprepared() -> None:
    for _ in range(3):
        schedule_message("t.ok")
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    assert schedule_message("t.ok").pk
    assert Message.objects.count() == 4
    session = known_session(connection)
    assert session is not None
    assert not session.keeps_plans
