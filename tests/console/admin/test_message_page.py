"""The page of one message: its explanation, its timeline, its payload and its place in Redis."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import RetryPolicy, cancel_message, handler
from django_delayq.api import pausing
from django_delayq.broker.base import Entry
from django_delayq.console.admin import explanation, payload
from django_delayq.console.models import AuditEvent
from django_delayq.core.actors import acting_as
from django_delayq.core.clock import to_tenths
from django_delayq.core.retry import as_policy
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message
from django_delayq.pull import retry, take
from django_delayq.record import crashes, reads, transitions
from django_delayq.record.sql.rows import Success, Ticket
from tests.support.rows import unguarded
from tests.support.workers import eventually

from . import samples
from .conftest import logged_in, person
from .samples import why

pytestmark = pytest.mark.django_db


def page_of(client: Client, message: Message) -> Any:
    return client.get(samples.change_url(message))


def test_the_explanation_says_how_late_a_message_is_and_whether_its_queue_is_served(
    viewer: Client, settings: Any
) -> None:
    # A message that is overdue for some seconds would be missing in Redis.
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    message = samples.scheduled(delay=0, queue="mails")
    assert re.fullmatch(
        r"Overdue by [\d.]+ m?s\. Waiting: no live worker listens to the queue mails\.", why(viewer, message)
    )
    samples.worker(queues=("mails",), topics=["t.other"])
    assert why(viewer, message).endswith("no live worker of the queue mails handles the topic t.admin.")
    samples.worker("other", queues=("mails",))
    assert why(viewer, message).endswith("Waiting for a free worker of the queue mails.")


def test_the_explanation_says_of_a_pulled_queue_that_programs_take_its_messages(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["exports"]}
    later, due = (samples.scheduled(queue="exports", delay=delay) for delay in ("1h", 0))
    unguarded(Message).filter(pk=due.pk).update(due_at=timezone.now() - timedelta(minutes=1))
    assert re.fullmatch(r"Due in [\w. ]+\.", why(viewer, later))
    text = r"Due for [\w. ]+: it waits for a program that pulls the queue exports\."
    assert re.fullmatch(text, why(viewer, due))
    pausing.pause_queue("exports")
    assert re.match(f"{text} Queue exports has been paused since", why(viewer, due))
    pausing.resume_queue("exports")
    assert b"due for" in viewer.get(reverse(samples.LIST)).content
    (taken,) = take("exports")
    assert why(viewer, due).endswith("It is attempt 1 of 3.")
    retry(taken.receipt, 0)
    assert "overdue" not in why(viewer, due).lower()


def test_the_page_says_of_a_pulled_message_that_a_program_has_it(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["exports"]}
    unguarded(Message).filter(pk=samples.scheduled(queue="exports").pk).update(due_at=timezone.now())
    (taken,) = take("exports")
    message = Message.objects.get(pk=taken.id)
    _parts, words, _legend = life_of(viewer, message)
    assert words[-1].endswith(", then delivery 2, unless its program extends it")
    unguarded(Message).filter(pk=taken.id).update(leased_until=timezone.now() - timedelta(minutes=1))
    assert re.fullmatch(
        r"Taken by pull:\S+, whose lease ran out [\w. ]+ ago: that is a failed attempt\.", why(viewer, message)
    )


def test_the_explanation_says_since_when_by_whom_and_why_a_queue_is_paused(viewer: Client) -> None:
    message = samples.scheduled(delay=0, queue="mails")
    samples.worker(queues=("mails",))
    with acting_as("user:anna"):
        pausing.pause_queue("mails", reason="provider <is> down")
    assert re.search(r"Queue mails has been paused since [\d: -]+ by anna: “provider <is> down”$", why(viewer, message))
    page = page_of(viewer, message).content.decode()
    assert '<span class="dq-badge dq-state-paused">paused</span>' in page
    assert f'<a href="{samples.admin_url("queue_detail", "mails")}">Queue mails</a>' in page
    pausing.pause_queue("mails", duration="1h")
    assert re.search(r"by process:.* until [\d: -]+\.$", why(viewer, message))
    pausing.resume_queue("mails")
    assert "paused" not in why(viewer, message)


def overdue(**options: Any) -> Message:
    return samples.late(samples.scheduled(**options))[0]


def test_a_message_missing_in_redis_can_be_put_back(restorer: Client, redis_client: Any) -> None:
    samples.worker()
    message = overdue()
    assert why(restorer, message).endswith("a worker puts it back once it is overdue; “Put it back” does so at once.")
    assert 'id="redis"' in page_of(restorer, message).content.decode()
    answer = restorer.post(restore_url(message), follow=True)
    assert samples.said(answer) == ["The message is in Redis again."]
    assert answer.redirect_chain[0][0] == samples.change_url(message)
    assert "Missing in Redis" not in why(restorer, message)
    event = AuditEvent.objects.values_list("actor", "action", "message_id", "outcomes").get()
    assert event == ("user:rosa", "restore", message.pk, {"put": 1})
    assert samples.said(restorer.post(restore_url(message), follow=True)) == ["The message was in Redis already."]
    beyond = samples.scheduled(delay="90d")
    assert "due after the horizon" in samples.said(restorer.post(restore_url(beyond), follow=True))[0]
    gone = samples.cancelled()
    assert "not scheduled any more" in samples.said(restorer.post(restore_url(gone), follow=True))[0]


def restore_url(message: Message) -> str:
    return reverse("admin:delayq_message_restore", args=[message.pk])


def reveal_url(message: Message) -> str:
    return reverse("admin:delayq_message_reveal", args=[message.pk])


def compared(client: Client, message: Message) -> dict[str, tuple[str, str]]:
    return {row.name: (row.record, row.redis) for row in page_of(client, message).context["compared"]}


def test_the_record_says_its_times_and_how_far_they_are(viewer: Client) -> None:
    message = samples.scheduled(delay="90m")
    facts = dict(viewer.get(samples.change_url(message)).context["facts"])
    assert re.fullmatch(r"[\d: .-]+, in 1\sh\s\d+\sm", facts["due"])
    assert re.fullmatch(r"[\d: .-]+, \d+\ss ago", facts["created"])


def test_the_record_and_redis_stand_side_by_side(viewer: Client, redis_client: Any) -> None:
    first = samples.scheduled(delay="5m")
    message = samples.scheduled(delay="5m")
    ready = [overdue() for _number in range(3)]
    samples.fill().put("default", [Entry.at(each.pk, each.due_at, 0) for each in (message, *ready)])
    assert re.fullmatch(r"ready since [\d: .-]+, with 2 before it", compared(viewer, ready[2])["state"][1])
    due = explanation.moment(message.due_at)
    assert compared(viewer, message)["state"] == ("scheduled", f"delayed until {due}")
    assert compared(viewer, message)["due"] == (due, due)
    assert compared(viewer, message)["expected in Redis"] == ("delayed, or ready", "agrees")
    assert compared(viewer, first)["state"] == ("scheduled", "not in Redis")
    assert compared(viewer, first)["expected in Redis"] == ("delayed, or ready", "differs: missing")
    later = samples.scheduled(delay="90d")
    assert compared(viewer, later)["state"] == ("scheduled", "not in Redis")
    assert "due after the horizon" in compared(viewer, later)["expected in Redis"][0]
    unguarded(Message).filter(pk=message.pk).update(due_at=message.due_at + timedelta(seconds=1))
    assert compared(viewer, message)["expected in Redis"][1] == "differs: another due time"
    assert "Redis has another due time" in why(viewer, message)


def test_the_message_page_says_that_redis_does_not_answer(restorer: Client, settings: Any) -> None:
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://:geheim@127.0.0.1:{nobody.getsockname()[1]}/0"}
        message = overdue()
        response = page_of(restorer, message)
        assert {row.redis for row in response.context["compared"]} == {"?"}
        assert "Redis cannot be used: " in samples.text(response)
        assert "geheim" not in response.content.decode()
        assert "Missing" not in why(restorer, message)
        answer = restorer.post(restore_url(message), follow=True)
        assert samples.said(answer)[0].startswith("Redis did not accept the message: ")
        assert restorer.get(reverse(samples.LIST)).status_code == 200


def test_the_message_page_leaves_out_a_redis_that_is_not_configured(restorer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    message = overdue()
    assert 'id="redis"' not in page_of(restorer, message).content.decode()
    assert "Redis" not in why(restorer, message)
    assert samples.said(restorer.post(restore_url(message), follow=True)) == ["No Redis is configured."]


def test_the_explanation_names_the_worker_and_a_requested_cancel(viewer: Client) -> None:
    message = samples.running()
    assert f"Running on {samples.WORKER} (delivery 1), whose lease lasts until 2" in why(viewer, message)
    assert why(viewer, message).endswith("It is attempt 1.")
    assert why(viewer, samples.running(max_attempts=3)).endswith("It is attempt 1 of 3.")
    cancel_message(message)
    assert "A cancel was requested" in why(viewer, message)


def cancelled() -> Message:
    message = samples.scheduled()
    with acting_as("user:anna"):
        cancel_message(message, reason="customer refunded")
    return samples.fresh(message)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (cancelled, r"^Cancelled by anna at [\d: .-]+: “customer refunded”$"),
        (lambda: samples.scheduled(delay="250s"), r"^Runs in 4 m \d+ s\.$"),
        (lambda: samples.failed(samples.running(), reason="retry", delay=None), r"Failed attempts so far: 1\."),
        (lambda: samples.running(lease=-5.0), "whose lease ran out"),
        (samples.consumed, f"Consumed by {samples.WORKER} at "),
        (samples.dead, f"Given up by {samples.WORKER} at "),
        (samples.expired, "Expired at "),
    ],
)
def test_the_explanation_says_what_becomes_of_it(viewer: Client, make: Callable[[], Message], sentence: str) -> None:
    assert re.search(sentence, why(viewer, make()))


def test_the_timeline_has_every_step_with_its_time_and_what_went_wrong(viewer: Client) -> None:
    message = samples.running()
    trace = "Traceback (most recent call last):\n  <here>"
    message = samples.failed(message, dead=True, reason="given up", error="ValueError: <b>no</b>", traceback=trace)
    response = page_of(viewer, message)
    steps = response.context["timeline"]
    # A delivery is a row of the table above, and no step.
    assert [(step.before, step.after, step.future) for step in steps] == [
        ("new", "scheduled", False),
        ("dead", "purged", True),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", step.moment.partition(".")[0]) for step in steps)
    # What is months away is not told to the millisecond.
    assert [len(step.moment.partition(".")[2]) for step in steps] == [3, 0]
    assert [bool(step.took) for step in steps] == [False, True]
    assert steps[0].due
    html = response.content.decode()
    assert "<summary>ValueError: &lt;b&gt;no&lt;/b&gt;</summary><pre>Traceback (most" in html
    assert "last):\n  &lt;here&gt;</pre>" in html


def test_no_wait_is_negative_whatever_two_clocks_say(viewer: Client) -> None:
    message = samples.scheduled(delay=0)
    ahead = to_tenths(timezone.now() + timedelta(seconds=5))
    assert transitions.claim(samples.DB, [Ticket(message.pk, ahead)], {samples.TOPIC: 60.0}, samples.WORKER)
    response = page_of(viewer, message)
    assert response.context["deliveries"][0].waited == "0\N{NO-BREAK SPACE}ms"


def test_the_timeline_ends_with_the_next_expected_step(viewer: Client, settings: Any) -> None:
    def to_come(message: Message) -> list[tuple[str, str]]:
        steps = page_of(viewer, message).context["timeline"]
        return [(step.before, step.after) for step in steps if step.future]

    assert to_come(samples.scheduled(expires="1h")) == [("scheduled", "due"), ("scheduled", "expired")]
    assert to_come(samples.running()) == [("running", "end of the lease")]
    assert to_come(samples.running(timeout="30s")) == [("running", "timeout"), ("running", "end of the lease")]
    assert to_come(samples.consumed()) == [("consumed", "purged")]
    assert to_come(overdue()) == []
    # It holds its key for longer than it would be kept.
    (purged,) = page_of(viewer, samples.consumed(key="k", unique="100d")).context["timeline"][-1:]
    assert purged.at > reads.now(samples.DB) + timedelta(days=99)
    settings.DELAYQ = {**settings.DELAYQ, "RETENTION": False}
    assert to_come(samples.consumed()) == []


def test_each_delivery_has_a_row_with_its_outcome(viewer: Client) -> None:
    message = samples.running()
    retry = {"delay": timedelta(0), "reason": "retry", "error": "OSError: <away>", "traceback": "Traceback: <here>"}
    message = samples.claimed(samples.failed(message, **retry))
    first, second = page_of(viewer, message).context["deliveries"]
    assert [(row.number, row.outcome) for row in (first, second)] == [(1, "scheduled: retry"), (2, "")]
    assert (first.worker, first.error) == (f"worker:{samples.WORKER}", "OSError: <away>")
    assert all([first.late, first.waited, first.took, second.took])
    html = page_of(viewer, samples.succeeded(message)).content.decode()
    assert "OSError: &lt;away&gt;" in html
    assert "<details><summary>OSError: &lt;away&gt;</summary><pre>Traceback: &lt;here&gt;</pre>" in html
    assert html.count('<td data-label="Delivery">') == 2


def test_a_success_of_an_earlier_delivery_is_told_as_its_own(viewer: Client) -> None:
    message = samples.running(lease=0.001)
    eventually(lambda: crashes.reap(samples.DB, actor="reaper"), "the end of the lease")
    message = samples.claimed(samples.fresh(message))
    assert transitions.succeed(samples.DB, [Success(message.pk, 1, samples.WORKER, None)])
    outcomes = [row.outcome for row in page_of(viewer, message).context["deliveries"]]
    assert [outcome.partition(":")[0] for outcome in outcomes] == ["scheduled", "consumed (#1)"]


def test_a_changed_payload_is_shown_with_its_delivery_and_worker(viewer: Client) -> None:
    message = samples.running({"step": 1})
    change = {"reason": "payload changed", "error": "RetryLater: soon", "payload": '{"step": 2}'}
    message = samples.failed(message, delay=timedelta(0), **change)
    response = page_of(viewer, message)
    (row,) = response.context["deliveries"]
    assert (row.outcome, row.due, row.actor) == ("scheduled: payload changed", explanation.moment(message.due_at), "")
    assert "&quot;step&quot;: 2" in response.content.decode()
    dead = samples.failed(samples.claimed(message), dead=True, **change)
    assert why(viewer, dead).endswith(": “RetryLater: soon”")


def test_a_long_log_is_shown_by_its_latest_steps(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(steps_shown=2)
    response = page_of(viewer, samples.consumed())
    assert [step.after for step in response.context["timeline"]] == ["purged"]
    assert len(response.context["deliveries"]) == 1
    assert "1 earlier step is not shown." in samples.text(response)


def test_times_are_those_of_the_readers_time_zone(viewer: Client, settings: Any) -> None:
    message = samples.scheduled()
    settings.TIME_ZONE = "Asia/Tokyo"
    page = samples.text(page_of(viewer, message))
    assert "Timeline (Asia/Tokyo)" in page
    there = timezone.localtime(message.due_at, timezone.get_fixed_timezone(540))
    assert there.strftime("%Y-%m-%d %H:%M:%S") in page


def test_secret_values_are_masked_at_any_depth_until_they_are_revealed_once(viewer: Client) -> None:
    payload = {
        "order": 4711,
        "api_key": "leak-1",
        "user": {"Password": "leak-2", "name": "anna", "accounts": [{"authToken": {"value": "leak-3"}}]},
        "session_cookie": ["leak-4"],
    }
    running = samples.running(payload, headers={"Authorization": "Bearer leak-5", "trace": "abc"})
    message = samples.succeeded(running, '{"total": "49.90", "token": "leak-6"}')
    masked = page_of(viewer, message).content.decode()
    for shown in ("4711", "anna", "abc", "<h3>Result</h3>", "49.90"):
        assert shown in masked
    assert "leak" not in masked
    trusted = logged_in(person("rita", "view_message", "reveal_message"))
    masked = page_of(trusted, message).content.decode()
    assert "leak" not in masked
    assert reveal_url(message) in masked
    response = trusted.post(reveal_url(message))
    html = response.content.decode()
    assert response.status_code == 200
    for number in range(1, 7):
        assert f"leak-{number}" in html
    assert "no-store" in response["Cache-Control"]
    # The call to copy stays masked.
    assert html.count("leak-1") == 1
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.message_id) == ("user:rita", "reveal", message.pk)
    assert "leak" not in str(AuditEvent.objects.values())
    assert "leak" not in page_of(trusted, message).content.decode()
    plain = samples.consumed({"order": 4711})
    assert "<h3>Result</h3>" not in page_of(viewer, plain).content.decode()
    # Nothing is masked there.
    assert reveal_url(plain) not in page_of(trusted, plain).content.decode()


def test_a_long_payload_is_shown_by_its_beginning(viewer: Client) -> None:
    message = samples.scheduled({"text": "x" * 100_000, "zz-last": "the end"})
    response = page_of(viewer, message)
    assert "Only the beginning is shown" in samples.text(response)
    assert "the end" not in response.content.decode()
    assert len(response.content) < 120_000


@pytest.mark.parametrize("retry", [["1m", "2m"], RetryPolicy.exponential("5s", max_attempts=None), False], ids=str)
def test_the_call_that_would_schedule_the_same_can_be_copied(viewer: Client, retry: Any) -> None:
    content = {"n": 2**63 - 1, "ok": True, "none": None, "token": "leak", "text": "a'b"}
    options: dict[str, Any] = {"key": "order-1", "unique": 7200.0, "queue": "mails", "priority": 5, "expires": 3600.0}
    options |= {"max_attempts": 3, "timeout": False, "lease": 120.0, "headers": {"h": 1}}
    message = samples.scheduled(content, retry=retry, **options)
    page = page_of(viewer, message)
    # Large numbers stay exact.
    assert f"&quot;n&quot;: {2**63 - 1}," in page.content.decode()
    calls: list[Any] = []
    known: dict[str, Any] = {"datetime": datetime, "RetryPolicy": RetryPolicy}
    known["schedule_message"] = lambda *given, retry, **named: calls.append((*given, named, as_policy(retry)))
    eval(page.context["call"], known)
    options["due_at"] = message.due_at
    assert calls == [(samples.TOPIC, {**content, "token": payload.MASK}, options, as_policy(retry))]


@pytest.mark.parametrize(
    ("unique", "shown"),
    [("live", "while it is live"), ("scheduled", "until its delivery begins"), ("90m", "until 1 h 30 m after its end")],
)
def test_the_page_says_how_long_a_message_holds_its_key(viewer: Client, unique: str, shown: str) -> None:
    message = samples.scheduled(key="k", unique=unique)
    response = page_of(viewer, message)
    assert shown in samples.text(response)
    assert ("unique=" in response.context["call"]) == (unique != "live")
    assert "holds its key" not in samples.text(page_of(viewer, samples.scheduled()))


def test_related_messages_are_linked(viewer: Client) -> None:
    message = samples.dead(key='a "b"')
    other = samples.scheduled(key='a "b"')
    samples.scheduled(key="c", queue="mails")
    related = dict(page_of(viewer, message).context["related"])
    assert list(related) == ["same key", "same topic", "same error", "same queue"]
    found = viewer.get(related["same key"]).context["cl"].result_list
    assert [row.pk for row in found] == [other.pk, message.pk]
    assert [row.pk for row in viewer.get(related["same error"]).context["cl"].result_list] == [message.pk]


def test_a_purged_message_is_reported_and_leads_to_the_list(boss: Client) -> None:
    message = samples.scheduled()
    url, reveal = samples.change_url(message), reveal_url(message)
    unguarded(Message).all().delete()
    response = boss.get(url, follow=True)
    assert response.redirect_chain == [(reverse(samples.LIST), 302)]
    assert samples.said(response) == [f"There is no message #{url.split('/')[-3]}. It may have been purged."]
    assert boss.post(reveal).status_code == 404
    assert not AuditEvent.objects.exists()


def repeat_url(message: Message) -> str:
    return reverse("admin:delayq_message_repeat", args=[message.pk])


@pytest.mark.parametrize("state", State)
def test_a_message_that_has_ended_is_repeated_by_its_button_once(operator: Client, state: State) -> None:
    message = samples.MAKERS[state]()
    nonce = re.search(r'name="nonce" value="(\w|-)+"', page_of(operator, message).content.decode())
    assert (nonce is not None) == (state in FINAL)
    sent = {"nonce": nonce[0].split('"')[3] if nonce else "made up"}
    answers = [samples.said(operator.post(repeat_url(message), sent, follow=True)) for _ in range(2)]
    made = list(Message.objects.filter(pk__gt=message.pk))
    if state not in FINAL:
        word = f"Not repeated: message {message.pk} is {state}: only one that has ended is repeated"
        assert (answers, made) == ([[word]] * 2, [])
        return
    (new,) = made
    assert answers == [
        [f"This message repeats #{message.pk}."],
        ["This was confirmed already: nothing more was done."],
    ]
    assert (new.topic, new.payload, new.repeats) == (message.topic, message.payload, message.pk)
    page = page_of(operator, new)
    related = dict(page.context["related"])["the message that it repeats"]
    assert [row.pk for row in operator.get(related).context["cl"].result_list] == [message.pk]
    event = AuditEvent.objects.get()
    assert (event.action, event.message_id, event.target) == ("repeat", message.pk, f"{message} → #{new.pk}")
    assert new.transitions.get().actor == event.actor
    # A call that somebody copies from the page repeats nothing.
    assert "delayq" not in page.context["call"]


def life_of(client: Client, message: Message) -> tuple[list[tuple[str, float]], list[str], str]:
    """Return the colour and the width of each part of the drawn life, the words for each, and its legend."""
    html = page_of(client, message).content.decode()
    figure = re.search(r'<figure class="dq-chart">.*?</figure>', html, re.DOTALL)
    assert figure is not None
    drawing, legend = figure[0].split('<ul class="dq-legend">')
    parts = re.findall(r'<rect class="dq-fill-(\w+)" x="[\d.]+" y="0" width="([\d.]+)"', drawing)
    words = re.findall(r"<title>(.*?)</title>", drawing)
    return [(fill, float(width)) for fill, width in parts], words, samples.without_tags(legend)


def test_the_life_of_a_message_is_drawn_to_scale(viewer: Client) -> None:
    parts, words, legend = life_of(viewer, samples.scheduled(delay="2d"))
    assert [fill for fill, _width in parts] == ["due", "none"]
    assert parts[0][1] < 2
    assert parts[1][1] > 98
    assert re.fullmatch(r"until it is due next: (2\sd|1\sd\s23\sh.*)", words[1])
    assert "until it is due next" in legend


def test_the_life_of_a_message_tells_its_runs_and_those_that_failed(viewer: Client) -> None:
    message = samples.failed(samples.running(), delay=timedelta(hours=1), error="Timeout: 5", reason="retry")
    parts, words, legend = life_of(viewer, message)
    assert [fill for fill, _width in parts if fill in ("bad", "none")] == ["bad", "none"]
    (run,) = (text for text in words if text.startswith("delivery 1, failed: "))
    assert run.endswith(", Timeout: 5")
    assert all(name in legend for name in ("failed", "until it is due next"))
    parts, words, legend = life_of(viewer, samples.consumed())
    assert parts[-1][0] == "0"
    assert "until it is due next" not in legend
    # A run that somebody wants to end is one run.
    running = samples.running()
    cancel_message(running)
    parts, words, legend = life_of(viewer, running)
    assert [text.partition(",")[0] for text in words if text.startswith("delivery")] == ["delivery 1"]
    assert re.fullmatch(r"until its lease ends: [\d.\sms]+, then delivery 2, unless its worker renews it", words[-1])
    assert "until its lease ends" in legend


def test_the_page_links_the_messages_that_died_of_the_same_error_in_the_last_hour(viewer: Client) -> None:
    message, other, older = samples.dead(), samples.dead(), samples.dead()
    unguarded(Message).filter(pk=older.pk).update(finished_at=timezone.now() - timedelta(minutes=61))
    samples.failed(samples.running(), dead=True, reason="given up", error="KeyError: another")
    retrying = samples.failed(samples.running(), delay=timedelta(hours=1), error=message.error, reason="retry")
    for each in (message, retrying):
        page = page_of(viewer, each)
        assert "2 messages died of this error in the last hour" in page.content.decode()
        found = viewer.get(page.context["alike_url"]).context["cl"].result_list
        assert {row.pk for row in found} == {message.pk, other.pk}
    assert "died of this error" not in page_of(viewer, samples.consumed()).content.decode()


SECRET = {"order": 1, "api_key": "leak", "cards": [{"pin": 1}, {"pin": 2}]}


def reader(*more: str) -> Client:
    return logged_in(person("reader", "view_message", "requeue_message", "reveal_message", *more))


def edited(client: Client, message: Message, payload: str) -> Any:
    return client.post(repeat_url(message), {"nonce": f"n {payload}"[:32], "payload": payload}, follow=True)


@pytest.mark.parametrize("state", State)
def test_a_message_that_has_ended_runs_again_with_an_edited_payload(db: None, state: State) -> None:
    message = samples.MAKERS[state]()
    client = reader()
    assert ('id="again"' in page_of(client, message).content.decode()) == (state in FINAL)
    answers = [edited(client, message, '{"order": 2}') for _ in range(2)]
    made = list(Message.objects.filter(pk__gt=message.pk))
    if state not in FINAL:
        assert "only one that has ended is repeated" in answers[0].content.decode()
        assert made == []
        return
    (new,) = made
    assert (new.payload, new.topic, new.repeats) == ({"order": 2}, message.topic, message.pk)
    assert samples.said(answers[1]) == ["This was confirmed already: nothing more was done."]
    event = AuditEvent.objects.get()
    assert (event.action, event.target) == ("repeat", f"{message} → #{new.pk}, with an edited payload")
    assert (event.message_id, new.transitions.get().actor) == (message.pk, event.actor)


def test_a_masked_value_of_an_edited_payload_stays_where_its_mask_is(db: None) -> None:
    message, client = samples.dead(SECRET), reader()
    html = page_of(client, message).content.decode()
    assert ("leak" in html, html.count(payload.MASK) >= 3) == (False, True)
    shown = payload.pretty(SECRET).replace('"order": 1', '"order": 2')
    assert edited(client, message, shown).status_code == 200
    assert Message.objects.latest("pk").payload == SECRET | {"order": 2}
    assert edited(client, message, '{"order": true, "api_key": "other"}').status_code == 200
    # 1 and true are equal, and are not the same.
    assert repr(Message.objects.latest("pk").payload) == repr({"order": True, "api_key": "other"})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "This field is required"),
        ("{order: 1}", "This is not JSON"),
        ("[" * 100_000, "This is not JSON"),
        ("[" * 500 + "]" * 500, "Not repeated"),
        ('{"order": NaN}', "Not repeated"),
        ('{"order": "\\u0000"}', "Not repeated"),
        (f'{{"order": "{payload.MASK}"}}', "A mask stands for"),
        (f'{{"key": "{payload.MASK}"}}', "A mask stands for"),
        (f'{{"cards": [{{"pin": "{payload.MASK}"}}]}}', "A mask stands for"),
    ],
)
def test_an_edited_payload_that_cannot_be_is_told_and_kept_in_the_form(db: None, given: str, problem: str) -> None:
    message, client = samples.dead(SECRET), reader()
    response = edited(client, message, given)
    html = response.content.decode()
    assert (problem in html, "leak" in html) == (True, False)
    assert '<details class="dq-panel" id="again" open>' in html
    assert response.context["again"]["payload"].value() == given
    assert Message.objects.count() == 1
    assert not AuditEvent.objects.exists()


def test_a_payload_that_the_limit_key_of_its_handler_does_not_take_is_told(db: None) -> None:
    handler("t.admin", limit=1, limit_key=lambda message: message.payload["customer"])(lambda message: None)
    message = samples.dead({"customer": "acme"})
    assert "Not repeated: &#x27;customer&#x27;" in edited(reader(), message, '{"shop": 1}').content.decode()


@pytest.mark.parametrize("permissions", [(), ("requeue_message",), ("reveal_message",)])
def test_an_edited_payload_needs_both_permissions(db: None, permissions: tuple[str, ...]) -> None:
    message, user = samples.dead(), logged_in(person("half", "view_message", *permissions))
    assert 'id="again"' not in page_of(user, message).content.decode()
    assert edited(user, message, "{}").status_code == 403
    assert (Message.objects.count(), AuditEvent.objects.count()) == (1, 0)


def test_an_edited_payload_is_not_taken_by_a_read_only_admin_nor_without_its_token(settings: Any, db: None) -> None:
    message, client = samples.dead(), reader()
    user = logged_in(person("forged", "view_message", "requeue_message", "reveal_message"), enforce_csrf_checks=True)
    assert edited(user, message, "{}").status_code == 403
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert 'id="again"' not in page_of(client, message).content.decode()
    assert edited(client, message, "{}").status_code == 403
    assert Message.objects.count() == 1


def test_a_repeat_is_refused_in_words_while_another_message_has_the_key(operator: Client) -> None:
    message = samples.dead(key="k")
    other = samples.scheduled(key="k")
    (said,) = samples.said(operator.post(repeat_url(message), {"nonce": "one"}, follow=True))
    assert said.startswith(f"Not repeated: message {other.pk} of topic 't.admin' is live and has this key")
    assert not AuditEvent.objects.exists()


@pytest.mark.postgresql("SQLite keeps the constraint")
@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (samples.running, {"leased_until": None}),
        (samples.running, {"deliveries": 0, "moves": 0}),
        (samples.dead, {"finished_at": None}),
        (samples.dead, {"leased_until": timezone.now()}),
        (samples.scheduled, {"finished_at": timezone.now()}),
        (samples.scheduled, {"reported": 9, "excused": 9}),
        *((samples.scheduled, {name: wrong}) for name in ("retry", "headers", "payload") for wrong in ([60], "x", 0)),
    ],
)
def test_a_row_that_contradicts_itself_has_its_page(boss: Client, make: Any, columns: dict[str, Any]) -> None:
    message = make()
    unguarded(Message).filter(pk=message.pk).update(**columns)
    try:
        assert page_of(boss, message).status_code == 200
        assert boss.get(reverse(samples.LIST) + "?state=all").status_code == 200
    finally:
        unguarded(Message).filter(pk=message.pk).delete()


@pytest.mark.parametrize("state", State)
def test_a_message_is_offered_the_actions_that_change_it(operator: Client, state: State) -> None:
    of_waiting = ["cancel", "reschedule", "run", "move"]
    offered = {State.SCHEDULED: of_waiting, State.RUNNING: ["cancel"], State.CONSUMED: []}
    html = page_of(operator, samples.MAKERS[state]()).content.decode()
    buttons = re.findall(r'action="/admin/delayq/message/action/(\w+)/"', html)
    assert buttons == offered.get(state, ["requeue"])
