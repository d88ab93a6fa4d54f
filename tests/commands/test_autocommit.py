"""``AUTOCOMMIT: False`` in DATABASES: workers and commands would commit nothing, and refuse in one sentence."""

from __future__ import annotations

import pytest
from django.core.checks import WARNING, run_checks
from django.db import connection

from django_delayq import schedule_message
from django_delayq.api import pausing
from django_delayq.core.states import State
from django_delayq.management import commands
from django_delayq.models import Message
from django_delayq.recurring.management import commands as commands_of_schedules
from tests.support.commands import calls_of, run
from tests.support.record_of import log_of
from tests.support.workers import Worker

COMMANDS = calls_of(commands, commands_of_schedules)
REFUSAL = (
    "DATABASES['default']['AUTOCOMMIT'] is False, and nothing that workers and commands of django-delayq write would"
    " be committed: set it to True in the settings that these run with."
)


@pytest.fixture
def _by_hand(monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> None:
    """Have the project leave all commits to its own code."""
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_refuses_where_nothing_would_be_committed(command: list[str]) -> None:
    message = schedule_message("t.ok", delay="1h")
    ran = run(*command)
    assert (ran.code, ran.err, ran.out) == (78, REFUSAL, "")
    assert [row.state for row in Message.objects.all()] == [State.SCHEDULED]
    assert len(log_of(message)) == 1
    assert not pausing.paused("default")


@pytest.mark.usefixtures("transactional_db")
def test_a_worker_refuses_where_nothing_would_be_committed() -> None:
    """Such a worker runs each message again and again: none of its successes is committed."""
    message = schedule_message("t.effect")
    with Worker("--max-runtime", "5s", prefix="env DELAYQ_TEST_AUTOCOMMIT=0") as worker:
        assert worker.wait() == 78
        assert worker.lines[-1] == f"CommandError: {REFUSAL}"
        assert worker.count("Traceback") == 0
    assert len(log_of(message)) == 1


@pytest.mark.usefixtures("_by_hand")
def test_the_system_check_warns_where_nothing_would_be_committed() -> None:
    # A warning: a project may schedule under these settings, and run its workers under others.
    (message,) = run_checks(tags=["delayq"])
    assert (message.id, message.level) == ("delayq.W003", WARNING)
    assert f"{message.msg} {message.hint}" == REFUSAL.replace("committed: set", "committed. Set")
