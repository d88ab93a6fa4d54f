"""The console's migrations run beside old workers, and can be taken back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq.console.models import Rollup
from tests.support.rows import columns

AT = datetime(2026, 3, 1, 12, 34, tzinfo=UTC)

pytestmark = pytest.mark.django_db(transaction=True)


def test_run_times_come_and_go_without_a_change_of_other_counts() -> None:
    newest = columns("delayq_rollup")
    Rollup.objects.create(at=AT, seconds=60, queue="default", topic="t.a", consumed=3, late_5=3, run_5=3, run_us=9000)
    call_command("migrate", "delayq_console", "0001", verbosity=0)
    try:
        assert newest - columns("delayq_rollup") == {*Rollup.RUNTIME, "run_us"}
    finally:
        call_command("migrate", "delayq_console", verbosity=0)
    assert columns("delayq_rollup") == newest
    assert Rollup.objects.values_list("consumed", "late_5", "run_5", "run_us").get() == (3, 3, 0, 0)


def test_no_step_of_the_migration_makes_the_table_anew() -> None:
    call_command("migrate", "delayq_console", "0001", verbosity=0)
    try:
        with CaptureQueriesContext(connection) as captured:
            call_command("migrate", "delayq_console", "0002", verbosity=0)
    finally:
        call_command("migrate", "delayq_console", verbosity=0)
    changes = [sql for sql in (query["sql"] for query in captured) if "delayq_rollup" in sql]
    assert len(changes) == 18
    assert all("ADD COLUMN" in sql for sql in changes)
