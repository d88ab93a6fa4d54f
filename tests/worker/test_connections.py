"""The database connections of a worker's threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import redis
from asgiref.sync import sync_to_async
from django.db import connection, connections

from django_delayq import handler, schedule_message
from django_delayq.core.outcomes import Unentered
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.inspector.diagnostics import OWN_CONNECTIONS
from django_delayq.models import Message, Worker
from django_delayq.worker.processes.process import OnceProcess, WorkerProcess
from django_delayq.worker.run.executor import execute
from django_delayq.worker.shared import connections as upkeep
from tests.support.claims import DB, claimed
from tests.support.processes import Gate, Start
from tests.support.workers import ROOT, eventually
from tests.worker.bench import cut

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.postgresql
def test_a_closed_connection_is_replaced_in_a_thread_without_a_pause() -> None:
    upkeep.before_task()
    connection.ensure_connection()
    raw = connection.connection
    cut()

    def is_replaced() -> bool:
        upkeep.after_task()
        upkeep.before_task()
        return connection.connection is not raw

    eventually(is_replaced, "another connection")
    assert Message.objects.count() == 0


@pytest.mark.postgresql
def test_a_transactional_handler_does_not_begin_where_nothing_can_be_written_and_its_thread_connects_anew() -> None:
    """It would fail at the end, though it has no fault."""
    (one,) = claimed("t.once_tx")
    upkeep.before_task()
    raw = connection.connection
    # The worker sees nothing of this.
    raw.execute("SET default_transaction_read_only = on")
    assert isinstance(execute(one, "test"), Unentered)
    upkeep.after_task()
    upkeep.before_task()
    assert connection.connection is not raw
    assert schedule_message("t.ok").pk


@pytest.mark.postgresql
def test_a_worker_uses_no_connection_pool() -> None:
    pytest.importorskip("psycopg_pool")
    options = connections.settings[DB].setdefault("OPTIONS", {})
    connections.close_all()
    options["pool"] = True
    try:
        assert Message.objects.count() == 0
        upkeep.leave_pools()
        assert "pool" not in options
        assert Message.objects.count() == 0
    finally:
        options.pop("pool", None)


@pytest.mark.postgresql("SQLite has no sessions")
@pytest.mark.parametrize("given", [None, "shop"])
def test_the_server_shows_the_name_of_a_worker_unless_the_project_gives_its_own(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if given is None else {"application_name": given}
    monkeypatch.setitem(connections.settings[DB], "OPTIONS", {**connections.settings[DB]["OPTIONS"], **options})
    seen = []

    @handler("t.session")
    def look(message: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('application_name')")
            seen.append(cursor.fetchone()[0])

    schedule_message("t.session")
    process = OnceProcess(Options(DB, threads=1))
    process.run()
    assert seen == [given or f"django-delayq {process.name}"]


# A call as a web process makes it, and a command, in a process of their own: workers here have named the sessions.
CALLS = """
import django
django.setup()
from django.core.management import call_command
from django.db import connections
from django_delayq import schedule_message
options = {**connections.settings["other"]["OPTIONS"], "application_name": "shop"}
connections.settings["other"] = {**connections.settings["other"], "OPTIONS": options}
calls = {
    "call": lambda using: schedule_message("t.free", using=using),
    "command": lambda using: call_command("delayq_queue", "pause", "mail", yes=True, database=using, verbosity=0),
}
for name, call in calls.items():
    for using in ("default", "other"):
        call(using)
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT current_setting('application_name')")
            print(name, using, "named", cursor.fetchone())
        connections[using].close()
