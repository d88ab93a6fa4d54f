"""The page of dead letters: its groups, and the actions on a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.console.admin import dead_letters_page
from django_delayq.console.models import Acknowledgement, AuditEvent
from django_delayq.console.statements import TooSlow
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.rows import unguarded

from . import samples
from .asking import answer, worked_off
from .conftest import logged_in

pytestmark = pytest.mark.django_db

PAGE = "admin:delayq_console_deadletters_changelist"
HOSTILE = 'Broken "quotes": <script>, back\\slash, 100% * and so on…'
ERRORS = ("ValueError: no", "ValueError", "", "5", "=", "a*", "state:dead", "x,y")
UNPRINTABLE = "Exit: \x1b[31mfatal\x1b[0m, \ufeffzero\u200bwidth, soft\xadhyphen, \U0001f468\u200d\U0001f469"


def died(topic: str = samples.TOPIC, error: str = "ValueError: no", ago: timedelta = timedelta(0)) -> Message:
    message = samples.dead()
    at = timezone.now() - ago
    unguarded(Message).filter(pk=message.pk).update(topic=topic, error=error, finished_at=at)
    return samples.fresh(message)


def groups(client: Client, table: str) -> dict[tuple[str | None, str | None], Any]:
    response = client.get(reverse(PAGE))
    assert response.status_code == 200
    return {(shown.group.topic, shown.group.error): shown.group for shown in response.context[table]}


def press(client: Client, action: str, group: dead_letters_page.DeadGroup, **data: Any) -> Any:
    """Press a button of the page and confirm."""
    page = client.get(reverse(PAGE)).content.decode()
    assert samples.action_url(action) in page
    given = {"search": group.search, "origin": "deadletters"}
    return answer(client, action, client.post(samples.action_url(action), given), **data)


def test_dead_letters_are_grouped_by_topic_and_by_kind_of_error(viewer: Client) -> None:
    assert "No message is dead." in samples.text(viewer.get(reverse(PAGE)))
    day, week = timedelta(hours=5), timedelta(days=3)
    first = died("t.a", "TimeoutError: …", timedelta(days=30))
    died("t.a", "TimeoutError: …", week)
    died("t.a", "TimeoutError: …", day)
    last = died("t.a", "ValueError: no")
    died("t.b", "ValueError: no")
    samples.cancelled()
    topics = groups(viewer, "topics")
    assert {key: group.count for key, group in topics.items()} == {("t.a", None): 4, ("t.b", None): 1}
    whole = topics["t.a", None]
    assert (whole.recent, whole.samples[0]) == ({"1h": 1, "24h": 2, "7d": 3}, last.pk)
    assert (whole.first, whole.last) == (first.finished_at, last.finished_at)
    errors = groups(viewer, "errors")
    assert {key: group.count for key, group in errors.items()} == {
        (None, "TimeoutError: …"): 3,
        (None, "ValueError: no"): 2,
    }
    of_no = errors[None, "ValueError: no"]
    assert [(group.topic, group.count) for group in of_no.topics] == [("t.b", 1), ("t.a", 1)]


def test_an_error_of_many_topics_is_one_row_that_leads_to_each_of_them(viewer: Client) -> None:
    for number in range(3):
        for error in ("ValueError: no", "TimeoutError"):
            died(f"t.{number}", error)
    response = viewer.get(reverse(PAGE))
    assert [(row.group.error, row.group.count) for row in response.context["errors"]] == [
        ("TimeoutError", 3),
        ("ValueError: no", 3),
    ]
    html = unescape(response.content.decode())
    for row in response.context["errors"]:
        assert row.group.recent["1h"] == 3
        for topic, number, url in row.topics:
            assert url in html
            found = viewer.get(url).context["cl"].result_list
            assert [(message.topic, message.error) for message in found] == [(topic, row.group.error)] * number


def test_the_newest_burst_is_on_top_and_errors_come_before_topics(viewer: Client) -> None:
    for _number in range(3):
        died("t.a", "Old", timedelta(hours=3))
    died("t.a", "Trickle")
    for _number in range(2):
        died("t.a", "Burst", timedelta(minutes=10))
    assert [error for _topic, error in groups(viewer, "errors")] == ["Burst", "Trickle", "Old"]
    html = viewer.get(reverse(PAGE)).content.decode()
    assert html.index("By kind of error") < html.index("By topic")


def test_every_count_leads_to_what_it_counts_and_to_an_example(viewer: Client) -> None:
    ages = (timedelta(minutes=5), timedelta(hours=5), timedelta(days=3), timedelta(days=30))
    mine = [died("t.a", HOSTILE, ago) for ago in ages]
    died("t.a", "other")
    response = viewer.get(reverse(PAGE))
    [row] = [row for row in response.context["errors"] if row.group.error != "other"]
    for number, url in (*row.recent, (4, row.list)):
        shown = viewer.get(url).context["cl"].result_list
        assert [message.pk for message in shown] == [message.pk for message in mine[:number]]
    assert row.samples == [(message.pk, samples.change_url(message)) for message in mine[:3]]
    html = response.content.decode()
    assert row.recent[0][1] in unescape(html)
    assert "<script>, back" not in html


def test_dead_letters_are_chosen_by_queue_and_time(chief: Client) -> None:
    old, new, other = died("t.a", ago=timedelta(days=2)), died("t.a"), died("t.a")
    unguarded(Message).filter(pk__in=[old.pk, new.pk]).update(queue="mails")

    def shown(**given: str) -> Any:
        response = chief.get(reverse(PAGE), given)
        assert ("mails" in response.context["queues"]) is True
        return response

    assert [row.group.count for row in shown().context["topics"]] == [3]
    assert [row.group.count for row in shown(queue="mails").context["topics"]] == [2]
    response = shown(queue="mails", period="24h")
    [row] = response.context["topics"]
    assert row.group.count == 1
    assert '<option value="mails" selected>' in response.content.decode()
    assert [message.pk for message in chief.get(row.list).context["cl"].result_list] == [new.pk]
    # A button under a choice acts on what was chosen.
    asked = chief.post(samples.action_url("requeue"), {"search": row.group.search, "origin": "deadletters"})
    assert asked.context["back"] == reverse(PAGE)
    answer(chief, "requeue", asked)
    worked_off()
    assert [samples.fresh(message).state for message in (old, new, other)] == [State.DEAD, State.SCHEDULED, State.DEAD]
    assert "No message of this queue and time is dead." in samples.text(shown(queue="mails", period="1h"))
    assert [row.group.count for row in shown(period="bogus").context["topics"]] == [2]


@pytest.mark.parametrize("error", [*ERRORS, HOSTILE, UNPRINTABLE])
def test_a_requeue_touches_its_group_alone(chief: Client, error: str) -> None:
    mine = [died("t.a", error) for _number in range(2)]
    others = [died("t.a", f"{error}."), died("t.a", f"x{error}"), died("t.ab", error), died("t.b", error)]
    [group] = [group for group in groups(chief, "errors")[None, error].topics if group.topic == "t.a"]
    response = press(chief, "requeue", group, reason="repaired")
    assert samples.said(response)
    worked_off()
    assert [samples.fresh(message).state for message in mine] == [State.SCHEDULED] * 2
    assert [samples.fresh(message).state for message in others] == [State.DEAD] * 4
    event = AuditEvent.objects.get()
    assert (event.action, event.reason) == ("requeue", "repaired")


def test_a_requeue_of_an_error_reaches_all_of_its_topics(chief: Client) -> None:
    mine, other = [died("t.a"), died("t.b")], died("t.a", "TimeoutError")
    press(chief, "requeue", groups(chief, "errors")[None, "ValueError: no"], reason="repaired")
    worked_off()
    assert [samples.fresh(message).state for message in mine] == [State.SCHEDULED] * 2
    assert samples.fresh(other).state == State.DEAD


def test_a_whole_topic_is_purged_after_its_number_was_typed(chief: Client) -> None:
    mine = [died("t.a", f"Error {number}") for number in range(3)]
    other, live = died("t.b"), samples.scheduled()
    group = groups(chief, "topics")["t.a", None]
    assert "This is not 3." in samples.text(press(chief, "purge", group, typed="2"))
    press(chief, "purge", group)
    worked_off()
    assert not Message.objects.filter(pk__in=[message.pk for message in mine]).exists()
    assert {samples.fresh(message).state for message in (other, live)} == {State.DEAD, State.SCHEDULED}


def test_only_the_newest_are_counted_and_the_page_says_so(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(counted=2)
    died("t.old", ago=timedelta(days=1))
    died("t.a")
    died("t.b")
    text = samples.text(viewer.get(reverse(PAGE)))
    assert "There are more than 2: only the newest 2 are counted here." in text
    assert "t.old" not in text


def test_a_database_that_takes_too_long_is_reported(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(rows: Any, chosen: Any) -> Any:
        raise TooSlow

    monkeypatch.setattr("django_delayq.console.admin.dead_letters_page.group_dead", slow)
    assert "The database took too long to answer." in samples.text(viewer.get(reverse(PAGE)))


# --- what a row unfolds to --------------------------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "/srv/venv/lib/python3.12/site-packages/django_delayq/worker/run/executor.py", line 9, in call
    handler(message)
  File "/srv/shop/mail/handlers.py", line 42, in send
    server.send(message.payload["to"])
  File "/usr/lib/python3.12/smtplib.py", line 341, in connect
    self.sock = self._get_socket(host, port, self.timeout)
smtplib.SMTPServerDisconnected: closed
"""


