"""Faults of the database: it restarts, dies or freezes, or its connections break. Workers wait and go on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections
from django.utils import timezone

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from testproject.servers import PostgresServer
from tests.support.processes import Configure, Gate, Start
from tests.support.record_of import consumed, effects_per_message, once_each, states, wait_until, wait_until_all
from tests.support.workers import eventually

BOTH = pytest.mark.usefixtures("timed_by")


def again(look: Callable[[], object], what: str) -> None:
    """Call ``eventually`` with a look at a database that may be away at the moment."""

    def safely() -> object:
        try:
            return look()
        except OperationalError:
            connections.close_all()
            return None

    eventually(safely, what)


@BOTH
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_database_restarted_under_load_loses_nothing_and_leaves_nothing_running(
    start: Start, configure: Configure, postgres_server: PostgresServer, how: str
) -> None:
    configure(LEASE=3)
    start("--processes", "2", "--threads", "4")
    messages = schedule_messages({"topic": "t.tx", "delay": 0.005 * n} for n in range(300))
    eventually(consumed(50), "the first are delivered")
    getattr(postgres_server, how)()
    postgres_server.start()
    connections.close_all()
    again(lambda: states() == {State.CONSUMED: 300}, "all are delivered")
    assert effects_per_message() == once_each(messages)


def test_what_happens_while_the_database_is_away_is_recorded_when_it_is_back_and_said_once(
    start: Start, postgres_server: PostgresServer, gate: Gate
) -> None:
    worker = start("--processes", "1", "--threads", "2", "--graceful-timeout", "1")
    lines = gate.folder / "lines"
    message = wait_until(schedule_message("t.file", str(lines)), State.CONSUMED)
    gate.payload["file"] = str(lines)
    waiting = gate.running("t.gate_file")
    later = schedule_message("t.ok", delay=2)
    postgres_server.stop()
    gate.open()
    eventually(lambda: len(lines.read_text().splitlines()) == 2, "the handler ends")
    worker.wait_for("Outcomes wait for the database")
    worker.wait_for("The consumer claims nothing")
    postgres_server.start()
    connections.close_all()
    worker.wait_for("The consumer claims again")
    again(lambda: wait_until(waiting, State.CONSUMED), "the outcome is recorded")
    assert waiting.deliveries == 1
    assert lines.read_text().splitlines() == [f"{message.pk} 1", f"{waiting.pk} 1"]
    wait_until(later, State.CONSUMED)
    assert worker.count("The consumer claims again") == 1
    told = re.findall("The consumer claims nothing.*", worker.log)
    assert len(told) == len(set(told)), "each reason once"
    postgres_server.stop()
    assert worker.stop() == 0
    postgres_server.start()
    connections.close_all()
    assert not Message.objects.filter(state=State.RUNNING).exists()


@BOTH
def test_connections_cut_at_any_moment_lose_nothing(
    start: Start, configure: Configure, postgres_server: PostgresServer
) -> None:
    configure(LEASE=2)
    start("--processes", "2", "--threads", "2")
    messages = schedule_messages({"topic": "t.tx", "delay": 0.01 * n} for n in range(200))
    with psycopg.connect(postgres_server.url, autocommit=True) as killer:
        own = (killer.info.backend_pid, connection.connection.info.backend_pid)
        for done in range(20, 200, 30):
            eventually(consumed(done), f"{done} are delivered")
            killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> ALL(%s)",
                [list(own)],
            )
    wait_until_all(State.CONSUMED, 200)
    assert effects_per_message() == once_each(messages)


def test_a_database_that_hangs_for_a_while_costs_nothing_but_the_while(
    start: Start, postgres_server: PostgresServer
) -> None:
    worker = start()
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    messages = schedule_messages({"topic": "t.tx", "delay": 0.1 * n} for n in range(10))
    postgres_server.freeze()
    eventually(lambda: timezone.now() > messages[-1].due_at, "all are due")
    postgres_server.thaw()
    for message in messages:
        assert wait_until(message, State.CONSUMED).deliveries == 1
    assert worker.count("died") == 0


# --- a database that is silent ----------------------------------------------------------------------------------------


@contextmanager
def silenced(server: PostgresServer, how: str) -> Iterator[None]:
    """Have the database answer nothing about messages while the block lasts."""
    if how == "locked":
        with psycopg.connect(server.url) as other:
            other.execute("LOCK TABLE delayq_message")
            yield
        return
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@BOTH
@pytest.mark.parametrize("how", ["frozen", "locked"])
def test_a_silent_database_makes_no_process_look_dead_and_keeps_no_supervisor_waiting(
    start: Start,
    postgres_server: PostgresServer,
    gate: Gate,
    set_pace: Callable[[dict[str, float]], None],
    tmp_path: Path,
    how: str,
) -> None:
    set_pace({"supervisor.USUAL.stale_after": 2.0, "process.Parts.tuning.idle_wait": 0.1})
    heartbeat = tmp_path / "heartbeat"
    worker = start("--heartbeat-file", str(heartbeat))
    (first,) = worker.wait_for_children(1)
    gate.running()
    eventually(heartbeat.exists, "the first beat")
    schedule_message("t.ok", delay=1)
    with silenced(postgres_server, how):
        # After a second the consumer waits for an answer about the message, without Redis even earlier.
        last = time.time() + 6
        eventually(lambda: heartbeat.stat().st_mtime > last, "the worker still shows life")
        assert worker.count("died") == 0
        os.kill(first, signal.SIGKILL)
        worker.wait_for(r"died \(killed by signal 9\)")
        died = time.time()
        eventually(lambda: heartbeat.stat().st_mtime > died, "a successor shows life")
        worker.send(signal.SIGTERM)
        worker.wait_for("Stopping")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert worker.count("Stopped; other workers release the claims of .* when their leases end") == 1


# --- fewer connections than threads -----------------------------------------------------------------------------------

ROLE = "delayq_with_a_limit"
# The consumer, the recorder and the upkeep of a process have one each.
OWN = 3


def ask(sql: str, *values: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall() if cursor.description else []


def connections_of_workers() -> int:
    return int(ask("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", ROLE)[0][0])


@pytest.fixture
def _role(transactional_db: None, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user of the database, with whom the workers connect that are started from now on."""
    ask(f"CREATE ROLE {ROLE} LOGIN IN ROLE {PostgresServer.user}")
    url = postgres_server.url.replace(f"{PostgresServer.user}@", f"{ROLE}@")
    monkeypatch.setenv("DATABASE_URL", url)
    yield
    ask("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = %s", ROLE)
    ask(f"DROP ROLE {ROLE}")