"""


@pytest.mark.postgresql("SQLite has no sessions")
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_calls_and_commands_leave_the_names_of_sessions_to_the_project() -> None:
    command = [sys.executable, "-c", CALLS]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = [tuple(line.split(" named ")) for line in out.splitlines() if " named " in line]
    assert named == [
        ("call default", "('',)"),
        ("call other", "('shop',)"),
        ("command default", "('',)"),
        ("command other", "('shop',)"),
    ]


@pytest.mark.postgresql("SQLite has no sessions")
def test_an_idle_worker_of_two_processes_keeps_five_connections(
    start: Start, gate: Gate, set_pace: Callable[[dict[str, float]], None]
) -> None:
    """In both the recorder and the consumer keep theirs; in the leader the upkeep does too."""
    set_pace({"process.Parts.run_tuning.idle_closed_after": 0.5})
    start("--processes", "2", "--threads", "1")
    # Each process gets one of them.
    both = [schedule_message("t.gate", gate.payload) for _ in range(2)]
    eventually(lambda: gate.how_many_began() == 2, "both processes run a handler")
    gate.open()
    ended = Message.objects.filter(pk__in=[message.pk for message in both], state=State.CONSUMED)
    eventually(lambda: ended.count() == 2, "both have ended")

    def sessions() -> list[int]:
        with connection.cursor() as cursor:
            ours = "application_name IN (SELECT 'django-delayq ' || name FROM delayq_worker)"
            cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {ours} GROUP BY application_name ORDER BY 1")
            return [number for (number,) in cursor]

    eventually(lambda: sessions() == [2, 3], "two connections, and three of the leader")


@pytest.mark.postgresql("SQLite has no sessions")
def test_an_idle_leader_opens_no_sessions(start: Start, set_pace: Callable[[dict[str, float]], None]) -> None:
    """Its services look for work again and again, that of the console in a thread of its own."""
    set_pace({"process.Parts.upkeep.heartbeat_interval": 1.0})
    start("--processes", "1", "--threads", "1")
    # By then the connections of its start are closed.
    since = seen_after(seen_after(datetime.min.replace(tzinfo=UTC)) + timedelta(seconds=2))
    opened = sessions_so_far()
    # A longer time than between two looks for operations.
    seen_after(since + timedelta(seconds=6))
    assert sessions_so_far() == opened


def seen_after(time: datetime) -> datetime:
    """Wait for a sign of life of the worker after a time, and return its time."""
    seen = Worker.objects.filter(seen_at__gt=time).values_list("seen_at", flat=True)
    found = eventually(lambda: seen.all().first(), "a sign of life")
    assert found is not None
    return found


def sessions_so_far() -> int:
    """Return how many sessions the database has opened, also those that have ended."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


# The connections to Redis of a process whose handlers schedule nothing, as docs/howto/deploy.rst says: the listener's,
# one that is kept for scripts, and one each for the threads of the consumer and of the upkeep.
TO_REDIS = 4


@pytest.mark.postgresql("SQLite has no sessions")
def test_a_busy_process_has_the_connections_that_the_documents_count(redis_client: redis.Redis) -> None:
    threads = 4
    gate, begun = threading.Event(), []

    def hold() -> None:
        Message.objects.exists()
        begun.append(True)
        gate.wait()

    @handler("t.held")
    def hold_a_thread(message: object) -> None:
        hold()

    @handler("t.held_async")
    async def hold_a_sync_call(message: object) -> None:
        await sync_to_async(hold)()

    def own_sessions() -> int:
        with connection.cursor() as cursor:
            name = f"django-delayq {process.name}"
            # The test's own connection may be one that began after the process had given its sessions the name.
            named = "application_name = %s AND pid <> pg_backend_pid()"
            cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {named}", [name])
            return int(cursor.fetchone()[0])

    def in_redis() -> set[str]:
        return {client["id"] for client in redis_client.client_list()}

    others = in_redis()
    process = WorkerProcess(Options(DB, threads=threads, async_concurrency=threads, graceful_timeout=0))
    running = threading.Thread(target=process.run)
    running.start()
    try:
        for _ in range(threads):
            schedule_message("t.held")
            schedule_message("t.held_async")
        eventually(lambda: len(begun) == 2 * threads, "all threads run a handler")
        # The recorder has its connection when it renews the leases.
        eventually(lambda: own_sessions() == OWN_CONNECTIONS + 2 * threads, "each thread has its connection")
        # The first put of this process is the test's own. A client of an earlier test may still come and go.
        eventually(lambda: len(in_redis() - others) <= TO_REDIS + 1, "no more connections to Redis stay")
        # The operator of the console has one while it looks for work.
        assert max(own_sessions() for _ in range(50)) <= OWN_CONNECTIONS + 1 + 2 * threads
    finally:
        gate.set()
        process.stop()
        running.join()
