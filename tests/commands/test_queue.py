"""Tests of delayq_queue."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.utils import timezone

from django_delayq import signals
from django_delayq.api import pausing
from django_delayq.models import LimitOverride, Queue
from tests.support.commands import run, schedule
from tests.support.receivers import heard, receiving

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _a_known_queue(transactional_db: None) -> None:
    """Have a message in the queue ``mail``: about one that is like another queue the command would ask."""
    schedule(1, queue="mail")


def paused() -> dict[str, Queue]:
    return pausing.paused("default")


def test_queues_are_paused_and_resumed() -> None:
    ran = run("delayq_queue", "pause", "mail", "sms", "--reason", "the provider is down")
    assert (ran.code, ran.out) == (0, "mail: paused until it is resumed\nsms: paused until it is resumed\n")
    assert [(name, queue.reason) for name, queue in paused().items()] == [
        ("mail", "the provider is down"),
        ("sms", "the provider is down"),
    ]
    assert paused()["mail"].paused_by.startswith("command:delayq_queue ")

    ran = run("delayq_queue", "resume", "sms", "mail", "other")
    assert (ran.code, ran.out) == (0, "mail: resumed\nother: was not paused\nsms: resumed\n")
    assert paused() == {}


def test_a_pause_ends_after_a_duration_or_at_a_time() -> None:
    assert run("delayq_queue", "pause", "mail", "--until", "30m").code == 0
    end = paused()["mail"].resumes_at
    assert end is not None
    assert timedelta(minutes=29) < end - timezone.now() <= timedelta(minutes=30)

    later = datetime(timezone.now().year + 1, 1, 31, 12, tzinfo=UTC)
    assert run("delayq_queue", "pause", "mail", "--until", later.isoformat()).code == 0
    assert paused()["mail"].resumes_at == later


@pytest.mark.console
def test_pause_and_resume_are_written_to_the_audit() -> None:
    from django_delayq.console.models import AuditEvent

    run("delayq_queue", "pause", "mail", "--reason", "why")
    run("delayq_queue", "resume", "mail", "other", "--reason", "over")
    found = AuditEvent.objects.order_by("pk").values_list("action", "target", "reason")
    assert list(found) == [("pause", "mail", "why"), ("resume", "mail", "over")]


def test_pause_and_resume_write_json() -> None:
    assert run("delayq_queue", "pause", "mail", "--json").json["paused_until"] == {"mail": None}
    assert run("delayq_queue", "resume", "mail", "other", "--json").json["resumed"] == {"mail": True, "other": False}


WRONG: list[tuple[str, ...]] = [
    (),
    ("no queue",),
    ("mail", "--until", "soon"),
    ("mail", "--until", "0"),
    ("mail", "--until", "yesterday"),
    ("mail", "--until", "2000-01-01T00:00:00Z"),
    ("mail", "--until", "2099-01-01T00:00:00"),
]


@pytest.mark.parametrize("words", WRONG)
def test_an_impossible_pause_is_refused_and_no_action(words: tuple[str, ...]) -> None:
    with heard(signals.operator_action) as actions:
        ran = run("delayq_queue", "pause", *words)
    # An error of the parser has exit code 2 only when a shell calls the command.
    assert ran.code in (1, 2)
    assert (ran.out, actions) == ("", [])
    assert not Queue.objects.exists()


@pytest.mark.parametrize(
    "words", ["delayq_queue pause sms", "delayq_queue resume mail", "delayq_limit reset --queue mail"]
)
def test_an_action_whose_audit_cannot_be_written_is_not_done(words: str) -> None:
    run("delayq_queue", "pause", "mail")
    run("delayq_limit", "override", "--queue", "mail", "--limit", "1")
    before = list(Queue.objects.values()), list(LimitOverride.objects.values())

    def refuse(**event: Any) -> None:
        raise OperationalError("no disk space")

    with receiving(refuse, signals.operator_action):
        ran = run(*words.split())
    assert (ran.code, "no disk space" in ran.err) == (69, True)
    assert before == (list(Queue.objects.values()), list(LimitOverride.objects.values()))


@pytest.mark.postgresql("SQLite goes on after a statement that failed")
def test_an_action_whose_receiver_hides_an_error_is_not_done() -> None:
    def hide(**event: Any) -> None:
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    with receiving(hide, signals.operator_action):
        ran = run("delayq_queue", "pause", "mail")
    assert (ran.code, "is aborted" in ran.err) == (1, True)
    assert not Queue.objects.exists()


def test_a_resume_takes_no_end() -> None:
    run("delayq_queue", "pause", "mail")
    ran = run("delayq_queue", "resume", "mail", "--until", "1h")
    assert (ran.code, ran.err) == (2, "--until belongs to pause.")
    assert paused().keys() == {"mail"}
