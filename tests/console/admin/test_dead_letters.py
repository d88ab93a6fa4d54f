"""The page of dead letters: its groups, and the actions on a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq.console.admin import dead_letters_page
from django_delayq.console.models import AuditEvent
from django_delayq.console.statements import TooSlow
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.rows import unguarded

from . import samples
from .asking import answer, worked_off

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
    assert (whole.recent, whole.sample) == ({"1h": 1, "24h": 2, "7d": 3}, last.pk)
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
    assert "3 topics" in samples.text(response)
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
    assert row.sample == samples.change_url(mine[0])
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
