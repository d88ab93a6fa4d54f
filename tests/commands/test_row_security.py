"""Row-level security that hides the rows of the queue from its role: nothing fails, and nothing is delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.db import connection
from django.test import Client

from django_delayq.models import Worker
from django_delayq.record import reads
from tests.support.commands import run, schedule
from tests.support.processes import Start

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql("has policies for rows")]

ROLE = "delayq_shy"
HIDDEN = f"Row security: delayq_message: all rows are hidden from the role {ROLE}; "
PARTLY = f"Row security: delayq_message, delayq_worker: rows may be hidden from the role {ROLE}; "


def execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture
def as_role(transactional_db: None) -> Iterator[Callable[..., None]]:
    """Change something as the owner of the tables, and go on as a role for which row-level security counts."""
    execute(
        f"CREATE ROLE {ROLE}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {ROLE}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {ROLE}",
    )

    def act(*statements: str) -> None:
        execute("RESET ROLE", *statements, f"SET ROLE {ROLE}")

    yield act
    execute("RESET ROLE", f"DROP OWNED BY {ROLE}", f"DROP ROLE {ROLE}")
    for table in ("delayq_message", "delayq_worker"):
        execute(f"DROP POLICY IF EXISTS p ON {table}", f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")


def worker() -> None:
    now = reads.now("default")
    Worker.objects.create(name="w", host="h", pid=1, started_at=now, seen_at=now)


ON = "ALTER TABLE {} ENABLE ROW LEVEL SECURITY"


def test_tables_whose_rows_are_hidden_are_critical(as_role: Callable[..., None]) -> None:
    worker()
    schedule(1)
    as_role()
    assert "Row security" not in run("delayq_check").out
    as_role(ON.format("delayq_message"))
    ran = run("delayq_check")
    assert (ran.code, f"CRITICAL {HIDDEN}give the role BYPASSRLS, or a policy for all rows\n" in ran.out) == (78, True)
    # A policy that is not for reading shows nothing.
    as_role("CREATE POLICY p ON delayq_message FOR INSERT WITH CHECK (true)")
    assert run("delayq_check").code == 78


@pytest.mark.parametrize("to", ["PUBLIC", ROLE])
def test_policies_may_show_all_rows_and_are_a_warning(as_role: Callable[..., None], to: str) -> None:
    worker()
    tables = ("delayq_message", "delayq_worker")
    as_role(*map(ON.format, tables), *(f"CREATE POLICY p ON {table} TO {to} USING (true)" for table in tables))
    ran = run("delayq_check")
    assert (ran.code, f"WARN     {PARTLY}" in ran.out) == (0, True), ran.out


def test_a_worker_says_at_its_start_that_rows_are_hidden(
    as_role: Callable[..., None], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_role(ON.format("delayq_message"))
    monkeypatch.setenv("PGOPTIONS", f"-c role={ROLE}")
    start("--processes", "1").wait_for(f"ERROR.* {HIDDEN}")


@pytest.mark.console
def test_pages_say_that_rows_are_hidden(as_role: Callable[..., None], admin_client: Client) -> None:
    from django_delayq.console.admin import panels

    as_role(ON.format("delayq_message"))
    for page in ("health", "dashboard"):
        panels.forget()
        text = admin_client.get(f"/admin/delayq_console/{page}/").content.decode()
        assert f"all rows are hidden from the role {ROLE}" in text
    panels.forget()