def test_a_row_names_the_last_frame_of_the_handler(viewer: Client) -> None:
    message = samples.claimed(schedule_message(samples.TOPIC))
    samples.failed(message, error="SMTPServerDisconnected: closed", traceback=TRACEBACK, dead=True)
    died("t.a", "Without a traceback")
    frames = {row.group.error: row.frame for row in viewer.get(reverse(PAGE)).context["errors"]}
    assert frames == {
        "SMTPServerDisconnected: closed": "/srv/shop/mail/handlers.py:42 send",
        "Without a traceback": "",
    }


def test_a_frame_of_a_library_is_better_than_none(viewer: Client) -> None:
    message = samples.claimed(schedule_message(samples.TOPIC))
    trace = 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/smtplib.py", line 7, in connect\nOSError'
    samples.failed(message, error="OSError", traceback=trace, dead=True)
    [row] = viewer.get(reverse(PAGE)).context["errors"]
    assert row.frame == "/usr/lib/python3.12/smtplib.py:7 connect"


def test_a_trend_counts_by_steps_of_a_week_or_of_the_chosen_time(viewer: Client) -> None:
    died()
    died(ago=timedelta(hours=7))
    died(ago=timedelta(days=6, hours=23))
    died(ago=timedelta(days=8))
    [row] = viewer.get(reverse(PAGE)).context["errors"]
    assert (row.group.trend[-1], row.group.trend[-2], row.group.trend[0], sum(row.group.trend)) == (1, 1, 1, 3)
    [row] = viewer.get(reverse(PAGE), {"period": "24h"}).context["errors"]
    assert (row.group.trend[-1], sum(row.group.trend)) == (1, 2)


