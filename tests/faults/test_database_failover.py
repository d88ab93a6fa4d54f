"""The database fails over to a replica that lags behind: the last commits are lost (window W3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_delayq import schedule_messages
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message, Transition
from testproject.servers import PostgresServer
from tests.support.commands import run
from tests.support.processes import Start
from tests.support.proxy import Proxy
from tests.support.record_of import effects_per_message, is_early, once_each, states
from tests.support.transactions import make_snapshots_old
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

NUMBER = 40


class Standby(PostgresServer):
    """A PostgreSQL server that replicates another one until it is promoted."""

    def __init__(self, primary: PostgresServer, network: Proxy, **settings: Any) -> None:
        self._primary = primary.url.replace(str(primary.port), str(network.port))
        super().__init__(dbname=primary.dbname, **{**primary.settings, **settings})
        self._has_database = True

    def _initdb(self, programs: Path) -> None:
        how = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--wal-method=stream"]
        copy = [str(programs / "pg_basebackup"), *how, f"--dbname={self._primary}", "-D", str(self._data)]
        if not self._run(copy):
            raise self._failure("could not copy its primary")

    def ask(self, question: str) -> Any:
        with psycopg.connect(self.url, autocommit=True) as asked:
            row = asked.execute(question).fetchone()
            assert row is not None
            return row[0]


@pytest.fixture
def standby(transactional_db: None, postgres_server: PostgresServer, to_database: Proxy) -> Iterator[Standby]:
    with Standby(postgres_server, to_database) as server:
        yield server


@contextmanager
def demoted(server: PostgresServer) -> Iterator[None]:
    """Have a server take no writes within the block, on none of its connections. All of them stay open."""
    with psycopg.connect(server.url, autocommit=True) as told:
        told.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        told.execute("SELECT pg_reload_conf()")
        try:
            is_read_only = "SELECT current_setting('transaction_read_only') = 'on'"
            eventually(lambda: told.execute(is_read_only).fetchone() == (True,), "the server is demoted")
            yield
        finally:
            told.execute("ALTER SYSTEM RESET default_transaction_read_only")
            told.execute("SELECT pg_reload_conf()")
            eventually(lambda: told.execute(is_read_only).fetchone() == (False,), "the server is as before")


@contextmanager
def speaking_to(server: PostgresServer) -> Iterator[None]:
    """Connect this process to another server within the block."""
    connection.close()
    before = connection.settings_dict["PORT"]
    connection.settings_dict["PORT"] = str(server.port)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict["PORT"] = before


def wave(topic: str, *, payload: Any = None, over: float, start: float = 0.5) -> list[Message]:
    return schedule_messages(
        {"topic": topic, "payload": payload, "delay": start + over * place / NUMBER} for place in range(NUMBER)
    )


def drained() -> bool:
    return not Message.objects.filter(state__in=LIVE).exists()


def started_early(messages: Sequence[Message]) -> list[int]:
    claims = Transition.objects.filter(message__in=messages, to_state=State.RUNNING)
    return [claim.message_id for claim in claims if is_early(claim)]


def named_holders() -> str:
    (line,) = [line for line in run("delayq_check", "--min-workers", "0").out.splitlines() if "Snapshots" in line]
    return line


@pytest.fixture
def slot(transactional_db: None, postgres_server: PostgresServer) -> Iterator[str]:
    """The slot of a standby, on the server that all tests share."""
    with psycopg.connect(postgres_server.url, autocommit=True) as asked:
        asked.execute("SELECT pg_create_physical_replication_slot('gone', true)")
        yield "gone"
        free = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"
        eventually(lambda: asked.execute(free).fetchone(), "nobody uses the slot any more")


@pytest.fixture
def prepared(transactional_db: None, postgres_server: PostgresServer) -> Iterator[str]:
    """A transaction of two phases that nobody ends."""
    with psycopg.connect(postgres_server.url, autocommit=True) as asked:
        asked.execute("BEGIN")
        asked.execute("SELECT pg_current_xact_id()")
        asked.execute("PREPARE TRANSACTION 'forgotten'")
        yield "forgotten"
        asked.execute("ROLLBACK PREPARED 'forgotten'")


def test_a_check_says_that_a_standby_takes_no_writes_and_names_its_slot_when_it_is_gone(
    postgres_server: PostgresServer, to_database: Proxy, slot: str, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = {"hot_standby_feedback": "on", "wal_receiver_status_interval": "1s", "primary_slot_name": slot}
    with (
        Standby(postgres_server, to_database, **tells) as standby,
        psycopg.connect(postgres_server.url, autocommit=True) as asked,
    ):
        with speaking_to(standby):
            ran = run("delayq_check", "--min-workers", "0")
        assert (ran.code, "takes no writes; connect to the primary" in ran.out) == (3, True)
        asks = "SELECT xmin FROM pg_replication_slots WHERE xmin IS NOT NULL"
        eventually(lambda: asked.execute(asks).fetchone(), "the standby says what it needs")
    # What it needed is kept until it comes back.
    schedule_messages({"topic": "t.tx", "delay": 60} for _ in range(2))
    assert named_holders().startswith("OK ")
    make_snapshots_old(monkeypatch)
    found = named_holders()
    assert f"the replication slot {slot} is " in found
    assert f"the prepared transaction {prepared} ({postgres_server.user}) is " in found


def test_a_failover_forgets_messages_and_effects_together(
    start: Start,
    postgres_server: PostgresServer,
    to_database: Proxy,
    standby: Standby,
    tmp_path: Path,
) -> None:
    lines = tmp_path / "lines"
    with Proxy(postgres_server.port) as network, ExitStack() as stack:
        url = postgres_server.url.replace(str(postgres_server.port), str(network.port))
        worker = start(prefix=f"env DATABASE_URL={url}")
        worker.wait_for("Loaded Redis")
        # Most are not due yet when the standby has them all.
        rows = wave("t.tx", over=4.0, start=3.0)
        others = wave("t.file", payload=str(lines), over=4.0, start=3.0)
        eventually(lambda: standby.ask("SELECT count(*) FROM delayq_message") == 2 * NUMBER, "the standby has them")
        assert to_database.forget() >= 1
        unreplicated = states()[State.CONSUMED] + NUMBER // 2
        eventually(lambda: states()[State.CONSUMED] >= unreplicated, "some are consumed without the standby")
        # These are committed and put into Redis, but lost in the failover; their ids may be given out again.
        ghosts = wave("t.tx", over=1.0, start=2.0)
        postgres_server.kill()
        assert standby.ask("SELECT pg_promote()")
        assert standby.ask("SELECT count(*) FROM delayq_message WHERE state = 'consumed'") < unreplicated
        network.turn_to(standby.port)
        stack.enter_context(speaking_to(standby))
        assert not Message.objects.filter(pk__in=[ghost.pk for ghost in ghosts]).exists()
        new = wave("t.tx", over=1.0, start=3.0)
        eventually(drained, "all are finished")

        assert states() == {State.CONSUMED: 3 * NUMBER}
        # Effect and record were lost or kept together, so that each effect is there once.
        assert effects_per_message() == once_each([*rows, *new])
        # An effect outside the database has happened, perhaps twice.
        ran = {int(line.split()[0]) for line in lines.read_text().splitlines()}
        assert {other.pk for other in others} <= ran
        assert started_early([*rows, *others, *new]) == []
        assert worker.stop() == 0


def test_a_worker_leaves_a_server_that_takes_no_writes_any_more_with_all_its_connections(
    start: Start, postgres_server: PostgresServer, standby: Standby
) -> None:
    """That server goes on, and keeps the connections: only new ones lead to the new primary."""
    with Proxy(postgres_server.port) as network, ExitStack() as stack:
        url = postgres_server.url.replace(str(postgres_server.port), str(network.port))
        worker = start("--threads", "2", prefix=f"env DATABASE_URL={url}")
        worker.wait_for("Loaded Redis")
        topics = ["t.tx", "t.effect", "t.async"]
        before = schedule_messages({"topic": topic} for topic in topics)
        eventually(drained, "each thread has its connection")
        asked = stack.enter_context(psycopg.connect(postgres_server.url, autocommit=True))
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'django-delayq%'"
        assert asked.execute(sessions).fetchone() != (0,)
        eventually(lambda: standby.ask("SELECT count(*) FROM delayq_message WHERE state = 'consumed'") == len(topics))
        assert standby.ask("SELECT pg_promote()")
        network.lead_to(standby.port)
        stack.enter_context(demoted(postgres_server))
        stack.enter_context(speaking_to(standby))
        after = schedule_messages({"topic": topic} for topic in topics * 5)
        eventually(drained, "the worker delivers what the new primary has")
        assert effects_per_message() == once_each([*before, *after])
        # No message has failed because a thread was still at the old one.
        assert set(Message.objects.values_list("state", "deliveries")) == {(State.CONSUMED, 1)}
        eventually(lambda: asked.execute(sessions).fetchone() == (0,), "no connection is left there")
        assert worker.stop() == 0
