"""The page of one message: why it is where it is, what happened to it, and what it carries."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import cancel_message, transitions
from django_delayq.actors import acting_as
from django_delayq.clock import to_ms
from django_delayq.models import Message, Worker
from django_delayq.sql.rows import Ticket
from django_delayq.states import State

from . import samples
from .test_list import assert_bounded

pytestmark = pytest.mark.django_db


def page_of(client: Client, message: Message) -> Any:
    return client.get(samples.change_url(message))


def why(client: Client, message: Message) -> str:
    return " ".join(page_of(client, message).context["why"])


def test_it_says_when_a_message_runs(viewer: Client) -> None:
    assert re.fullmatch(r"Runs in 4 m \d+ s\.", why(viewer, samples.scheduled(delay="250s")))


def test_it_says_how_late_a_message_is_and_whether_anybody_works_on_its_queue(viewer: Client) -> None:
    message = samples.scheduled(delay=0, queue="mails")
    assert re.fullmatch(
        r"Overdue by \d+ ms: it waits for a free worker of the queue mails\. No live worker serves the queue mails\.",
        why(viewer, message),
    )
    now = timezone.now()
    Worker.objects.create(name="w", host="h", pid=1, queues=["mails"], started_at=now, seen_at=now)
    assert "No live worker" not in why(viewer, message)


def test_it_says_how_often_a_message_failed(viewer: Client) -> None:
    message = samples.failed(samples.running(), reason="retry", delay=None)
    assert "Failed attempts so far: 1." in why(viewer, message)


def test_it_says_who_runs_a_message_and_that_it_was_asked_to_stop(viewer: Client) -> None:
    message = samples.running()
    assert f"Running on {samples.WORKER} (delivery 1), whose lease lasts until 2" in why(viewer, message)
    cancel_message(message)
    assert "A cancel was requested" in why(viewer, message)


def test_it_says_that_a_lease_ran_out(viewer: Client) -> None:
    assert "its lease ran out" in why(viewer, samples.running(lease=-5.0))


def test_it_says_who_cancelled_a_message_and_why(viewer: Client) -> None:
    message = samples.scheduled()
    with acting_as("user:anna"):
        cancel_message(message, reason="customer refunded")
    assert re.fullmatch(r"Cancelled by user:anna at [\d: .-]+: “customer refunded”", why(viewer, message))


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (State.CONSUMED, f"Done by {samples.WORKER} at "),
        (State.DEAD, f"Given up by {samples.WORKER} at "),
        (State.EXPIRED, "Expired at "),
    ],
)
def test_it_says_how_a_message_ended(viewer: Client, state: State, sentence: str) -> None:
    assert sentence in why(viewer, samples.MAKERS[state]())


def test_the_timeline_has_every_step_with_its_time_and_what_went_wrong(viewer: Client) -> None:
    message = samples.running()
    trace = "Traceback (most recent call last):\n  <here>"
    message = samples.failed(message, dead=True, reason="given up", error="ValueError: <b>no</b>", traceback=trace)
    response = page_of(viewer, message)
    steps = response.context["timeline"]
    assert [(step.before, step.after, step.delivery) for step in steps] == [
        ("new", "scheduled", 0),
        ("scheduled", "running", 1),
        ("running", "dead", 1),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", step.moment) for step in steps)
    assert [bool(step.took) for step in steps] == [False, True, True]
    assert [bool(step.waited) for step in steps] == [False, True, False]
    assert [bool(step.due) for step in steps] == [True, False, False]
    html = response.content.decode()
    assert "<details><summary>Traceback</summary><pre>Traceback (most recent call last):\n  &lt;here&gt;</pre>" in html
    assert "ValueError: &lt;b&gt;no&lt;/b&gt;" in html


def test_no_wait_is_negative_whatever_two_clocks_say(viewer: Client) -> None:
    message = samples.scheduled(delay=0)
    ahead = to_ms(timezone.now() + timedelta(seconds=5))
    assert transitions.claim(samples.DB, [Ticket(message.pk, ahead)], {samples.TOPIC: 60.0}, samples.WORKER)
    assert page_of(viewer, message).context["timeline"][-1].waited == "0 ms"


def test_of_a_long_log_the_latest_steps_are_shown(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.admin.story.LONGEST", 2)
    response = page_of(viewer, samples.consumed())
    assert [step.after for step in response.context["timeline"]] == ["running", "consumed"]
    assert "1 earlier step is not shown." in samples.text(response)


def test_times_are_those_of_the_readers_time_zone(viewer: Client, settings: Any) -> None:
    message = samples.scheduled()
    settings.TIME_ZONE = "Asia/Tokyo"
    page = samples.text(page_of(viewer, message))
    assert "Timeline (Asia/Tokyo)" in page
    there = timezone.localtime(message.due_at, timezone.get_fixed_timezone(540))
    assert there.strftime("%Y-%m-%d %H:%M:%S") in page


def test_a_payload_is_text_and_never_markup(viewer: Client) -> None:
    message = samples.scheduled({"<b>name</b>": "<script>alert(1)</script>"}, headers={"h": "<script>"})
    html = page_of(viewer, message).content.decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "&lt;b&gt;name&lt;/b&gt;" in html
    assert "<script>alert" not in html


def test_what_looks_secret_is_not_shown_at_any_depth(viewer: Client) -> None:
    payload = {
        "order": 4711,
        "api_key": "leak-1",
        "user": {"Password": "leak-2", "name": "anna", "accounts": [{"authToken": {"value": "leak-3"}}]},
        "session_cookie": ["leak-4"],
    }
    message = samples.scheduled(payload, headers={"Authorization": "Bearer leak-5", "trace": "abc"})
    html = page_of(viewer, message).content.decode()
    assert "leak" not in html
    assert "4711" in html
    assert "anna" in html
    assert "abc" in html


def test_large_numbers_stay_exact(viewer: Client) -> None:
    assert str(2**63 - 1) in samples.text(page_of(viewer, samples.scheduled({"number": 2**63 - 1})))


def test_nothing_can_be_edited_added_or_deleted(operator: Client) -> None:
    message = samples.scheduled()
    before = samples.record()
    url = samples.change_url(message)
    assert operator.post(url, {"topic": "other", "_save": "Save"}).status_code == 403
    assert operator.get(url.replace("change", "delete")).status_code == 403
    assert operator.post(url.replace("change", "delete"), {"post": "yes"}).status_code == 403
    assert operator.get(url.replace(f"{message.pk}/change", "add")).status_code == 403
    assert samples.record() == before
    assert 'name="_save"' not in page_of(operator, message).content.decode()


def test_a_message_that_is_gone_is_no_error(viewer: Client) -> None:
    message = samples.scheduled()
    url = samples.change_url(message)
    message.delete()
    assert viewer.get(url).status_code == 302


@pytest.mark.parametrize("state", State)
def test_only_what_can_be_done_to_it_is_offered(operator: Client, state: State) -> None:
    expected = {
        State.SCHEDULED: ["cancel", "reschedule", "run"],
        State.RUNNING: ["cancel"],
        State.CONSUMED: [],
    }.get(state, ["requeue"])
    response = page_of(operator, samples.MAKERS[state]())
    assert re.findall(r'action="/admin/django_delayq/message/steer/(\w+)/"', response.content.decode()) == expected


@pytest.mark.parametrize("state", State)
def test_a_viewer_is_offered_nothing(viewer: Client, state: State) -> None:
    assert "/steer/" not in page_of(viewer, samples.MAKERS[state]()).content.decode()


def test_the_page_has_no_inline_code_or_style(operator: Client) -> None:
    html = page_of(operator, samples.dead()).content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


def test_the_page_asks_nothing_that_grows_with_the_table(operator: Client) -> None:
    message = samples.consumed()
    with CaptureQueriesContext(connection) as captured:
        assert page_of(operator, message).status_code == 200
    ours = [entry["sql"] for entry in captured if "delayq_" in entry["sql"]]
    assert len(ours) == 2
    for sql in ours:
        assert_bounded(sql)
