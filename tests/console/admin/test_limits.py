"""Messages that wait for limits, on all pages, and the page of limits."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import override_limit, reschedule_message, schedule_messages
from django_delayq.console.admin import panels
from django_delayq.console.models import AuditEvent, Rollup
from django_delayq.models import LimitOverride, Message
from django_delayq.record import admission, reads
from django_delayq.record.sql.rows import Ticket
from tests.support.limits import Declare, claim_limited
from tests.support.no_handlers import forget_handlers
from tests.support.statements import count_statements

from . import asking, samples
from .conftest import logged_in, person
from .samples import DB, TOPIC, late, text, why, worker

pytestmark = pytest.mark.django_db(transaction=True)

LINE = f"topic {TOPIC}"

in_redis = pytest.mark.usefixtures("redis_client", "puts_are_flushed")


@pytest.fixture(autouse=True)
def _one_at_a_time(declare: Declare) -> None:
    declare(TOPIC, limit=1)


def admit(*messages: Message) -> None:
    """Have a worker take messages, as far as limits allow."""
    claim_limited(DB, [Ticket(message.pk) for message in messages], {TOPIC: 60.0}, samples.WORKER)


def in_line(number: int, **options: Any) -> list[Message]:
    """Schedule messages that are due, and have a worker take them: one begins, the others wait."""
    made = samples.many(number, delay=0, **options)
    admit(*made)
    return [samples.fresh(message) for message in made]


def rows(answer: Any) -> list[Any]:
    """Return what needs somebody, but for the row that calls Redis empty, as it is in these tests."""
    return [row for row in answer.context["rows"] if "Redis may lack" not in row.text]


def found(client: Client, search: str, tab: str = "all") -> list[int]:
    return samples.listed(client, q=search, state=tab)


def dashboard(client: Client) -> Any:
    panels.forget()
    return client.get(samples.admin_url("dashboard_changelist"))


# --- the message page -------------------------------------------------------------------------------------------------


def test_the_explanation_names_the_limit_its_use_and_the_place_in_the_line(viewer: Client, declare: Declare) -> None:
    declare(TOPIC, limit=2)
    worker(topics=[TOPIC])
    *_running, first, second = in_line(4)
    # Later it is overdue, and the explanation goes on.
    assert re.match(
        rf"Limited: it waits for {LINE} \(2 of 2 run\)\. It is the next one\. It has been due for [\d.]+ m?s\.",
        why(viewer, first),
    )
    assert "1 message goes before it." in why(viewer, second)


def test_the_explanation_tells_the_next_slot_of_a_rate(viewer: Client, declare: Declare) -> None:
    declare(TOPIC, rate="60/h", burst=2)
    *_begun, last = in_line(3)
    assert re.search(
        rf"waits for {LINE} \(60 an hour, burst 2; next slot in ([345]\d\.\d s|60\.0 s|1 m)\)", why(viewer, last)
    )


def test_the_explanation_of_a_limited_message_says_that_its_queue_is_not_served(viewer: Client) -> None:
    message = in_line(2)[1]
    assert why(viewer, message).endswith("Waiting: no live worker listens to the queue default.")


def test_the_page_shows_the_keys_and_links_of_a_limited_message(viewer: Client) -> None:
    running, message = in_line(2, limit_key="c 1")
    answer = viewer.get(samples.change_url(message))
    facts = dict(answer.context["facts"])
    assert (facts["limit key"], facts["limited by"]) == ("c 1", f"{LINE} key c 1")
    assert "limit_key='c 1'" in answer.context["call"]
    assert [step.after for step in answer.context["timeline"]] == ["scheduled"]
    urls = dict(answer.context["related"])
    for label, number in (("running under its limit", 1), ("waiting for the same limit", 1)):
        listed = viewer.get(urls[label])
        assert len(listed.context["cl"].result_list) == number
    assert len(viewer.get(urls["same limit key"]).context["cl"].result_list) == 2
    samples.succeeded(running)
    admission.tidy(DB)
    assert "limited by" not in dict(viewer.get(samples.change_url(message)).context["facts"])


@in_redis
def test_a_limited_message_is_expected_in_redis_as_any_other(chief: Client) -> None:
    message = in_line(2)[1]
    samples.fill()
    answer = chief.get(samples.change_url(message))
    shown = {row.name: row.redis for row in answer.context["compared"]}
    assert shown["expected in Redis"] == "agrees"


# --- lists and searches -----------------------------------------------------------------------------------------------


def test_limited_messages_have_a_tab_and_a_badge_that_names_their_limit(viewer: Client) -> None:
    message = in_line(2)[1]
    late(message, seconds=3600)
    later = samples.scheduled()
    answer = viewer.get(reverse(samples.LIST), {"state": "limited"})
    assert [each.pk for each in answer.context["cl"].result_list] == [message.pk]
    counts = {tab.label: tab.count for tab in answer.context["cl"].tabs()}
    assert (counts["Limited"], counts["Scheduled"], counts["Overdue"]) == ("1", "2", "0")
    html = answer.content.decode()
    assert f'<span class="dq-badge dq-state-limited" title="{LINE}">limited</span>' in html
    assert "limited for 1" in text(answer)
    assert found(viewer, "", "scheduled") == [message.pk, later.pk]
    assert found(viewer, "is:overdue", "overdue") == []


def test_searches_find_limited_messages_by_word_limit_and_key(viewer: Client) -> None:
    one = in_line(3, limit_key="a b")
    other = in_line(2, limit_key="c", queue="mail")
    plain = samples.scheduled()
    assert sorted(found(viewer, "is:limited")) == [one[1].pk, one[2].pk, other[1].pk]
    assert found(viewer, "is:limited queue:mail") == [other[1].pk]
    assert found(viewer, f'limit:"{LINE} key a b"') == [one[1].pk, one[2].pk]
    assert sorted(found(viewer, f'limit:"{LINE}*')) == []
    assert found(viewer, "limit:topic*") == found(viewer, "is:limited")
    assert sorted(found(viewer, "limit_key:c")) == sorted(message.pk for message in other)
    assert found(viewer, 'is:limited limit_key:"a b"') == [one[1].pk, one[2].pk]
    assert plain.pk not in found(viewer, "limit:x")
    reschedule_message(one[1], delay="1h")
    assert found(viewer, f'limit:"{LINE} key a b"') == [one[2].pk]


@pytest.mark.parametrize("search", ["is:overdue", "limit:topic*"])
def test_many_queues_cost_no_statement_each(viewer: Client, search: str) -> None:
    def look(waiting: str) -> None:
        counted = samples.tabs(viewer, q=search, state="scheduled")
        assert (counted["Limited"], counted["Overdue"]) == (
            ("0", waiting) if search == "is:overdue" else (waiting, "0")
        )

    def wait_in(*queues: str) -> None:
        made = schedule_messages(
            [{"topic": topic, "payload": {}, "queue": queue} for queue in queues for topic in (TOPIC, "t.free")]
        )
        late(*made, seconds=3600)

    in_line(1)
    wait_in("a", "b")
    few = count_statements(lambda: look("2"))
    wait_in(*(f"q{number:02}" for number in range(40)))
    assert count_statements(lambda: look("42")) < few + 20


# --- actions ----------------------------------------------------------------------------------------------------------


def test_a_bulk_action_takes_the_limited_messages_of_a_search(chief: Client) -> None:
    running, *made = in_line(4, limit_key="a")
    other = in_line(2, limit_key="b")[1]
    asking.started(chief, "cancel", f'limit:"{LINE} key a"')
    asking.worked_off()
    states = [samples.fresh(message).state for message in (running, *made, other)]
    assert states == ["running", *["cancelled"] * 3, "scheduled"]


# --- queues, dashboard, limits ----------------------------------------------------------------------------------------


def test_queues_and_dashboard_count_limited_messages_and_do_not_call_them_overdue(viewer: Client) -> None:
    late(*in_line(3)[1:], seconds=1800)
    without_a_worker = rows(dashboard(viewer))[0].text
    assert without_a_worker.startswith("No worker is alive, so no message will be delivered: 2")
    worker(topics=[TOPIC])
    page = dashboard(viewer)
    queues = viewer.get(reverse("admin:delayq_queue_changelist")).context["queues"]
    (row,) = [row for row in queues if row.name == "default"]
    assert [str(each) for each in (row.counts.limited, row.counts.overdue, row.counts.scheduled)] == ["2", "0", "2"]
    assert not row.unserved
    assert len(viewer.get(row.limited_url).context["cl"].result_list) == 2
    (shown,) = [row for row in page.context["queues"] if row.name == "default"]
    assert (str(shown.limited), str(shown.overdue)) == ("2", "0")
    assert [(limit.name, limit.use, limit.waiting) for limit in page.context["limits"]] == [(LINE, "1 of 1 run", "2")]
    assert rows(page) == []


def test_a_row_names_a_line_that_is_old_behind_longer_ones(viewer: Client) -> None:
    worker(topics=[TOPIC])
    for number in range(10):
        in_line(4, limit_key=f"longer {number}")
    late(*in_line(3)[1:], seconds=7200)
    (row,) = rows(dashboard(viewer))
    assert row.text == f"2 wait for {LINE} (1 of 1 run), the oldest for 2 h"
    assert row.note == "raise the limit, make its handlers faster, or schedule less"
    assert row.url == samples.admin_url("limits_changelist")


def test_the_lines_of_the_keys_of_a_limit_are_told_together(viewer: Client) -> None:
    worker(topics=[TOPIC])
    for number in range(3):
        late(*in_line(3, limit_key=f"c {number}")[1:], seconds=7200)
    late(*in_line(3)[1:], seconds=7000)
    (row,) = rows(dashboard(viewer))
    assert re.fullmatch(
        rf"6 wait for {LINE} \(3 keys\), the oldest for 2 h, 2 wait for {LINE} \(1 of 1 run\), the oldest for 1 h 56 m",
        row.text,
    )


def test_the_limits_page_lists_what_runs_and_what_waits_the_longest_lines_first(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"mail": {"rate": "60/m", "burst": 5}}}
    in_line(3, limit_key="k")
    in_line(1, limit_key="runs")
    in_line(4, limit_key="longer")
    answer = viewer.get(samples.admin_url("limits_changelist"))
    topic, *others = answer.context["limits"]
    shown = [(limit.name, limit.use, limit.running, limit.waiting) for limit in (topic, *others)]
    assert shown[0] == (LINE, "3 keys, 3 full; each 1 at once", "3", "5")
    assert [(key.key, key.use, key.waiting) for key in topic.keys] == [
        ("longer", "1 of 1 run", "3"),
        ("k", "1 of 1 run", "2"),
        ("runs", "1 of 1 run", "0"),
    ]
    assert ("queue mail", "60 a minute, burst 5", "0", "0") in shown
    assert re.search(r"Messages wait for 2 limits\. 5 waiting, the oldest for [\d.]+ m?s ", text(answer))


def test_the_keys_of_a_topic_are_one_row_whose_numbers_lead_to_as_many(viewer: Client) -> None:
    for number in range(12):
        in_line(1 + number % 3, limit_key=f"c {number}")
    (topic,) = viewer.get(samples.admin_url("limits_changelist")).context["limits"]
    assert (topic.running, topic.waiting) == ("12", "12")
    assert (len(topic.keys), topic.more, topic.keys[0].waiting) == (10, 2, "2")
    for url in (topic.running_url, topic.waiting_url):
        assert len(viewer.get(url).context["cl"].result_list) == 12
    # The page of the topic shows the same.
    (shown,) = viewer.get(topic.url).context["limits"]
    assert shown.use == topic.use


def test_an_overridden_key_stands_among_those_of_its_topic_with_its_reason(limiter: Client) -> None:
    for number in range(12):
        in_line(3, limit_key=f"c {number}")
    override_limit(topic=samples.TOPIC, limit_key="idle", limit=0, reason="bank down")
    page = text(limiter.get(samples.admin_url("limits_changelist")))
    assert "bank down" in page
    # Beside the heading of nothing else.
    assert page.count("Resume") == 1


def test_the_numbers_of_the_limits_page_lead_to_as_many(viewer: Client, declare: Declare, settings: Any) -> None:
    """Those that wait for the limit of their topic stand under the one of their queue, too."""
    declare("other")
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"default": {"limit": 3}}}
    in_line(3, limit_key="a")
    in_line(1)
    others = schedule_messages([{"topic": "other", "delay": 0}] * 2)
    claim_limited(DB, [Ticket(message.pk) for message in others], {"other": 60.0}, samples.WORKER)
    limits = viewer.get(samples.admin_url("limits_changelist")).context["limits"]
    numbers = {limit.name: (limit.running, limit.waiting) for limit in limits}
    assert numbers == {f"{LINE} key a": ("1", "2"), LINE: ("1", "0"), "queue default": ("3", "1")}
    for limit in limits:
        for url, number in ((limit.running_url, limit.running), (limit.waiting_url, limit.waiting)):
            assert not url or len(viewer.get(url).context["cl"].result_list) == int(number)


def test_the_page_without_limits_says_how_to_declare_one(viewer: Client) -> None:
    forget_handlers()
    assert "There are no limits." in text(viewer.get(samples.admin_url("limits_changelist")))


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.fixture
def limiter(db: None) -> Client:
    return logged_in(person("lena", "view_message", "override_limit"))


def override_url(**query: str) -> str:
    return samples.admin_url("limits_override") + (f"?{urlencode(query)}" if query else "")


def test_a_limit_is_overridden_and_reset_with_one_click(limiter: Client) -> None:
    page = limiter.get(override_url(name=f"{LINE} key a"))
    assert (page.context["form"].initial["topic"], page.context["form"].initial["limit_key"]) == (TOPIC, "a")
    given = {"topic": TOPIC, "limit": "0", "duration": "1h", "reason": "the provider is down"}
    answer = limiter.post(override_url(), given, follow=True)
    assert f"The limit {LINE} holds in all workers." in text(answer)
    row = LimitOverride.objects.get()
    assert (row.name, row.limit, row.set_by, row.reason) == (LINE, 0, "user:lena", "the provider is down")
    shown = text(answer)
    assert "paused" in shown
    assert "by lena · " in shown
    assert "“the provider is down”" in shown
    answer = limiter.post(samples.admin_url("limits_reset"), {"name": LINE}, follow=True)
    assert f"The limit {LINE} is as the code declares it." in text(answer)
    answer = limiter.post(samples.admin_url("limits_reset"), {"name": LINE}, follow=True)
    assert f"The limit {LINE} was not overridden." in text(answer)
    events = AuditEvent.objects.order_by("pk").values_list("action", "target", "reason", "actor")
    assert list(events) == [
        ("override", LINE, "the provider is down", "user:lena"),
        ("reset", LINE, "", "user:lena"),
    ]


def test_the_list_of_topics_tells_of_an_override_and_leads_to_it(limiter: Client) -> None:
    at = reads.now(DB).replace(second=0, microsecond=0)
    Rollup.objects.create(at=at, seconds=60, queue="default", topic=TOPIC, consumed=5, dead=1)
    topics = samples.admin_url("topics_changelist")
    assert override_url(name=LINE) in limiter.get(topics).content.decode()
    assert ">Reset<" not in limiter.get(topics).content.decode()
    limiter.post(override_url(), {"topic": TOPIC, "rate": "5/m", "reason": "so"})
    assert "limit overridden" in text(limiter.get(topics))
    assert ">Reset<" in limiter.get(topics).content.decode()
    limiter.post(override_url(), {"topic": TOPIC, "limit": "0", "reason": "so"})
    assert "paused" in text(limiter.get(topics))
    assert ">Resume<" in limiter.get(topics).content.decode()


def test_a_change_of_an_override_begins_with_what_holds(limiter: Client) -> None:
    given = {"topic": TOPIC, "limit": "3", "rate": "5/m", "duration": "1h", "reason": "so"}
    limiter.post(override_url(), given)
    shown = limiter.get(override_url(name=LINE)).context["form"]
    assert [shown[name].value() for name in ("limit", "rate", "burst")] == [3, "5/m", None]
    until = LimitOverride.objects.get().until
    assert until is not None
    assert timezone.make_aware(shown["until"].value()) == until.replace(microsecond=0)


def clicked(client: Client, name: str, label: str) -> LimitOverride:
    """Click a button of a limit in the list, as a browser does; return the override that it made."""
    (limit,) = [
        each for each in client.get(samples.admin_url("limits_changelist")).context["limits"] if each.name == name
    ]
    ((field, value),) = [(field, value) for field, value, shown, _title in limit.steps if shown == label]
    answer = client.post(limit.override_url, {**dict(limit.kept), field: value}, follow=True)
    assert f"The limit {name} holds in all workers." in text(answer)
    return LimitOverride.objects.get(name=name)


def test_a_limit_is_raised_lowered_and_paused_with_one_click(limiter: Client, declare: Declare) -> None:
    declare(TOPIC, limit=4)
    assert clicked(limiter, LINE, "×2").limit == 8
    assert clicked(limiter, LINE, "½").limit == 4
    given = {"topic": TOPIC, "limit": "5", "rate": "6/m", "duration": "1h", "reason": "the provider is slow"}
    limiter.post(override_url(), given)
    until = LimitOverride.objects.get().until
    assert until is not None
    row = clicked(limiter, LINE, "Pause")
    # What else the override says stays.
    assert (row.limit, row.rate, row.reason) == (0, "6/m", "the provider is slow")
    assert row.until == until.replace(microsecond=0)


def test_a_rate_is_raised_and_lowered_with_one_click_and_keeps_its_burst(limiter: Client, queue_limits: Any) -> None:
    queue_limits(mail={"rate": "90/m", "burst": 5})
    row = clicked(limiter, "queue mail", "×2")
    assert (row.limit, row.rate, row.burst) == (None, "3/s", 5)
    row = clicked(limiter, "queue mail", "½")
    assert (row.rate, row.burst) == ("90/m", 5)
    override_limit(queue="mail", burst=1)
    panels.forget()
    row = clicked(limiter, "queue mail", "×2")
    assert (row.rate, row.burst) == ("3/s", 1)


def test_the_form_of_one_limit_asks_for_what_it_becomes_only(limiter: Client, declare: Declare) -> None:
    declare(TOPIC, limit=3)
    page = limiter.get(override_url(name=f"{LINE} key a"))
    assert "topic" not in page.context["form"].fields
    assert f"Override the limit of topic {TOPIC}, key a" in text(page)
    assert "Now: 0 of 3 run" in text(page)
    answer = limiter.post(override_url(name=f"{LINE} key a"), {"limit": "1", "topic": "another"}, follow=True)
    assert f"The limit {LINE} key a holds in all workers." in text(answer)
    page = limiter.get(override_url(name=LINE, limit="0"))
    assert f"Pause topic {TOPIC}" in text(page)
    form = page.context["form"]
    assert [field.name for field in form.visible_fields()] == ["duration", "until", "reason"]
    answer = limiter.post(
        override_url(name=LINE, limit="0"), {each.name: each.value() or "" for each in form} | {"limit": "0"}
    )
    assert (answer.status_code, LimitOverride.objects.get(name=LINE).limit) == (302, 0)


@pytest.mark.parametrize("name", ["x", "handler x", "topic ", "queue a/b c"])
def test_the_form_asks_which_limit_is_meant_where_the_address_names_none(limiter: Client, name: str) -> None:
    page = limiter.get(override_url(name=name))
    assert page.status_code == 200
    assert "topic" in page.context["form"].fields


def test_an_override_stands_beside_what_the_code_declares(limiter: Client, queue_limits: Any) -> None:
    queue_limits(mail={"limit": 7, "rate": "20/s", "burst": 5})
    limits = samples.admin_url("limits_changelist")
    override_limit(queue="mail", rate="5/s", duration="1h")
    assert re.search(
        r" declared 7 at once; 20 a second, burst 5 · .* until \d\d:\d\d:\d\d, in ", text(limiter.get(limits))
    )
    assert "declared 7 at once" in text(limiter.get(override_url(name="queue mail")))
    override_limit(topic=TOPIC, limit=0)
    panels.forget()
    rows = {row.name: row for row in limiter.get(limits).context["limits"]}
    assert rows[LINE].overridden.startswith("declared 1 at once · ")
    # A pause has a word and no bar.
    assert (rows[LINE].gauge, rows[LINE].use) == ("", "paused")
    assert "<svg" in rows["queue mail"].gauge


def test_the_form_suggests_what_is_known_and_asks_about_what_is_not(limiter: Client) -> None:
    page = limiter.get(override_url()).content.decode()
    assert f'<option value="{TOPIC}">' in page
    assert 'list="dq-topic"' in page
    answer = limiter.post(override_url(), {"topic": "t.amdin", "limit": "3"}, follow=True)
    assert f"No handler and no live worker is known for topic t.amdin. Did you mean {TOPIC}?" in text(answer)
    assert "Did you mean" not in text(limiter.post(override_url(), {"topic": TOPIC, "limit": "3"}, follow=True))


def test_an_overridden_limit_stands_before_those_that_nobody_waits_for(limiter: Client) -> None:
    others = [row.name for row in limiter.get(samples.admin_url("limits_changelist")).context["limits"]]
    last = {"topic": "t.zzz", "limit": "0", "reason": "so"}
    limiter.post(override_url(), last)
    rows = limiter.get(samples.admin_url("limits_changelist")).context["limits"]
    assert [row.name for row in rows] == ["topic t.zzz", *others]
    assert rows[0].use == "paused"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"topic": TOPIC},
        {"topic": "no topic", "limit": "1"},
        {"topic": TOPIC, "queue": "q", "limit": "1"},
        {"topic": TOPIC, "limit": "-1"},
        {"topic": TOPIC, "rate": "often"},
        {"topic": TOPIC, "limit": "1", "duration": "0"},
    ],
)
def test_an_impossible_override_is_asked_for_again(limiter: Client, given: dict[str, str]) -> None:
    answer = limiter.post(override_url(), given)
    assert answer.context["form"].errors
    assert not LimitOverride.objects.exists()


def test_nobody_overrides_a_limit_without_the_permission(viewer: Client, limiter: Client) -> None:
    limiter.post(override_url(), {"topic": TOPIC, "limit": "3"})
    assert "Override" not in text(viewer.get(samples.admin_url("limits_changelist")))
    assert viewer.get(override_url()).status_code == 403
    assert viewer.post(override_url(), {"topic": TOPIC, "limit": "0"}).status_code == 403
    assert viewer.post(samples.admin_url("limits_reset"), {"name": LINE}).status_code == 403
    assert limiter.get(samples.admin_url("limits_reset")).status_code == 302
    assert LimitOverride.objects.get().limit == 3
