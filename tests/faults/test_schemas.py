"""Two schemas of one PostgreSQL, each with processes of its own, as tenants may have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.processes import Start
from tests.support.record_of import wait_until
from tests.support.workers import eventually

pytestmark = [pytest.mark.usefixtures("transactional_db"), pytest.mark.postgresql("needs schemas")]

SETTINGS = """
from tests.support.worker_settings import *

DATABASES["default"].setdefault("OPTIONS", {})["options"] = "-c search_path=acme"
"""
FROM_SQL = "SELECT acme.delayq_schedule('t.ok')"
SCHEDULE = "import django; django.setup(); from django_delayq import schedule_message; schedule_message('t.ok')"
STATES = "SELECT state FROM acme.delayq_message"


@pytest.fixture
def acme(tmp_path: Path) -> Iterator[str]:
    """The words before a command that runs in the schema of another tenant, which shares the Redis and its prefix."""
    (tmp_path / "acme_settings.py").write_text(SETTINGS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path.cwd())])
    prefix = f"env DJANGO_SETTINGS_MODULE=acme_settings PYTHONPATH={path}"
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA acme")
    run(prefix, "-m", "django", "migrate", "--verbosity", "0")
    yield prefix
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA acme CASCADE")


def run(prefix: str, *arguments: str) -> None:
    environment = {**os.environ, "DELAYQ_TEST_SETTINGS": json.dumps(settings.DELAYQ)}
    subprocess.run([*prefix.split(), sys.executable, *arguments], env=environment, check=True)


def test_a_schema_that_shares_the_redis_of_another_is_told_so_and_served_by_query(start: Start, acme: str) -> None:
    ours = start()
    first = wait_until(schedule_message("t.ok"), State.CONSUMED)
    theirs = start(prefix=acme)
    theirs.wait_for("CRITICAL.*This Redis prefix belongs to another database; choose another")
    run(acme, "-c", SCHEDULE)

    def states() -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute(STATES)
            return [state for (state,) in cursor.fetchall()]

    eventually(lambda: states() == [State.CONSUMED], "the message of the other schema is consumed")
    second = wait_until(schedule_message("t.ok"), State.CONSUMED)
    assert second.pk != first.pk
    assert ours.count("belongs to another database") == 0, ours.log
    assert ours.stop() == 0
    assert theirs.stop() == 0


def test_each_schema_has_functions_that_schedule_into_its_own_tables(acme: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(FROM_SQL)
        assert not Message.objects.exists()
        cursor.execute("SELECT delayq_schedule('t.ok')")
        cursor.execute("SET search_path TO acme")
        try:
            cursor.execute("SELECT delayq_schedule('t.ok', key => 'k'), delayq_cancel(topic => 't.ok', key => 'k')")
        finally:
            cursor.execute("RESET search_path")
        assert Message.objects.count() == 1
        cursor.execute(STATES)
        assert sorted(cursor.fetchall()) == [(State.CANCELLED,), (State.SCHEDULED,)]
