"""The migrations of schedules run beside old workers, and can be taken back."""

from __future__ import annotations

from typing import Any, cast

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq.recurring import Schedule, create_schedule, pause_schedule
from tests.support.rows import columns

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]


def test_the_end_of_a_pause_comes_and_goes_and_schedules_stay() -> None:
    create_schedule("s", "t.ok", every="1h")
    pause_schedule("s", duration="1h")
    before = cast("dict[str, Any]", Schedule.objects.values().get())
    call_command("migrate", "delayq_recurring", "0001", verbosity=0)
    try:
        assert before.keys() - columns("delayq_schedule") == {"resumes_at"}
    finally:
        with CaptureQueriesContext(connection) as captured:
            call_command("migrate", "delayq_recurring", verbosity=0)
    # Without an end the pause lasts until somebody resumes it.
    assert Schedule.objects.values().get() == {**before, "resumes_at": None}
    changes = [sql for sql in (query["sql"] for query in captured) if "delayq_schedule" in sql]
    assert [sql.split()[:2] for sql in changes] == [["ALTER", "TABLE"], ["CREATE", "INDEX"]]
    assert "ADD COLUMN" in changes[0]
