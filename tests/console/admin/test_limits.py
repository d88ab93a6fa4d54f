"""Messages that wait for limits, on all pages, and the page of limits."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import handler, reschedule_message, restore
from django_delayq.broker import publisher
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.console.admin import panels
from django_delayq.console.admin.explanation import limit_text
from django_delayq.console.search.language import parse
from django_delayq.console.search.listing import Listing, counts
from django_delayq.core import limits
from django_delayq.core.states import State
from django_delayq.inspector.consistency import ConsistencyCheck, Mismatch
from django_delayq.inspector.lines import LimitState
from django_delayq.models import Message, Worker
from django_delayq.project import registry
from django_delayq.record import admission, transitions
from django_delayq.record.sql.rows import Ticket

from . import asking, samples
from .conftest import logged_in, person
from .samples import DB, TOPIC, text

pytestmark = pytest.mark.django_db(transaction=True)

LINE = f"topic {TOPIC}"

in_redis = pytest.mark.usefixtures("redis_client", "puts_are_flushed")

Declare = Callable[..., None]


@pytest.fixture
def declare() -> Iterator[Declare]:
    """Register a handler of the topic with limits, for the time of a test."""
    former = registry._handlers.pop(TOPIC, None)

    def do(**terms: Any) -> None:
        handler(TOPIC, **terms)(lambda message: None)

    yield do
    registry._handlers.pop(TOPIC, None)
    if former is not None:
        registry._handlers[TOPIC] = former


def admit(*messages: Message) -> None:
    """Have a worker take messages, as far as limits allow."""
    admission.claim(DB, [Ticket(message.pk) for message in messages], {TOPIC: 60.0}, samples.WORKER)


def in_line(number: int, **options: Any) -> list[Message]:
    """Schedule messages that are due, and have a worker take them."""
    made = samples.many(number, delay=0, **options)
    admit(*made)
    return [samples.fresh(message) for message in made]


def aged(*messages: Message, hours: float) -> None:
    late = timezone.now() - timedelta(hours=hours)
    Message._base_manager.filter(pk__in=[message.pk for message in messages]).update(due_at=late)


def works(*queues: str) -> None:
    now = timezone.now()
    Worker.objects.create(name="w", host="h", pid=1, queues=queues, topics=[TOPIC], started_at=now, seen_at=now)


def why(client: Client, message: Message) -> str:
    return " ".join(client.get(samples.change_url(message)).context["explanation"])


def found(client: Client, search: str, tab: str = "all") -> list[int]:
    answer = client.get(reverse(samples.LIST), {"q": search, "state": tab})
    assert answer.status_code == 200
    return [message.pk for message in answer.context["cl"].result_list]


# --- the message page -------------------------------------------------------------------------------------------------


def test_the_explanation_names_the_limit_its_numbers_and_the_place_in_the_line(
    viewer: Client, declare: Declare
) -> None:
    declare(limit=2)
    works("default")
    *_running, first, second = in_line(4)
    assert re.fullmatch(
        rf"Limited: it waits for {LINE} \(2 of 2 run\)\. It is the next one\. It has been due for [\d.]+ m?s\.",
        why(viewer, first),
    )
    assert "1 message goes before it." in why(viewer, second)


def test_the_explanation_tells_the_next_slot_of_a_rate(viewer: Client, declare: Declare) -> None:
    declare(rate="60/h", burst=2)
    *_begun, last = in_line(3)
    assert re.search(
        rf"waits for {LINE} \(one in 1 m, 2 together; next slot in ([345]\d\.\d s|60\.0 s|1 m)\)", why(viewer, last)
    )


def test_the_explanation_knows_limits_that_were_removed_or_belong_to_other_processes(
    viewer: Client, declare: Declare
) -> None:
    message = samples.limited(by="queue gone")
    assert "The code does not have this limit any more" in why(viewer, message)
    message = samples.limited(by="topic elsewhere")
    assert "This process has no handler of the topic" in why(viewer, message)


def test_the_explanation_of_a_limited_message_says_that_its_queue_is_not_served(
    viewer: Client, declare: Declare
) -> None:
    declare(limit=1)
    message = in_line(2)[1]
    assert why(viewer, message).endswith("Waiting: no live worker listens to the queue default.")


def test_the_page_shows_the_keys_links_and_steps_of_a_limited_message(viewer: Client, declare: Declare) -> None:
    declare(limit=1)
    message = in_line(2, limit_key="c 1")[1]
    answer = viewer.get(samples.change_url(message))
    facts = dict(answer.context["facts"])
    assert (facts["limit key"], facts["limited by"]) == ("c 1", f"{LINE} key c 1")
    assert "limit_key='c 1'" in answer.context["call"]
    step = answer.context["timeline"][-1]
    assert (step.before, step.after, step.reason) == (
        "scheduled",
        "limited",
        f"{LINE} key c 1: 1 of 1 places are taken",
    )
    urls = dict(answer.context["related"])
    for label, number in (("running under its limit", 1), ("waiting for the same limit", 1)):
        listed = viewer.get(urls[label])
        assert len(listed.context["cl"].result_list) == number
    assert len(viewer.get(urls["same limit key"]).context["cl"].result_list) == 2


def test_a_limited_message_that_goes_on_is_told_in_the_timeline(viewer: Client, declare: Declare) -> None:
    declare(limit=1)
    running, message = in_line(2)
    samples.succeeded(running)
    admission.promote(DB, [LINE], "worker:w")
    step = viewer.get(samples.change_url(message)).context["timeline"][-1]
    assert (step.before, step.after, step.reason) == ("limited", "scheduled", f"{LINE} has room")
    assert "limited by" not in dict(viewer.get(samples.change_url(message)).context["facts"])


@in_redis
def test_a_limited_message_is_not_called_missing_in_redis(chief: Client) -> None:
    message = samples.limited()
    broker = taken(message)
    answer = chief.get(samples.change_url(message))
    shown = {row.name: (row.record, row.redis) for row in answer.context["compared"]}
    assert shown["expected in Redis"] == (f"not in Redis: it waits for {LINE}", "agrees")
    assert not answer.context["may_restore"]
    assert broker.put(message.queue, [Entry.at(message.pk, message.due_at, 0)]).put == 1
    shown = {row.name: (row.record, row.redis) for row in chief.get(samples.change_url(message)).context["compared"]}
    assert shown["expected in Redis"][1] == "differs: only in Redis"


@in_redis
def test_the_consistency_check_finds_limited_messages_only_where_they_are_in_redis() -> None:
    message = samples.limited()
    broker = taken(message)
    check = ConsistencyCheck(DB, broker, "default", pause=0.0).run()
    assert check.total == 0
    assert broker.put(message.queue, [Entry.at(message.pk, message.due_at, 0)]).put == 1
    check = ConsistencyCheck(DB, broker, "default", pause=0.0, fix=True).run()
    assert (check.counts[Mismatch.EXTRA], check.fixed) == (1, 1)


def taken(message: Message) -> RedisBroker:
    """Return a loaded Redis without the message, as after a worker took it."""
    redis_publisher = publisher.get(DB)
    assert redis_publisher is not None
    broker = redis_publisher.broker
    assert isinstance(broker, RedisBroker)
    restore.ensure_horizon(DB, broker, lease=0.001, worker="w")
    broker.remove(message.queue, [message.pk])
    return broker


# --- lists and searches -----------------------------------------------------------------------------------------------


def test_limited_messages_have_a_tab_and_a_badge_that_names_their_limit(viewer: Client) -> None:
    message = samples.limited()
    aged(message, hours=1)
    samples.scheduled()
    answer = viewer.get(reverse(samples.LIST), {"state": "limited"})
    assert [each.pk for each in answer.context["cl"].result_list] == [message.pk]
    assert {tab.label: tab.count for tab in answer.context["cl"].tabs()}["Limited"] == "1"
    html = answer.content.decode()
    assert f'<span class="dq-badge dq-state-limited" title="{LINE}">limited</span>' in html
    assert "limited for 1" in text(answer)
    assert len(found(viewer, "", "live")) == 2
    assert found(viewer, "is:overdue", "overdue") == []


def test_searches_find_limited_messages_by_state_limit_and_key(viewer: Client, declare: Declare) -> None:
    declare(limit=1)
    one = in_line(3, limit_key="a b")
    other = in_line(2, limit_key="c", queue="mail")
    plain = samples.scheduled()
    assert sorted(found(viewer, "state:limited")) == [one[1].pk, one[2].pk, other[1].pk]
    assert found(viewer, "state:limited queue:mail") == [other[1].pk]
    assert found(viewer, f'limit:"{LINE} key a b"') == [one[1].pk, one[2].pk]
    assert sorted(found(viewer, f'limit:"{LINE}*')) == []
    assert found(viewer, "limit:topic*") == found(viewer, "state:limited")
    assert sorted(found(viewer, "limit_key:c")) == sorted(message.pk for message in other)
    assert found(viewer, 'state:limited,scheduled limit_key:"a b"') == [one[1].pk, one[2].pk]
    assert plain.pk not in found(viewer, "limit:x")
    # A message that has left its line may still name it.
    reschedule_message(one[1], delay="1h")
    assert found(viewer, f'limit:"{LINE} key a b"') == [one[2].pk]


def test_the_messages_of_a_line_are_listed_in_its_order(viewer: Client, declare: Declare) -> None:
    declare(limit=1)
    _running, late, early, first = in_line(4)
    aged(early, hours=1)
    Message._base_manager.filter(pk=first.pk).update(priority=5)
    assert found(viewer, f"limit:{_quoted(LINE)}") == [first.pk, early.pk, late.pk]


def _quoted(name: str) -> str:
    return f'"{name}"'


def test_a_search_for_a_limit_is_counted_along_its_line(declare: Declare) -> None:
    declare(limit=1)
    in_line(3)
    now = transitions.now(DB)
    for search, number in ((f'limit:"{LINE}"', 2), ("", 2), (f'limit:"{LINE}" topic:other', 0)):
        counted = counts(Message.objects.all(), parse(search, now=now), now)
        assert counted is not None
        assert counted.states[State.LIMITED].count == number
        assert counted.overdue.count == 0
    assert Listing(Message.objects.all(), parse("state:limited", now=now)).count().count == 2


def test_an_export_tells_the_limit_of_a_limited_message(declare: Declare) -> None:
    admin = User.objects.create_superuser("root")
    client = Client()
    client.force_login(admin)
    declare(limit=1)
    begun, waits, moved = in_line(3, limit_key="k")
    reschedule_message(moved, delay="1h")
    answer = client.post(reverse("admin:delayq_message_export"), {"state": "all", "format": "csv"})
    lines = csv.DictReader(StringIO(answer.getvalue().decode()))
    assert {int(line["id"]): (line["limit_key"], line["limited_by"]) for line in lines} == {
        begun.pk: ("k", ""),
        waits.pk: ("k", f"{LINE} key k"),
        moved.pk: ("k", ""),
    }


# --- actions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "effect", "state"),
    [
        ("cancel", "will be cancelled", State.CANCELLED),
        ("run", "is limited again if its limit is still used up", State.SCHEDULED),
        ("requeue", "unchanged", State.LIMITED),
        ("purge", "unchanged", State.LIMITED),
    ],
)
def test_a_question_about_limited_messages_tells_the_effect(
    chief: Client, action: str, effect: str, state: State
) -> None:
    message = samples.limited()
    asked = asking.ask(chief, action, message)
    assert effect in text(asked)
    if state != State.LIMITED:
        asking.answer(chief, action, asked)
    assert samples.fresh(message).state == state


def test_a_bulk_action_takes_the_limited_messages_of_a_search(chief: Client) -> None:
    made = [samples.limited() for _ in range(3)]
    other = samples.limited(by="queue mail")
    asking.started(chief, "cancel", f'limit:"{LINE}"')
    asking.worked_off()
    assert [samples.fresh(message).state for message in (*made, other)] == ["cancelled"] * 3 + ["limited"]


# --- queues, dashboard, limits ----------------------------------------------------------------------------------------


def test_queues_and_dashboard_count_limited_messages_and_do_not_call_them_overdue(
    viewer: Client, declare: Declare
) -> None:
    declare(limit=1)
    works("default")
    waits = in_line(3, queue="default")[1:]
    aged(*waits, hours=0.5)
    panels.forget()
    queues = viewer.get(reverse("admin:delayq_queue_changelist"))
    (row,) = [row for row in queues.context["queues"] if row.name == "default"]
    assert (row.limited, row.overdue, row.scheduled, row.unserved) == ("2", "0", "0", False)
    assert len(viewer.get(row.limited_url).context["cl"].result_list) == 2
    dashboard = viewer.get(samples.admin_url("dashboard_changelist"))
    tiles = {tile.label: tile for tile in dashboard.context["tiles"]}
    assert (tiles["Limited"].number, tiles["Limited"].note) == ("2", f"longest line: {LINE}")
    assert tiles["Overdue"].number == "0"
    assert [(limit.name, limit.use, limit.waiting) for limit in dashboard.context["limits"]] == [
        (LINE, "1 of 1 run", "2")
    ]
    assert dashboard.context["banners"] == []


def test_a_queue_that_holds_limited_messages_alone_is_listed(viewer: Client) -> None:
    samples.limited(queue="alone")
    queues = viewer.get(reverse("admin:delayq_queue_changelist"))
    assert [row.limited for row in queues.context["queues"] if row.name == "alone"] == ["1"]


def test_the_dashboard_without_limited_messages_says_nothing_of_limits(viewer: Client) -> None:
    samples.scheduled()
    dashboard = viewer.get(samples.admin_url("dashboard_changelist"))
    assert "Limited" not in [tile.label for tile in dashboard.context["tiles"]]
    assert dashboard.context["limits"] == []


def test_a_banner_names_a_line_that_is_old(viewer: Client, declare: Declare) -> None:
    declare(limit=1)
    works("default")
    waits = in_line(3)[1:]
    aged(*waits, hours=2)
    panels.forget()
    answer = viewer.get(samples.admin_url("dashboard_changelist"))
    ((banner, url),) = answer.context["banners"]
    assert re.fullmatch(rf"2 messages wait for {LINE} \(1 of 1 run\), the oldest for 2 h\.", banner.text)
    assert url == samples.admin_url("limits_changelist")


def test_without_a_worker_limited_messages_are_told_as_waiting(viewer: Client) -> None:
    samples.limited()
    (banner, _url) = viewer.get(samples.admin_url("dashboard_changelist")).context["banners"][0]
    assert banner.text.startswith("No worker is alive, so no message will be delivered: 1")


def test_the_limits_page_lists_what_runs_and_what_waits(viewer: Client, declare: Declare, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"mail": {"rate": "60/m", "burst": 5}}}
    declare(limit=1)
    in_line(3, limit_key="k")
    in_line(1, limit_key="runs")
    answer = viewer.get(samples.admin_url("limits_changelist"))
    shown = {limit.name: (limit.use, limit.running, limit.waiting) for limit in answer.context["limits"]}
    assert shown[f"{LINE} key k"] == ("1 of 1 run", "1", "2")
    assert shown[f"{LINE} key runs"] == ("1 of 1 run", "1", "0")
    assert shown["queue mail"] == ("one in 1.0 s, 5 together", "0", "0")
    assert "Messages wait for 1 limit." in text(answer)
    first = answer.context["limits"][0]
    assert len(viewer.get(first.running_url).context["cl"].result_list) == 1
    assert len(viewer.get(first.waiting_url).context["cl"].result_list) == 2


def test_the_limits_page_is_for_those_who_may_view_messages(db: None) -> None:
    assert logged_in(person("nora")).get(samples.admin_url("limits_changelist")).status_code == 403


def test_the_limits_page_without_limits_says_how_to_declare_one(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_handlers", {})
    assert "There are no limits." in text(viewer.get(samples.admin_url("limits_changelist")))


def test_the_preview_of_a_restore_says_that_limited_messages_are_left_out() -> None:
    client = logged_in(person("rita", "view_message", "restore_message"))
    samples.limited(queue="mail")
    samples.scheduled()
    url = reverse("admin:delayq_console_health_restore")
    assert "1 limited message is left out: it is in the record alone" in text(client.get(url, {"overdue": "run"}))
    other = client.get(url, {"overdue": "run", "queues": "default"})
    assert "limited message" not in text(other)


def test_a_number_of_a_limit_is_told_without_a_place_that_is_kept(declare: Declare) -> None:
    now = transitions.now(DB)
    limit = limits.Limit(5)
    assert limit_text(LimitState("x", limit, running=3), now) == "3 of 5 run"
    assert limit_text(LimitState("x", limit, running=3, kept=1), now) == "3 of 5 run, 1 about to begin"
