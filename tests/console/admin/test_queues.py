"""The list of queues, and the pages that pause and resume one."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import cancel_message, pause_queue, resume_queue
from django_delayq.api import pausing
from django_delayq.console.admin import panels, queue_pages
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.console.operations import lifecycle
from django_delayq.core import actors
from django_delayq.models import Queue
from testproject.servers import RedisServer

from .asking import worked_off
from .conftest import logged_in, person
from .samples import DB, fresh, late, many, said, scheduled, table_rows, text, worker

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "admin:delayq_queue_changelist"


def url(action: str = "", queue: str = "mail") -> str:
    return reverse(PAGE) if not action else reverse(f"admin:delayq_queue_{action}", args=[queue])


def row(response: Any, queue: str = "mail") -> str:
    """Return the text of the row of a queue."""
    [line] = [line for line in table_rows(response.content.decode()) if line.startswith(f"{queue} ")]
    return line


@pytest.fixture
def pauser(db: None) -> Client:
    return logged_in(person("paula", "view_message", "pause_queue"))


def test_every_queue_that_anybody_knows_has_a_line_with_what_waits(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default", "named"]}
    worker(queues=("served",))
    pause_queue("paused")
    scheduled(queue="mail", delay="2h")
    late(scheduled(queue="mail"), seconds=3600)
    page = viewer.get(url())
    for name in ("default", "named", "served", "paused"):
        assert row(page, name)
    assert row(page, "served").endswith(" 1")
    line = row(page)
    assert line.startswith("mail active no workers 2 0 1 1 h")
    assert "in 1 h 59 m" in line or "in 2 h" in line
    assert "?" not in line


def test_a_pause_is_shown_with_all_that_is_known_of_it(viewer: Client) -> None:
    pause_queue("mail", duration="30m", reason="<b>the provider</b> is down")
    line = row(viewer.get(url()))
    assert "mail paused by " in line
    assert re.search(r"until \S+, in (29 m|30 m)", line)
    assert "&lt;b&gt;the provider&lt;/b&gt; is down" in line
    assert "active" not in line


def test_the_page_of_a_queue_tells_its_pause_and_leads_to_its_end(pauser: Client, viewer: Client) -> None:
    assert "active" in text(pauser.get(url("detail", "other")))
    pause_queue("mail", reason="the provider is down")
    # What somebody has just done is there to see.
    page = pauser.get(url("detail"))
    assert "paused by " in text(page)
    assert "the provider is down" in text(page)
    assert url("resume") in page.content.decode()
    assert "the provider is down" in text(pauser.get(url("resume")))
    shown = viewer.get(url("detail"))
    assert "the provider is down" in text(shown)
    assert url("resume") not in shown.content.decode()
    assert "Change…" not in text(shown)


def test_paused_queues_come_first(viewer: Client) -> None:
    scheduled(queue="another")
    pause_queue("mail")
    assert text(viewer.get(url())).index(" mail ") < text(viewer.get(url())).index(" another ")


def test_a_resumed_queue_without_a_worker_is_not_promised_to_be_served(pauser: Client) -> None:
    pausing.pause_queue("mail")
    answer = pauser.post(url("resume"), {"reason": ""}, follow=True)
    assert said(answer) == ["Queue mail is resumed, but no live worker serves it: its messages wait."]


def test_a_queue_is_paused_and_resumed(pauser: Client) -> None:
    assert "For" in text(pauser.get(url("pause")))
    answer = pauser.post(url("pause"), {"duration": "30m", "reason": "why"}, follow=True)
    assert said(answer) == ["Queue mail is paused: workers start no more of its messages."]
    assert "paused by paula" in row(answer)
    pause = pausing.paused(DB)["mail"]
    assert (pause.paused_by, pause.reason) == ("user:paula", "why")
    assert pause.resumes_at is not None

    worker(queues=("mail",))
    answer = pauser.post(url("resume"), {"reason": "it is over"}, follow=True)
    assert said(answer) == ["Queue mail is resumed: workers start its messages within about a second."]
    assert pausing.paused(DB) == {}
    events = AuditEvent.objects.order_by("pk").values_list("actor", "action", "target", "reason", "user_key")
    key = str(User.objects.get().pk)
    assert list(events) == [
        ("user:paula", "pause", "mail", "why", key),
        ("user:paula", "resume", "mail", "it is over", key),
    ]
    assert said(pauser.post(url("resume"), {}, follow=True)) == ["Queue mail was not paused."]
    assert AuditEvent.objects.count() == 2


def test_a_pause_by_code_leaves_who_paused_in_the_audit(pauser: Client) -> None:
    with actors.acting_as("worker:payments/1"):
        pause_queue("mail", reason="the bank is down")
    pauser.post(url("resume"), {"reason": "it is back"})
    with transaction.atomic(), actors.acting_as("process:web/7"):
        pause_queue("mail")
        assert AuditEvent.objects.count() == 2
    assert resume_queue("mail", reason="over")
    assert not resume_queue("mail")
    events = list(AuditEvent.objects.order_by("pk").values_list("actor", "action", "target", "reason"))
    assert events[:3] == [
        ("worker:payments/1", "pause", "mail", "the bank is down"),
        ("user:paula", "resume", "mail", "it is back"),
        ("process:web/7", "pause", "mail", ""),
    ]
    assert [event[1:] for event in events[3:]] == [("resume", "mail", "over")]


def test_the_question_before_a_resume_names_the_messages_that_begin(pauser: Client) -> None:
    pause_queue("mail")
    assert "No message is due." in text(pauser.get(url("resume")))
    many(3, queue="mail", delay=0)
    scheduled(queue="mail", delay="1h")
    scheduled(queue="other", delay=0)
    page = pauser.get(url("resume"))
    assert "3 messages are due and begin at once." in text(page)
    # Who may not act on many messages is offered no spread, and cannot ask for one.
    assert "spread" not in page.context["form"].fields
    assert pauser.post(url("resume"), {"spread": "10m"}).status_code == 403
    assert pausing.paused(DB)


@pytest.fixture
def chief(db: None) -> Client:
    return logged_in(person("cora", "view_message", "pause_queue", "run_message", "bulk_message"))


def test_a_queue_is_resumed_slowly(chief: Client) -> None:
    pause_queue("mail", duration="1h")
    due = many(4, queue="mail", delay=0)
    later = scheduled(queue="mail", delay="5h")
    assert "spread" in chief.get(url("resume")).context["form"].fields
    answer = chief.post(url("resume"), {"spread": "40m", "reason": "the bank is back"}, follow=True)
    operation = Operation.objects.get()
    assert said(answer) == [
        f"Operation #{operation.pk} is queued: a worker spreads the messages, then resumes queue mail."
    ]
    # The pause lasts until the messages have their new times.
    assert pausing.paused(DB)["mail"].resumes_at is None
    worked_off()
    assert not pausing.paused(DB)
    times = [fresh(message).due_at for message in due]
    assert [at - times[0] for at in times] == [timedelta(minutes=10 * number) for number in range(4)]
    assert fresh(later).due_at == later.due_at
    events = AuditEvent.objects.values_list("actor", "action", "target", "reason", "operation")
    assert events.latest("pk") == ("user:cora", "resume", "mail", "the bank is back", operation.pk)


def stop_of(page: Any) -> str:
    """Return the name of the field by which a form stops the operation that is under way."""
    [name] = [name for name in page.context["form"].fields if name.startswith("stop_")]
    return str(name)


def test_a_second_gentle_resume_names_the_first_and_replaces_it_only_when_asked(chief: Client) -> None:
    pause_queue("mail")
    due = many(4, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    first = Operation.objects.get()
    page = chief.get(url("resume"))
    told = f"Operation #{first.pk} by cora spreads the due messages over 40 m, then resumes the queue."
    assert told in text(page)
    for given in ({"spread": "4m"}, {}):
        assert told in text(chief.post(url("resume"), given))
        assert Operation.objects.count() == 1
        assert pausing.paused(DB)
    answer = chief.post(url("resume"), {"spread": "4m", stop_of(page): "on"}, follow=True)
    second = Operation.objects.latest("pk")
    assert said(answer)[0].startswith(f"Operation #{second.pk} is queued")
    first.refresh_from_db()
    assert first.state == "stopped"
    assert pausing.paused(DB)["mail"].paused_by == f"run #{second.pk}"
    worked_off()
    assert not pausing.paused(DB)
    times = [fresh(message).due_at for message in due]
    assert [at - times[0] for at in times] == [timedelta(minutes=number) for number in range(4)]
    assert ("stop", first.pk) in AuditEvent.objects.values_list("action", "operation")


def test_a_resume_at_once_stops_a_gentle_one_only_when_asked(chief: Client) -> None:
    pause_queue("mail")
    many(4, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    worker(queues=("mail",))
    page = chief.get(url("resume"))
    answer = chief.post(url("resume"), {stop_of(page): "on"}, follow=True)
    assert said(answer) == ["Queue mail is resumed: workers start its messages within about a second."]
    assert Operation.objects.get().state == "stopped"
    assert not pausing.paused(DB)


def test_who_may_not_spread_stops_no_gentle_resume(chief: Client, pauser: Client) -> None:
    pause_queue("mail")
    many(4, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    first = Operation.objects.get()
    for given in ({}, {f"stop_{first.pk}": "on"}):
        assert f"Operation #{first.pk} by cora" in text(pauser.post(url("resume"), given))
    assert pausing.paused(DB)
    assert fresh_operation(first).state == "queued"


def test_what_somebody_else_started_meanwhile_is_not_stopped(chief: Client) -> None:
    pause_queue("mail")
    many(4, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    page = chief.get(url("resume"))
    chief.post(url("resume"), {"spread": "4m", stop_of(page): "on"})
    second = Operation.objects.latest("pk")
    assert f"Operation #{second.pk} by" in text(chief.post(url("resume"), {"spread": "1m", stop_of(page): "on"}))
    assert fresh_operation(second).state == "queued"


def fresh_operation(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def test_a_spread_of_no_time_is_not_taken_for_at_once(chief: Client) -> None:
    pause_queue("mail")
    many(4, queue="mail", delay=0)
    assert "Give a longer time" in text(chief.post(url("resume"), {"spread": "0s"}))
    assert pausing.paused(DB)


@pytest.mark.parametrize("number", [None, 0, 1], ids=["too many to count", "none", "one"])
def test_a_spread_that_was_asked_for_is_kept(chief: Client, monkeypatch: Any, number: int | None) -> None:
    pause_queue("mail")
    due = many(2, queue="mail", delay=0)
    for message in due[number or 0 :] if number is not None else []:
        cancel_message(message)
    if number is None:
        monkeypatch.setattr(queue_pages, "in_time", lambda *given: None)
        assert "spread" in chief.get(url("resume")).context["form"].fields
    chief.post(url("resume"), {"spread": "40m"})
    assert pausing.paused(DB)["mail"].paused_by == f"run #{Operation.objects.get().pk}"
    worked_off()
    assert not pausing.paused(DB)


def test_more_messages_than_an_operation_takes_are_not_spread(chief: Client, tuned: Callable[..., None]) -> None:
    tuned(most_messages=3)
    pause_queue("mail")
    many(4, queue="mail", delay=0)
    assert "An operation takes 3 messages at most." in text(chief.post(url("resume"), {"spread": "40m"}))
    assert pausing.paused(DB)


def test_a_slow_resume_that_is_stopped_leaves_the_queue_paused(chief: Client) -> None:
    pause_queue("mail")
    many(2, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    for verb, paused in ((lifecycle.stop, ["mail"]), (lifecycle.resume, [])):
        assert verb(Operation.objects.get())
        worked_off()
        assert list(pausing.paused(DB)) == paused


@pytest.mark.parametrize("is_stopped", [False, True], ids=["queued", "stopped and resumed"])
def test_a_slow_resume_ends_no_pause_that_began_after_it(chief: Client, is_stopped: bool) -> None:
    pause_queue("mail", reason="the mail server is down")
    many(2, queue="mail", delay=0)
    chief.post(url("resume"), {"spread": "40m"})
    operation = Operation.objects.get()
    assert pausing.paused(DB)["mail"].paused_by == f"run #{operation.pk}"
    if is_stopped:
        assert lifecycle.stop(operation)
    pause_queue("mail", reason="the addresses are wrong", duration="1h")
    if is_stopped:
        assert lifecycle.resume(operation)
    worked_off()
    assert Operation.objects.get().state == "done"
    pause = pausing.paused(DB)["mail"]
    assert pause.reason == "the addresses are wrong"
    assert pause.resumes_at is not None


def test_many_due_messages_are_spread_unless_somebody_empties_the_field(chief: Client) -> None:
    pause_queue("mail")
    many(2500, queue="mail", delay=0)
    page = chief.get(url("resume"))
    assert "2,500 messages are due and begin at once." in text(page)
    assert page.context["form"].fields["spread"].initial == "2m"
    chief.post(url("resume"), {"spread": ""})
    assert not pausing.paused(DB)
    assert not Operation.objects.exists()


def test_a_pause_ends_at_a_local_time_or_never(pauser: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    end = timezone.localtime(timezone.now() + timedelta(hours=3)).replace(microsecond=0)
    for until, resumes_at in ((end.strftime("%Y-%m-%dT%H:%M:%S"), end), ("", None)):
        pauser.post(url("pause"), {"until": until})
        assert pausing.paused(DB)["mail"].resumes_at == resumes_at


OVER = "The pause would have ended already|This is in the past"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"duration": "soon"}, "not a duration"),
        ({"duration": "-5m"}, "not a duration"),
        ({"duration": "0s"}, OVER),
        ({"until": "now"}, OVER),
        ({"until": "2001-01-01T00:00:00"}, OVER),
        ({"duration": "5m", "until": "2099-01-01T00:00:00"}, "not both"),
    ],
)
def test_an_impossible_pause_is_asked_again(pauser: Client, given: dict[str, str], problem: str) -> None:
    now = timezone.localtime().strftime("%Y-%m-%dT%H:%M:%S")
    answer = pauser.post(url("pause"), {name: now if value == "now" else value for name, value in given.items()})
    assert re.search(problem, text(answer))
    assert not Queue.objects.exists()


def test_a_name_that_no_queue_can_have_is_not_found(pauser: Client) -> None:
    assert pauser.get(url("pause", "no such queue")).status_code == 404


def test_the_numbers_of_a_redis_that_is_away_or_none(viewer: Client, redis_server: RedisServer, settings: Any) -> None:
    scheduled(queue="mail")
    redis_server.stop()
    page = viewer.get(url())
    assert row(page).count("?") == 1
    assert "Redis does not answer" in text(page)
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    panels.forget()
    assert "?" not in row(viewer.get(url()))
