"""The list of messages: what it finds, in which order, and what it never asks of a large table."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_delayq import schedule_message
from django_delayq.admin import paginator
from django_delayq.models import Message, Worker
from django_delayq.states import State
from django_delayq.transitions import now

from . import samples

pytestmark = pytest.mark.django_db


def listed(client: Client, **query: Any) -> list[int]:
    response = client.get(reverse(samples.LIST), query)
    assert response.status_code == 200
    return [message.pk for message in response.context["cl"].result_list]


def test_the_list_shows_what_is_live_soonest_first(viewer: Client) -> None:
    later = samples.scheduled(delay="2h")
    sooner = samples.scheduled(delay="1h")
    running = samples.running()
    samples.consumed()
    assert listed(viewer) == [running.pk, sooner.pk, later.pk]


def test_messages_due_at_the_same_moment_have_an_order_and_none_is_lost_between_pages(viewer: Client) -> None:
    due = now(samples.DB) + timedelta(hours=1)
    made = [samples.scheduled(delay=None, due=due).pk for _number in range(60)]
    assert listed(viewer) + listed(viewer, p=2) == made


@pytest.mark.parametrize("state", State)
def test_each_state_can_be_listed_alone(viewer: Client, state: State) -> None:
    made = samples.one_of_each()
    assert listed(viewer, state=state) == [made[state].pk]


def test_all_states_are_listed_newest_first(viewer: Client) -> None:
    made = [message.pk for message in samples.one_of_each().values()]
    assert listed(viewer, state="all") == made[::-1]


def test_a_finished_state_is_listed_last_finished_first(viewer: Client) -> None:
    first, second = samples.dead(), samples.dead()
    assert listed(viewer, state="dead") == [second.pk, first.pk]


def test_what_is_overdue_or_soon_can_be_listed(viewer: Client) -> None:
    overdue = samples.scheduled(delay=0)
    in_minutes = samples.scheduled(delay="10m")
    in_hours = samples.scheduled(delay="10h")
    samples.scheduled(delay="10d")
    samples.running()
    assert listed(viewer, due="overdue") == [overdue.pk]
    assert listed(viewer, due="hour") == [in_minutes.pk]
    assert listed(viewer, due="day") == [in_minutes.pk, in_hours.pk]


def test_digits_are_an_id_in_any_state(viewer: Client) -> None:
    message = samples.consumed()
    samples.scheduled(key=str(message.pk))
    assert listed(viewer, q=message.pk) == [message.pk]
    assert listed(viewer, q=f" id:{message.pk} ") == [message.pk]
    assert listed(viewer, q=message.pk, state="dead") == []


def test_a_key_is_found_in_any_state_and_only_as_a_whole(viewer: Client) -> None:
    finished = samples.consumed(key="order-1")
    live = samples.scheduled(key="order-1")
    samples.scheduled(key="order-10")
    assert listed(viewer, q="key:order-1") == [live.pk, finished.pk]


def test_topic_and_queue_are_found_only_as_a_whole(viewer: Client) -> None:
    mine = schedule_message("mail.send", queue="mails")
    schedule_message("mail.send.later", queue="mails-later")
    assert listed(viewer, q="topic:mail.send") == [mine.pk]
    assert listed(viewer, q="queue:mails") == [mine.pk]
    assert listed(viewer, q="topic:mail") == []


def test_any_other_text_is_a_key_or_a_topic(viewer: Client) -> None:
    by_topic = schedule_message("mail.send", delay=60)
    by_key = samples.scheduled(key="mail.send", delay=90)
    assert listed(viewer, q="mail.send") == [by_topic.pk, by_key.pk]
    assert listed(viewer, q="mail") == []


@pytest.mark.parametrize("term", ["9" * 19, "9" * 5000, "id:x", "id:", "key:", "%", "'", "\\", "٣", "key:\x00"])
def test_a_search_that_fits_nothing_finds_nothing(viewer: Client, term: str) -> None:
    samples.scheduled(key="k")
    found = listed(viewer, q=term)
    # Django drops a term with a NUL, and says so.
    assert found == [] or "\x00" in term


@pytest.mark.parametrize("lookup", ["payload__token__startswith", "topic__contains", "worker", "transitions__actor"])
def test_no_lookup_but_the_filters_can_be_put_into_the_address(viewer: Client, lookup: str) -> None:
    samples.scheduled({"token": "abc"})
    assert viewer.get(reverse(samples.LIST), {lookup: "a"}).status_code == 400


_ADDRESSES: list[dict[str, Any]] = [
    {},
    {"p": 2},
    {"o": "2.-3.4"},
    {"all": ""},
    {"_facets": ""},
    *({"state": state} for state in [*State, "all"]),
    *({"due": due} for due in ("overdue", "hour", "day")),
    *({"q": q} for q in ("1", "key:a", "topic:a", "queue:a", "a")),
]


@pytest.mark.parametrize("query", _ADDRESSES, ids=str)
def test_the_list_asks_nothing_that_grows_with_the_table(viewer: Client, query: dict[str, Any]) -> None:
    for _number in range(60):
        samples.scheduled()
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert viewer.get(reverse(samples.LIST), query).status_code == 200
    about = [entry["sql"] for entry in captured if "delayq_message" in entry["sql"]]
    assert about
    for sql in about:
        assert_bounded(sql)
        assert "payload" not in sql
        assert '"headers"' not in sql


def assert_bounded(sql: str) -> None:
    assert not re.search(r"\b(DISTINCT|GROUP BY|LIKE|ILIKE|OFFSET \d{5,})\b", sql, re.IGNORECASE), sql
    if "COUNT(" in sql.upper():
        assert re.search(rf"COUNT\(\*\) FROM \(SELECT .* LIMIT {paginator.CAP + 1}\) subquery$", sql), sql


def test_beyond_the_cap_nobody_counts(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paginator, "CAP", 55)
    for _number in range(57):
        samples.scheduled()
    page = samples.text(viewer.get(reverse(samples.LIST)))
    assert "55+ messages" in page
    Message.objects.filter(pk__lte=Message.objects.earliest("pk").pk + 1).delete()
    page = samples.text(viewer.get(reverse(samples.LIST)))
    assert "55 messages" in page


@pytest.mark.parametrize(("separators", "shown"), [(False, "10,000+"), (True, "&gt;10,000")])
def test_a_capped_count_reads_well(settings: Any, separators: bool, shown: str) -> None:
    from django.template import Context, Template

    settings.USE_THOUSAND_SEPARATOR = separators
    rendered = Template("{{ count }}").render(Context({"count": paginator.CappedCount(10_000)}))
    assert rendered.replace(">", "&gt;") == shown


def test_the_list_says_when_and_how_late(viewer: Client) -> None:
    samples.scheduled(delay="250s")
    samples.scheduled(delay=0)
    page = samples.text(viewer.get(reverse(samples.LIST)))
    assert re.search(r"in 4\sm\s\d+\ss", page)
    assert re.search(r"overdue by \d+\sms", page)


def test_who_may_not_view_messages_sees_no_list(client: Client) -> None:
    from .conftest import logged_in, person

    assert logged_in(person("nora", "cancel_message")).get(reverse(samples.LIST)).status_code == 403


def test_workers_are_listed_with_the_moment_they_were_last_seen(viewer: Client) -> None:
    seen = now(samples.DB)
    Worker.objects.create(
        name=samples.WORKER, host="host", pid=1, queues=["default", "mails"], started_at=seen, seen_at=seen
    )
    page = samples.text(viewer.get(reverse("admin:django_delayq_worker_changelist")))
    assert "default, mails" in page
    assert re.search(r"\d ago|ms ago", page)
    detail = viewer.get(reverse("admin:django_delayq_worker_change", args=[samples.WORKER.replace("/", "_2F")]))
    assert samples.WORKER in samples.text(detail)