def test_the_groups_of_a_topic_alone(chief: Client) -> None:
    died("t.a")
    died("t.b")
    response = chief.get(reverse(PAGE), {"topic": "t.a"})
    [row] = response.context["errors"]
    assert row.group.count == 1
    assert "Requeue all 1…" in samples.text(response)
    asked = chief.post(samples.action_url("requeue"), {"search": response.context["chosen"].search})
    answer(chief, "requeue", asked, reason="repaired")
    worked_off()
    assert sorted(Message.objects.values_list("topic", "state")) == [("t.a", "scheduled"), ("t.b", "dead")]


# --- acknowledged errors ----------------------------------------------------------------------------------------------

ACKNOWLEDGE = "admin:delayq_console_deadletters_acknowledge"


def acknowledge(client: Client, error: str = "ValueError: no", **given: str) -> Any:
    return client.post(reverse(ACKNOWLEDGE), {"error": error, **given})


def sections(client: Client) -> tuple[list[str], list[str]]:
    """Return the errors that are shown, and those that are acknowledged."""
    context = client.get(reverse(PAGE)).context
    return tuple([row.group.error for row in context[name]] for name in ("errors", "known"))  # type: ignore[return-value]


@pytest.mark.parametrize("error", ["ValueError: no", "", HOSTILE, UNPRINTABLE])
def test_an_acknowledged_error_is_folded_with_who_and_why(chief: Client, error: str) -> None:
    died(error=error)
    died(error="Another")
    assert acknowledge(chief, error, note="INC-412 <b>").status_code == 302
    assert sections(chief) == (["Another"], [error])
    html = chief.get(reverse(PAGE)).content.decode()
    assert "acknowledged by cora" in html
    assert "INC-412 &lt;b&gt;" in html
    event = AuditEvent.objects.get()
    assert (event.action, event.target, event.reason, event.actor) == ("acknowledge", error, "INC-412 <b>", "user:cora")
    acknowledge(chief, error, undo="1")
    assert sections(chief)[1] == []
    assert [event.action for event in AuditEvent.objects.all()] == ["notice", "acknowledge"]


def test_an_acknowledged_error_comes_back_when_it_comes_more_often_than_in_the_day_before(chief: Client) -> None:
    for hours in (1, 20, 40):
        died(ago=timedelta(hours=hours))
    acknowledge(chief)
    for _number in range(2):
        died()
        assert sections(chief) == ([], ["ValueError: no"])
    died()
    assert sections(chief) == (["ValueError: no"], [])
    assert "(3 in a day since, 2 in the day before)" in samples.text(chief.get(reverse(PAGE)))
    acknowledge(chief, note="still")
    assert sections(chief) == ([], ["ValueError: no"])


def test_an_old_error_comes_back_with_its_first_message(chief: Client) -> None:
    died(ago=timedelta(days=3))
    acknowledge(chief)
    died(ago=timedelta(seconds=-1))
    assert sections(chief) == (["ValueError: no"], [])


def test_only_who_may_requeue_acknowledges(viewer: Client, operator: Client, settings: Any) -> None:
    died()
    for client, status in ((viewer, 403), (Client(), 302), (operator, 302)):
        page = client.get(reverse(PAGE), follow=True).content.decode()
        assert (reverse(ACKNOWLEDGE) in page) is (client is operator)
        assert acknowledge(client, note="forged").status_code == status
        assert Acknowledgement.objects.exists() is (client is operator)
    assert operator.get(reverse(ACKNOWLEDGE)).status_code == 302
    Acknowledgement.objects.all().delete()
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert acknowledge(operator).status_code == 403
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {}}
    strict = logged_in(User.objects.get(username="otto"), enforce_csrf_checks=True)
    assert acknowledge(strict).status_code == 403
    assert not Acknowledgement.objects.exists()