@pytest.mark.usefixtures("_role")
def test_a_handler_that_gets_no_connection_has_not_failed_and_keeps_no_outcome_from_its_record(
    start: Start, gate: Gate
) -> None:
    ask(f"ALTER ROLE {ROLE} CONNECTION LIMIT {OWN + 3}")
    worker = start("--threads", "8")
    schedule_messages({"topic": "t.gate", "payload": gate.payload} for _ in range(8))
    eventually(lambda: gate.how_many_began() == 8, "all handlers wait, and none has used the database")
    messages = schedule_messages({"topic": "t.once_tx", "payload": gate.payload} for _ in range(20))
    gate.open()
    worker.wait_for("The database gave handler thread . no transaction; .* takes no message for 5 s: .*too many")
    transactional = Message.objects.filter(topic="t.once_tx")
    eventually(lambda: not transactional.exclude(state=State.CONSUMED).exists(), "all of them are delivered")
    assert set(transactional.values_list("attempts", flat=True)) == {0}
    effects = effects_per_message()
    assert {effects[message.pk] for message in messages} == {1}
    # Those of the others that got a connection are recorded too.
    eventually(lambda: states()[State.CONSUMED] > 20, "some are recorded")
    assert worker.count("Outcomes wait for the database") == 0


@pytest.mark.usefixtures("_role")
@pytest.mark.parametrize("topic", ["t.gate", "t.gate_async"])
def test_the_connection_of_a_handler_is_given_back_when_its_thread_is_idle(
    start: Start, gate: Gate, set_pace: Callable[[dict[str, float]], None], topic: str
) -> None:
    set_pace({"process.Parts.run_tuning.idle_closed_after": 0.5})
    start("--threads", "4")
    for _ in range(2):
        schedule_messages({"topic": topic, "payload": gate.payload} for _ in range(12))
        gate.open()
        wait_until_all(State.CONSUMED, Message.objects.count())
        eventually(lambda: connections_of_workers() <= OWN, "the threads have closed their connections")
