"""Tests of delayq_recurring."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError

from django_delayq import handler
from django_delayq.models import Message
from django_delayq.recurring import (
    Schedule,
    create_schedule,
    delete_schedule,
    pause_schedule,
    resume_schedule,
    run_schedule,
)
from django_delayq.signals import message_scheduled, operator_action
from tests.support.commands import run
from tests.support.receivers import receiving
from tests.support.rows import unguarded

from .conftest import Clock, live, no_table

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _two_schedules(without_redis: None, clock: Clock) -> None:
    create_schedule("digest", "t.ok", {"password": "secret"}, cron="0 3 * * *", tz="Europe/Berlin")
    create_schedule("s", "t.ok", every="1h")


def test_schedules_are_listed_with_their_next_times() -> None:
    ran = run("delayq_recurring", "list")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "digest: 0 3 * * * (Europe/Berlin), topic t.ok, missed: once, active, made at run time",
        "  2050-03-02 03:00:00 CET",
        "  2050-03-03 03:00:00 CET",
        "  2050-03-04 03:00:00 CET",
        "s: every 1h, topic t.ok, missed: once, active, made at run time",
        "  2050-03-01 13:00:00 UTC",
        "  2050-03-01 14:00:00 UTC",
        "  2050-03-01 15:00:00 UTC",
    ]


def test_the_list_as_json_tells_all_but_the_payload() -> None:
    [found] = run("delayq_recurring", "list", "digest", "--json").json["schedules"]
    assert (found["name"], found["cron"]) == ("digest", "0 3 * * *")
    assert found["next"] == [f"2050-03-0{day}T02:00:00.000Z" for day in (2, 3, 4)]
    assert "payload" not in found


def test_a_schedule_that_cannot_be_read_does_not_spoil_the_list() -> None:
    unguarded(Schedule).filter(pk="digest").update(time_zone="Not/Here")
    ran = run("delayq_recurring", "list")
    assert ran.code == 0
    assert "digest: not a time zone: 'Not/Here'" in ran.err
    assert "s: every 1h" in ran.out


def test_no_schedules_are_told() -> None:
    unguarded(Schedule).all().delete()
    assert (
        run("delayq_recurring", "list").out
        == "There are no schedules. Workers write those that the code declares when they start.\n"
    )


def test_schedules_are_paused_and_resumed() -> None:
    assert run("delayq_recurring", "pause", "s", "digest").out == "digest: paused\ns: paused\n"
    assert run("delayq_recurring", "pause", "s").out == "s: was paused already\n"
    assert live() == []
    assert ", paused," in run("delayq_recurring", "list", "s").out
    assert run("delayq_recurring", "resume", "s", "--json").json["resume"] == {"s": True}
    assert run("delayq_recurring", "resume", "s").out == "s: was not paused\n"
    assert live() == ["13:00"]


def test_a_schedule_is_paused_until_a_time() -> None:
    assert run("delayq_recurring", "pause", "s", "--until", "2h").out == "s: paused\n"
    assert ", paused until 2050-03-01T14:00:00.000Z," in run("delayq_recurring", "list", "s").out
    [found] = run("delayq_recurring", "list", "s", "--json").json["schedules"]
    assert (found["paused"], found["resumes_at"]) == (True, "2050-03-01T14:00:00.000Z")
    assert run("delayq_recurring", "pause", "s", "--until", "2050-03-02T00:00:00Z").out == "s: paused\n"
    assert run("delayq_recurring", "resume", "s", "--until", "2h").code == 2
    assert run("delayq_recurring", "pause", "s", "--until", "2049-03-02T00:00:00Z").code == 4
    assert run("delayq_recurring", "resume", "s").out == "s: resumed\n"


def test_a_schedule_is_run_now() -> None:
    ran = run("delayq_recurring", "run", "digest")
    message = Message.objects.latest("pk")
    assert ran.out == f"digest: message {message.pk} is due now\n"
    assert message.payload == {"password": "secret"}
    assert message.transitions.get().actor.startswith("command:delayq_recurring ")


@pytest.mark.console
def test_actions_are_written_to_the_audit() -> None:
    from django_delayq.console.models import AuditEvent

    run("delayq_recurring", "pause", "s", "--reason", "why")
    run("delayq_recurring", "pause", "s")
    run("delayq_recurring", "run", "s")
    events = AuditEvent.objects.order_by("pk").values_list("action", "target", "reason")
    assert list(events) == [("pause schedule", "s", "why"), ("run schedule", "s", "")]


@pytest.mark.parametrize("verb", ["pause", "run"])
def test_an_action_whose_audit_cannot_be_written_is_not_done(verb: str) -> None:
    before = list(Schedule.objects.values()), Message.objects.count()

    def refuse(**event: Any) -> None:
        raise OperationalError("no disk space")

    with receiving(refuse, operator_action):
        ran = run("delayq_recurring", verb, "s")
    assert (ran.code, "no disk space" in ran.err) == (69, True)
    assert before == (list(Schedule.objects.values()), Message.objects.count())


def test_unknown_names_are_told_and_the_others_are_done() -> None:
    ran = run("delayq_recurring", "pause", "s", "nowhere")
    assert (ran.code, ran.out, ran.err) == (4, "s: paused\n", "There is no schedule 'nowhere'.")
    assert live() == []


def test_an_action_without_names_is_wrong_usage() -> None:
    assert run("delayq_recurring", "run").code == 2
    assert Message.objects.count() == 2


@pytest.mark.parametrize("action", ["run", "resume"])
def test_schedules_to_which_nothing_can_be_done_are_told_and_the_others_are_done(
    action: str, keyed: None, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    create_schedule("a", "t.ok", {}, every="1h")
    for name in ("a", "digest", "s"):
        pause_schedule(name)
    unguarded(Schedule).filter(pk="a").update(topic="t.keyed")
    settings.DELAYQ = {**settings.DELAYQ, "PAYLOAD_MAX_BYTES": 10}
    ran = run("delayq_recurring", action, "a", "digest", "s")
    assert (ran.code, ran.out.startswith("s: ")) == (4, True)
    of_project, impossible, left = ran.err.splitlines()
    assert of_project == "a: KeyError: 'customer'"
    assert impossible.startswith("digest: ")
    assert "the payload has 21 bytes" in impossible
    assert left == "Nothing was done to these schedules: a, digest."
    assert "Nothing was done to schedule a\nTraceback" in caplog.text
    assert "Nothing was done to schedule digest\nTraceback" not in caplog.text
    assert Schedule.objects.get(pk="digest").paused


def no_user() -> None:
    User.objects.get()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("fail", "words"), [(no_user, "User matching query does not exist"), (no_table, "no tenant")])
def test_a_query_of_the_project_that_fails_is_told_and_the_others_are_done(code: Any, fail: Any, words: str) -> None:
    def by_user(message: Any) -> None:
        fail()

    handler("t.keyed", limit=1, limit_key=by_user)(lambda message: None)
    unguarded(Schedule).filter(pk="digest").update(topic="t.keyed")
    ran = run("delayq_recurring", "run", "digest", "s")
    assert (ran.code, ran.out.startswith("s: ")) == (4, True)
    assert re.match(f"digest: .*{words}", ran.err)


@pytest.mark.django_db(transaction=True)
def test_a_schedule_that_is_deleted_meanwhile_is_told() -> None:
    def delete(**_facts: Any) -> None:
        delete_schedule("s")

    with receiving(delete, message_scheduled):
        ran = run("delayq_recurring", "run", "digest", "s")
    assert (ran.code, ran.out.startswith("digest: message ")) == (4, True)
    assert ran.err == "s: somebody has just deleted it\nNothing was done to these schedules: s."


@pytest.mark.parametrize("name", ["", "\udcff", "a b"], ids=ascii)
@pytest.mark.parametrize("action", ["list", "run"])
def test_a_name_that_no_schedule_can_have_is_refused(action: str, name: str) -> None:
    ran = run("delayq_recurring", action, name)
    assert ran.code not in (0, 4)
    assert "the name of a schedule must be 1 to 100 of the characters" in ran.err


def test_a_misspelt_schedule_is_asked_about() -> None:
    ran = run("delayq_recurring", "pause", "digets", "zzz")
    assert (ran.code, ran.err) == (4, "There is no schedule 'digets' (did you mean digest?), 'zzz'.")
    for act in (pause_schedule, resume_schedule, run_schedule):
        with pytest.raises(Schedule.DoesNotExist, match=r"^there is no schedule 'digets'; did you mean 'digest'\?$"):
            act("digets")
    with pytest.raises(Schedule.DoesNotExist, match=r"^there is no schedule 'zzz'$"):
        pause_schedule("zzz")
