"""The database connections of a worker's threads."""

from __future__ import annotations

import time

import psycopg
import pytest
from django.db import connection, connections

from django_delayq import handler, schedule_message
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.worker.parts import connections as upkeep
from django_delayq.worker.processes.once import OnceProcess
from testproject.servers import PostgresServer
from tests.support.claims import DB

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_connection_that_the_server_closed_is_replaced_before_the_next_task(
    postgres_server: PostgresServer,
) -> None:
    upkeep.before_task()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    upkeep.after_task()
    postgres_server.stop()
    postgres_server.start()
    upkeep.before_task()
    assert Message.objects.count() == 0


@pytest.mark.postgresql
def test_a_closed_connection_is_replaced_in_a_thread_without_a_pause(
    postgres_server: PostgresServer,
) -> None:
    upkeep.before_task()
    connection.ensure_connection()
    raw = connection.connection
    with psycopg.connect(postgres_server.url, autocommit=True) as other:
        assert other.execute("SELECT pg_terminate_backend(%s, 5000)", [raw.info.backend_pid]).fetchone() == (True,)
    deadline = time.monotonic() + 10
    while connection.connection is raw and time.monotonic() < deadline:
        upkeep.after_task()
        upkeep.before_task()
    assert connection.connection is not raw
    assert Message.objects.count() == 0


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
