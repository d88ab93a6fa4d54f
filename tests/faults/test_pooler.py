"""PgBouncer in transaction mode, with nothing set for it: each transaction may get another server connection."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from django.db import connection, connections
from django.utils import timezone

from django_delayq import cancel_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Worker
from django_delayq.record.sql.sessions import known_session
from testproject.binaries import PGBOUNCER_ADVICE
from testproject.servers import PgBouncerServer, PostgresServer, find_pgbouncer
from tests.support.commands import run
from tests.support.processes import Gate, Start
from tests.support.record_of import consumed, effects_per_message, once_each, wait_until
from tests.support.steps import at_once
from tests.support.workers import eventually

from .program import Program

THREADS, EACH = 8, 25


def schedule_by_turns(number: int) -> None:
    """Schedule as a view does, each time by another kind of call."""
    for turn in range(EACH):
        if turn % 5 == 0:
            schedule_messages([{"topic": "t.tx"}])
        elif turn % 5 == 1:
            message = schedule_message("t.tx", key=f"{number}-{turn}", delay="1h")
            assert reschedule_message(message, delay=0)
        else:
            schedule_message("t.tx", {"number": number, "turn": turn})
    assert cancel_message(schedule_message("t.tx", delay="1h"))


@pytest.fixture
def pooler(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[PgBouncerServer]:
    """A pooler between the database and the processes that the test starts from now on."""
    if find_pgbouncer() is None:
        pytest.skip(f"no pgbouncer found. {PGBOUNCER_ADVICE}")
    with PgBouncerServer(postgres_server) as server:
        monkeypatch.setenv("DATABASE_URL", server.url)
        yield server


def test_views_workers_and_commands_share_server_connections_without_any_setting(
    start: Start, pooler: PgBouncerServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [start("--threads", "4"), start("--threads", "4")]
    long = gate.running("t.short_lease_tx")
    with monkeypatch.context() as behind_it:
        behind_it.setitem(connections.settings["default"], "PORT", str(pooler.port))
        assert at_once(THREADS, schedule_by_turns) == [None] * THREADS
    live = Message.objects.exclude(state=State.CANCELLED)
    assert live.count() == 1 + THREADS * EACH
    eventually(consumed(THREADS * EACH), "the others are delivered beside the long one")
    for arguments in (["delayq_stats"], ["delayq_check"], ["delayq_check", "redis"], ["delayq_restore", "--dry-run"]):
        with Program("django", *arguments) as command:
            assert command.wait() == 0, (arguments, command.log)
    gate.open()
    assert wait_until(long, State.CONSUMED).deliveries == 1
    assert effects_per_message() == once_each(list(live))
    for worker in workers:
        assert worker.count("prepared statement|does not exist|failed|claims nothing") == 0
        assert worker.stop() == 0


@pytest.mark.parametrize("topic", ["t.extend_tx", "t.extend_async_tx", "t.extend_atomic"])
def test_handlers_that_extend_need_no_connection_besides_that_of_their_transaction(
    start: Start, pooler: PgBouncerServer, gate: Gate, topic: str
) -> None:
    """All connections of the pooler belong to handlers, so nobody can extend their leases meanwhile."""
    worker = start("--threads", str(THREADS))
    messages = schedule_messages({"topic": topic, "payload": gate.payload} for _ in range(THREADS))
    eventually(lambda: gate.how_many_began() == pooler.pool_size, "handlers have all connections")
    gate.open()
    eventually(consumed(THREADS), "all are delivered")
    assert Counter(Message.objects.values_list("deliveries", flat=True)) == {1: THREADS}
    assert set(effects_per_message()) == {message.pk for message in messages}
    assert worker.stop() == 0


def test_a_worker_ends_in_order_while_its_handlers_have_all_connections_and_extend(
    start: Start, pooler: PgBouncerServer, gate: Gate
) -> None:
    worker = start("--threads", str(THREADS))
    schedule_messages({"topic": "t.extend_tx", "payload": gate.payload} for _ in range(THREADS))
    eventually(lambda: gate.how_many_began() == pooler.pool_size, "handlers have all connections")
    worker.send(signal.SIGTERM)
    worker.wait_for("takes no more messages and waits for its handlers")
    gate.open()
    assert worker.wait() == 0
    # One that no thread had taken yet is released.
    done = Message.objects.filter(state=State.CONSUMED)
    assert done.count() >= pooler.pool_size
    assert effects_per_message() == once_each(done)


@pytest.mark.django_db(transaction=True)
def test_a_check_says_how_many_server_connections_the_workers_need(
    pooler: PgBouncerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handler threads that run no transactional handlers share those that there are."""
    most = int(PostgresServer.SETTINGS["max_connections"])
    facts = {"threads": THREADS, "host": "h", "pid": 1, "started_at": timezone.now(), "seen_at": timezone.now()}
    Worker.objects.create(name="one", topics=["t.ok", "t.tx"], **facts)
    Worker.objects.create(name="other", topics=["t.ok"], **facts)
    monkeypatch.setitem(connection.settings_dict, "PORT", str(pooler.port))
    connection.close()
    text = f"the live workers may have {THREADS + 6} transactions at once; their pooler needs as many connections"
    ran = run("delayq_check")
    assert (ran.code, f"{text} to the database, which gives it {most}\n" in ran.out) == (0, True)
    Worker.objects.filter(name="one").update(threads=most)
    ran = run("delayq_check")
    assert f"{most + 6} transactions at once" in ran.out
    assert "start fewer processes or threads, or raise the limit\n" in ran.out
    connection.close()


@pytest.mark.django_db(transaction=True)
def test_statements_are_prepared_on_a_direct_connection_only(
    pooler: PgBouncerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps_plans() -> bool:
        connection.close()
        schedule_message("t.ok")
        session = known_session(connection)
        assert session is not None
        return session.keeps_plans

    assert keeps_plans()
    monkeypatch.setitem(connection.settings_dict, "PORT", str(pooler.port))
    assert not keeps_plans()
    connection.close()


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
