"""The finding about schedules, in ``delayq_check`` and on the console's pages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import translation

from django_delayq import handler
from django_delayq.models import Worker
from django_delayq.recurring import create_schedule, pause_schedule, recurring, resume_schedule, schedules
from django_delayq.recurring.models import Occurrence, Schedule
from django_delayq.recurring.schedule_tuning import tuning
from django_delayq.recurring.services import Declarer
from tests.support.commands import run
from tests.support.rows import unguarded

from .conftest import DB, Clock, deliver, live, look

pytestmark = pytest.mark.django_db
Code = list[Any]


@pytest.fixture(autouse=True)
def _worker(without_redis: None, clock: Clock, code: Code) -> None:
    """A live worker, without the role unless the test announces its declarations."""
    Worker.objects.create(name="w", host="h", pid=1, topics=["t.ok"], started_at=clock.now, seen_at=clock.now)


def announce() -> Declarer:
    declarer = Declarer(DB, "w")
    declarer.tick()
    return declarer


def finding() -> str:
    checks = {check["name"]: check for check in run("delayq_check", "--json").json["checks"]}
    found = checks.get("Schedules", {"level": "warn", "detail": ""})
    assert found["level"] == "warn"
    return str(found["detail"])


def declare() -> None:
    recurring(every="1h")(handler("t.declared")(lambda message: None))


def test_schedules_that_no_worker_makes_are_found(clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h")
    assert finding() == "No live worker has the role scheduler, so no messages are made for: s."
    announce()
    assert finding() == ""
    clock.advance(seconds=tuning.forgotten_after + 1)
    Worker.objects.update(seen_at=clock.now)
    assert "role scheduler" in finding()


def test_declared_schedules_that_were_never_written_are_found(code: Code, clock: Clock) -> None:
    announce()
    declare()
    assert finding().endswith("made at run time: t.declared.")
    announce()
    assert finding() == ""
    unguarded(Schedule).all().delete()
    clock.advance(seconds=tuning.forgotten_after + 1)
    Worker.objects.update(seen_at=clock.now)
    assert finding().endswith("no messages are made for: t.declared.")


def test_a_schedule_that_workers_cannot_advance_is_found(clock: Clock) -> None:
    create_schedule("s", "t.ok", cron="0 13 * * *", missed="all")
    clock.advance(hours=1, seconds=59)
    Worker.objects.update(seen_at=clock.now)
    announce()
    assert finding() == ""
    clock.advance(seconds=1)
    assert finding() == "Workers make no messages, and log the reason, for: s."
    schedules.advance(DB, "s")
    assert finding() == ""


def test_a_schedule_whose_next_times_were_decided_by_a_clock_that_was_ahead_is_found(clock: Clock) -> None:
    announce()
    create_schedule("s", "t.ok", every="1h")
    create_schedule("t", "t.ok", every="1h")
    assert finding() == ""
    unguarded(Schedule).filter(pk="s").update(last_at=clock.now + timedelta(days=300))
    Occurrence.objects.filter(schedule="s").delete()
    assert finding() == (
        "The next times of these schedules count as past, as after a clock that was ahead, and get no message; pause"
        " and resume them: s."
    )
    pause_schedule("s")
    resume_schedule("s")
    assert finding() == ""
    assert Schedule.objects.get(pk="s").last_at == clock.now + timedelta(hours=1)


def test_a_schedule_that_ended_by_a_clock_that_was_ahead_is_found(clock: Clock) -> None:
    for name, days in (("s", 30), ("over", 1)):
        create_schedule(name, "t.ok", every="1h", ends_at=clock.now + timedelta(days=days))
    clock.advance(days=60)
    for name in ("s", "over"):
        deliver(clock, name)
    look()
    assert set(Schedule.objects.values_list("ended", flat=True)) == {True}
    clock.advance(days=-58)
    Worker.objects.update(seen_at=clock.now)
    announce()
    assert finding().endswith("pause and resume them: s.")
    for name in ("s", "over"):
        pause_schedule(name)
        resume_schedule(name)
    assert finding() == ""
    assert [live(name) for name in ("s", "over")] == [["03 13:00"], []]


def test_no_schedule_needs_no_scheduler(clock: Clock) -> None:
    assert finding() == ""
    create_schedule("s", "t.ok", every="1h")
    pause_schedule("s")
    assert finding() == ""


def test_a_schedule_whose_pause_is_over_is_found_and_one_that_is_paused_is_not(clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h")
    pause_schedule("s", duration="2m")
    assert finding() == ""
    clock.advance(minutes=2)
    Worker.objects.update(seen_at=clock.now)
    assert finding() == "No live worker has the role scheduler, so no messages are made for: s."


def test_without_any_worker_the_workers_are_the_finding(clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h")
    Worker.objects.update(seen_at=clock.now - timedelta(minutes=5))
    assert finding() == ""


def test_a_command_in_another_language_is_not_half_translated() -> None:
    create_schedule("s", "t.ok", every="1h")
    with translation.override("zh-hans"):
        assert "No live worker has the role" in finding()


@pytest.mark.console
def test_the_console_shows_the_finding_in_the_language_of_the_user() -> None:
    from django_delayq.console.admin import panels

    panels.forget()
    create_schedule("s", "t.ok", every="1h")
    client = Client()
    client.force_login(User.objects.create_superuser("anna"))
    # The requests leave their language active.
    with translation.override("en"):
        for language, words in (("en", "No live worker has the role scheduler"), ("zh-hans", "scheduler 角色")):
            shown = client.get("/admin/delayq_console/dashboard/", headers={"accept-language": language})
            assert words in shown.content.decode()
    panels.forget()
