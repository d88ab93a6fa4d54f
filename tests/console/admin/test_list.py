"""The list of messages: its searches, its order, and the queries that it never runs on a large table."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import BooleanField, Q
from django.db.models.expressions import RawSQL
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_delayq import pause_queue, resume_queue, schedule_message
from django_delayq.console.admin import MessageAdmin, panels, readonly
from django_delayq.console.models import AuditEvent
from django_delayq.console.search import language
from django_delayq.core import bounds
from django_delayq.models import Message
from django_delayq.record.reads import now
from tests.support.rows import unguarded
from tests.support.statements import asked

from . import samples
from .asking import ask_for_search
from .conftest import logged_in, person
from .samples import listed, tabs

pytestmark = pytest.mark.django_db


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageAdmin, "list_per_page", 5)


def test_each_state_can_be_listed_alone_and_all_are_listed_newest_first(viewer: Client) -> None:
    made = samples.one_of_each()
    for state, message in made.items():
        assert listed(viewer, state=state) == [message.pk]
    assert listed(viewer, state="all") == [message.pk for message in made.values()][::-1]


def test_overdue_is_what_has_waited_longer_than_a_few_seconds(viewer: Client) -> None:
    samples.scheduled(delay=0)
    (overdue,) = samples.late(samples.scheduled())
    assert listed(viewer, state="overdue") == [overdue.pk]


@pytest.mark.usefixtures("small_pages")
def test_the_list_shows_what_is_live_in_all_queues_soonest_first_and_loses_none_between_pages(viewer: Client) -> None:
    """Some are due at the same moment: of these the older ones come first."""
    due = now(samples.DB) + timedelta(hours=1)
    made = []
    for number in range(12):
        queue = ("a", "b", "default")[number % 3]
        made.append(samples.scheduled(delay=None, due_at=due + timedelta(seconds=number // 7), queue=queue).pk)
    running = samples.running(queue="b")
    samples.consumed(queue="b")
    assert [pk for page in (1, 2, 3) for pk in listed(viewer, p=page)] == [running.pk, *made]
    assert listed(viewer, state="scheduled", p=2) == made[5:10]
    assert listed(viewer, q="queue:b") == [running.pk, *made[1::3]]
    assert listed(viewer, q="queue:b", state="scheduled") == made[1::3]


@pytest.mark.usefixtures("small_pages")
def test_finished_messages_are_listed_last_finished_first_and_none_is_lost_between_pages(viewer: Client) -> None:
    last, *made = [samples.dead().pk for _number in range(8)]
    at = now(samples.DB)
    unguarded(Message).update(finished_at=at)
    unguarded(Message).filter(pk=last).update(finished_at=at + timedelta(seconds=1))
    for query in ({"state": "dead"}, {"q": "is:finished"}, {"q": "error:valueerror", "state": "dead"}):
        assert listed(viewer, **query) + listed(viewer, **query, p=2) == [last, *made[::-1]]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("page", ["0", "-1", "3", "9999", "99999999999", "x"])
def test_a_page_that_does_not_exist_leads_back_to_the_list(viewer: Client, page: str) -> None:
    samples.many(7)
    response = viewer.get(reverse(samples.LIST), {"p": page}, follow=True)
    assert response.status_code == 200
    assert len(response.context["cl"].result_list) == 5


@pytest.mark.usefixtures("small_pages")
def test_a_page_that_is_gone_leads_to_the_first_one_of_its_search(viewer: Client) -> None:
    wanted = [message.pk for message in samples.many(5, queue="mails")]
    samples.many(7)
    assert listed(viewer, q="queue:mails", p=2) == wanted
    assert listed(viewer, q="queue:none", p=2) == []


def test_a_message_is_found_by_its_id_or_the_text_that_pages_show_in_any_state(viewer: Client) -> None:
    message = samples.consumed()
    named = samples.scheduled(key=str(message.pk))
    for text in (f" id:{message.pk} ", f"#{message.pk}", str(message)):
        assert listed(viewer, q=text) == [message.pk]
    # A number alone may be a key, too.
    assert listed(viewer, q=message.pk) == [named.pk, message.pk]
    assert listed(viewer, q=message.pk, state="dead") == []


def test_a_key_is_found_in_any_state_and_only_as_a_whole(viewer: Client) -> None:
    finished = samples.consumed(key="order-1")
    live = samples.scheduled(key="order-1")
    samples.scheduled(key="order-10")
    assert listed(viewer, q="key:order-1") == [live.pk, finished.pk]


def test_any_other_text_is_a_key_in_every_state_or_else_a_topic(viewer: Client) -> None:
    by_topic = schedule_message("mail.send", delay=60)
    assert listed(viewer, q="mail.send") == [by_topic.pk]
    by_key = samples.consumed(key="mail.send")
    assert listed(viewer, q="mail.send") == [by_key.pk]
    assert listed(viewer, q="topic:mail.send") == [by_topic.pk]
    assert listed(viewer, q="mail") == []


def test_a_search_is_repeated_in_words_or_explained_under_the_box(viewer: Client) -> None:
    samples.scheduled()
    page = samples.text(viewer.get(reverse(samples.LIST), {"q": "topic:mail.* attempts:>3"}))
    assert "Live: topic begins with “mail.”, failed attempts &gt; 3" in page
    assert "No messages match." in page
    page = samples.text(viewer.get(reverse(samples.LIST), {"q": "due:tomorow <script>"}))
    assert "due:tomorow: not a time. Write due:&lt;1h, due:today or due:2026-01-02..2026-01-03." in page
    assert "the search was not understood" in page


def test_a_search_that_names_states_is_not_narrowed_to_what_is_live(viewer: Client) -> None:
    message = samples.dead()
    running = samples.claimed(schedule_message("other", delay=0))
    for query in ({"q": "state:dead"}, {"q": "finished:<1h"}, {"q": "topic:t.admin", "state": "dead"}):
        assert listed(viewer, **query) == [message.pk]
    for query in ({"q": "topic:t.admin"}, {"q": "topic:t.admin", "state": "running"}, {"q": "is:live is:finished"}):
        assert listed(viewer, **query) == []
    assert listed(viewer, q="topic:t.admin", state="nonsense") == []
    assert listed(viewer, q="state:dead,running") == [running.pk, message.pk]


def test_errors_are_searched_in_every_state_newest_first(viewer: Client) -> None:
    first, second = samples.dead(), samples.dead()
    retrying = samples.failed(samples.running(), reason="retry", delay=timedelta(hours=1), error="ValueError: x")
    samples.failed(samples.running(), dead=True, error="OSError: x")
    assert listed(viewer, q="error:valueerror") == [retrying.pk, second.pk, first.pk]
    assert listed(viewer, q="error:valueerror", state="dead") == [second.pk, first.pk]
    assert listed(viewer, q="error:valueerror", state="live") == [retrying.pk]
    assert tabs(viewer, q="error:valueerror")["Dead"] == "2"
    for wildcard in ("value_error", "%"):
        assert listed(viewer, q=f"error:{wildcard}") == []


def test_masked_names_may_be_searched_only_with_the_permission_to_reveal_which_is_audited(viewer: Client) -> None:
    message = samples.scheduled({"user": {"api_token": "abc"}})
    query = {"q": "payload.user.api_token:abc"}
    assert listed(viewer, **query) == []
    page = samples.text(viewer.get(reverse(samples.LIST), query))
    assert "The values of api_token are masked, so you may not search for them." in page
    trusted = logged_in(person("rita", "view_message", "reveal_message", "cancel_message", "bulk_message"))
    plain = trusted.get(reverse(samples.LIST), {"q": "payload.user:abc"}).content.decode()
    assert not AuditEvent.objects.exists()
    masked = trusted.get(reverse(samples.LIST), query)
    assert [row.pk for row in masked.context["cl"].result_list] == [message.pk]
    ask_for_search(trusted, "cancel", query["q"])
    events = AuditEvent.objects.values_list("actor", "action", "target")
    assert list(events) == [("user:rita", "reveal", "payload user.api_token is a given value")] * 2
    # A page that is left open is no use of the permission again and again.
    assert ("data-dq-slow" in plain, "data-dq-slow" in masked.content.decode()) == (False, True)


def test_each_tab_says_how_many_of_the_search_are_in_it(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=0))
    samples.one_of_each()
    samples.scheduled(delay=0, queue="mails")
    expected = {"Live": "3", "All": "7", "Scheduled": "2", "Overdue": "1", "Running": "1", "Limited": "0"}
    expected |= {"Paused": "0", "Retrying": "0"}
    expected |= dict.fromkeys(["Consumed", "Dead", "Cancelled", "Expired"], "1")
    assert tabs(viewer) == expected
    assert tabs(viewer, state="dead") == expected
    expected = {**dict.fromkeys(expected, "0"), "Live": "1", "All": "1", "Scheduled": "1", "Overdue": "1"}
    assert tabs(viewer, q="queue:mails") == expected
    assert tabs(viewer, q="queue:mails state:scheduled") == expected
    assert set(tabs(viewer, q="queue:mails state:dead").values()) == {"0"}
    # A search that is not understood counts nothing.
    assert set(tabs(viewer, q="due:x").values()) == {""}


def test_paused_and_retrying_messages_have_tabs_of_their_own(viewer: Client, tuned: Callable[..., None]) -> None:
    held, late = (samples.late(samples.scheduled(queue=queue), seconds=90)[0] for queue in ("mails", "letters"))
    retrying = samples.failed(samples.running(), error="OSError", reason="retry", delay=timedelta(hours=1))
    pause_queue("mails")
    counted = tabs(viewer)
    assert [counted[name] for name in ("Scheduled", "Overdue", "Paused", "Retrying")] == ["3", "1", "1", "1"]
    # Few queues and many are read in two ways.
    for merged in (50, 0):
        tuned(merged_queues=merged)
        for tab, message in {"overdue": late, "paused": held, "retrying": retrying}.items():
            assert listed(viewer, state=tab) == [message.pk]
    pause_queue("letters")
    pause_queue("default")
    assert listed(viewer, state="overdue") == []
    resume_queue("letters")
    resume_queue("mails")
    assert listed(viewer, state="paused") == []


@pytest.mark.postgresql("SQLite counts all queues at once")
def test_a_long_line_in_a_paused_queue_makes_no_number_of_overdue_messages_uncertain(
    viewer: Client, tuned: Callable[..., None]
) -> None:
    tuned(counted_of_index=3)
    for queue in ["mails"] * 5 + ["letters"] * 2:
        samples.late(samples.scheduled(queue=queue), seconds=90)
    pause_queue("mails")
    counted = tabs(viewer)
    assert (counted["Overdue"], counted["Paused"]) == ("2", "4+")


@pytest.mark.usefixtures("small_pages")
def test_a_tab_keeps_the_search_and_forgets_the_page(viewer: Client) -> None:
    samples.many(7)
    page = viewer.get(reverse(samples.LIST), {"q": "topic:t.admin", "p": "2"}).content.decode()
    assert 'href="?q=topic%3At.admin&amp;state=dead"' in page


@pytest.mark.parametrize(
    ("state", "sentence"),
    [("overdue", "Nothing is overdue."), ("dead", "Nothing is dead."), ("all", "no messages yet")],
)
def test_an_empty_tab_says_so(viewer: Client, state: str, sentence: str) -> None:
    assert sentence in samples.text(viewer.get(reverse(samples.LIST), {"state": state}))


def slow_topics(patch: pytest.MonkeyPatch, seconds: float, timed: Callable[..., None]) -> None:
    """Have a search for a topic take so long, and each page give up after 30 ms."""
    slow = Q(RawSQL(f"pg_sleep({seconds}) IS NOT NULL", (), output_field=BooleanField()))
    patch.setitem(language._QUALIFIERS, "topic", lambda name, value, at: language.Term(slow, "slow", "topic:a"))
    timed(30, "rows", "beside")


@pytest.mark.postgresql("ends a statement by itself")
def test_a_search_without_an_index_is_ended_and_told(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    samples.scheduled()
    slow_topics(monkeypatch, 10, timed)
    response = viewer.get(reverse(samples.LIST), {"q": "topic:a"})
    assert "The search was not finished: it was ended after 0.03 s" in samples.text(response)
    assert "No messages match" not in samples.text(response)
    assert [tab.count for tab in response.context["cl"].tabs() if not tab.here] == [""] * 11
    # Later statements of the same transaction have no time limit.
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone()[0] == "0"


@pytest.mark.postgresql("ends a statement by itself")
@pytest.mark.usefixtures("slow_searches")
def test_a_search_without_an_index_shows_the_nearest_messages(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(nearest_rows=2)
    first, second, third = (samples.scheduled(delay=f"{hours}h") for hours in (1, 2, 3))
    other = samples.scheduled(queue="mails", delay="4h")
    running = samples.running()
    dead = [samples.dead() for _number in range(3)]
    response = viewer.get(reverse(samples.LIST), {"q": "topic:t.*"})
    assert "The search was not finished" in samples.text(response)
    assert "These are matches among the nearest messages only" in samples.text(response)
    assert [row.pk for row in response.context["cl"].result_list] == [running.pk, first.pk, second.pk]
    assert "3+ messages" in samples.text(response)
    assert listed(viewer, q="topic:t.*", state="dead") == [dead[2].pk, dead[1].pk]
    assert listed(viewer, q="topic:t.*", state="expired") == []
    expired = viewer.get(reverse(samples.LIST), {"q": "topic:t.*", "state": "expired"})
    assert "Among the nearest messages" in samples.text(expired)
    assert listed(viewer, q="topic:t.*", state="all") == [dead[2].pk, dead[1].pk]
    assert listed(viewer, q="due:>150m") == [third.pk, other.pk]
    assert listed(viewer, q="queue:mails") == [other.pk]


@pytest.mark.postgresql("ends a statement by itself")
def test_an_unfinished_search_is_tried_for_longer(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    """The first try ends before the server's sleep does, the longer one after it."""
    message = samples.scheduled()
    slow_topics(monkeypatch, 0.2, timed)
    timed(60_000, "beside", "long")
    first = viewer.get(reverse(samples.LIST), {"q": "topic:a"})
    html = first.content.decode()
    assert "was not finished" in samples.text(first)
    # These took too long, too.
    assert "Among the nearest messages" not in samples.text(first)
    assert "data-dq-slow" in html
    assert first.context["cl"].longer_query == "?longer=1&q=topic%3Aa"
    assert "Try for up to 60 s" in html
    second = viewer.get(reverse(samples.LIST) + first.context["cl"].longer_query)
    assert [row.pk for row in second.context["cl"].result_list] == [message.pk]
    assert "was not finished" not in samples.text(second)
    # It is not repeated by the script of the page, and the tabs lead to the quick search.
    assert "data-dq-slow" in second.content.decode()
    assert all("longer" not in tab.query for tab in second.context["cl"].tabs())


@pytest.mark.postgresql("ends a statement by itself")
def test_a_slow_search_and_what_stands_beside_it_have_one_time_limit(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    samples.scheduled()
    slow_topics(monkeypatch, 30, timed)
    timed(300, "rows")
    timed(600, "beside")
    with CaptureQueriesContext(connection) as captured:
        viewer.get(reverse(samples.LIST), {"q": "topic:a"})
    given = [int(found[1]) for sql in captured if (found := re.search(r"'statement_timeout', '(\d+)'", sql["sql"]))]
    search, *others = [milliseconds for milliseconds in given if 0 < milliseconds <= 600]
    # The nearest rows take what it left, and nothing is counted.
    assert search == 300
    assert sum(others) <= 300


def test_the_list_is_sorted_by_a_column_and_says_where_only_in_part(viewer: Client, tuned: Callable[..., None]) -> None:
    live = [samples.scheduled(delay=f"{hours}h", queue=f"q{hours % 2}") for hours in (1, 2, 3, 4)]
    retried = samples.failed(samples.running(queue="q0"), delay=timedelta(hours=5), error="OSError", reason="retry")
    dead = [samples.dead() for _number in range(3)]
    by = {name: place for place, name in enumerate(viewer_columns(viewer))}
    soonest = [message.pk for message in (*live, retried)]
    assert listed(viewer, state="live", o=f"{by['due']}") == soonest
    assert listed(viewer, state="live", o=f"-{by['due']}") == soonest[::-1]
    assert listed(viewer, state="live", o=f"-{by['tries']}.{by['due']}")[0] == retried.pk
    assert listed(viewer, state="dead", o=f"{by['due']}") == [message.pk for message in dead]
    assert listed(viewer, state="all", o=f"{by['ident']}") == soonest + [message.pk for message in dead]
    # Any other text is no column, and a column without an order of its own sorts nothing.
    for nothing in ("x", "99", f"{by['preview']}", "9" * 5000):
        assert listed(viewer, state="live", o=nothing) == soonest
    tuned(nearest_rows=2)
    query = {"state": "live", "o": f"-{by['tries']}"}
    page = viewer.get(reverse(samples.LIST), query)
    assert "Only the first 2 messages of the usual order are sorted" in samples.text(page)
    assert [row.pk for row in page.context["cl"].result_list] == [live[1].pk, live[0].pk]
    # The numbers stay.
    assert tabs(viewer, **query)["Live"] == "5"
    assert "are sorted" not in samples.text(viewer.get(reverse(samples.LIST), {**query, "o": f"-{by['due']}"}))


def viewer_columns(viewer: Client) -> list[str]:
    return list(viewer.get(reverse(samples.LIST)).context["cl"].list_display)


@pytest.mark.parametrize(
    "lookup", ["payload__token__startswith", "topic__contains", "worker", "transitions__actor", "due", "state__in"]
)
def test_no_lookup_but_the_filters_can_be_put_into_the_address(viewer: Client, lookup: str) -> None:
    samples.scheduled({"token": "abc"})
    assert viewer.get(reverse(samples.LIST), {lookup: "a"}).status_code == 400


@pytest.mark.parametrize("query", ["", "?state=all", "?q=topic:t.admin", "?q=due:<2h"])
def test_the_list_reads_the_payloads_of_the_shown_messages_alone(viewer: Client, query: str) -> None:
    samples.many(7)
    with CaptureQueriesContext(connection) as captured:
        assert viewer.get(reverse(samples.LIST) + query).status_code == 200
    about = [entry["sql"] for entry in captured if "delayq_message" in entry["sql"]]
    assert all('"delayq_message"."id" IN (' in sql for sql in about if '"payload"' in sql)
    assert not [sql for sql in about if '"headers"' in sql or '"retry"' in sql]
    assert len(asked(captured)) < 25


def test_many_queues_cost_no_statement_each(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=0))
    for number in range(200):
        samples.scheduled(queue=f"q{number:03}")
    late = samples.scheduled(delay=0, queue="q007")
    with CaptureQueriesContext(connection) as captured:
        assert listed(viewer)[0] == late.pk
    assert len(asked(captured)) <= 25
    counted = tabs(viewer)
    assert [counted[name] for name in ("Live", "Scheduled", "Overdue")] == ["201", "201", "1"]
    counted = tabs(viewer, q="due:<2h created:>today queue:q00*")
    assert [counted[name] for name in ("Scheduled", "Overdue")] == ["0", "0"]
    counted = tabs(viewer, q="due:<2h queue:q00*")
    assert [counted[name] for name in ("Scheduled", "Overdue")] == ["11", "1"]


@pytest.mark.usefixtures("small_pages")
def test_each_of_many_queues_is_counted_up_to_a_cap(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(counted_of_index=3)
    samples.many(3, queue="letters")
    samples.many(3, queue="mails")
    assert tabs(viewer)["Scheduled"] == "6"
    samples.many(1, queue="mails")
    assert tabs(viewer)["Scheduled"] == "7+"
    assert tabs(viewer, q="topic:t.rare")["Scheduled"] == ""


@pytest.mark.usefixtures("small_pages")
def test_the_list_counts_up_to_a_cap(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(counted=7)
    samples.many(8)
    page = samples.text(viewer.get(reverse(samples.LIST)))
    assert "7+ messages" in page
    assert tabs(viewer)["All"] == "7+"
    unguarded(Message).filter(pk=Message.objects.earliest("pk").pk).delete()
    page = samples.text(viewer.get(reverse(samples.LIST)))
    assert "7 messages" in page
    assert tabs(viewer)["All"] == "7"


@pytest.mark.usefixtures("small_pages")
def test_matches_beyond_the_sampled_rows_are_counted_apart(viewer: Client, tuned: Callable[..., None]) -> None:
    tuned(counted_of_index=7)
    samples.many(8, queue="mails")
    rare = [schedule_message("t.rare", delay="2h", queue="mails").pk for _number in range(6)]
    counted = tabs(viewer, q="topic:t.rare")
    assert (counted["Live"], counted["All"]) == ("6", "")
    assert listed(viewer, q="topic:t.rare", p=2) == rare[5:]


@pytest.mark.parametrize(("separators", "shown"), [(False, "10,000+"), (True, "&gt;10,000")])
def test_a_capped_count_reads_well(settings: Any, separators: bool, shown: str) -> None:
    from django.template import Context, Template

    settings.USE_THOUSAND_SEPARATOR = separators
    rendered = Template("{{ count }}").render(Context({"count": readonly.CappedCount(10_000)}))
    assert rendered.replace(">", "&gt;") == shown


def test_the_list_says_when_and_how_late(viewer: Client) -> None:
    message = samples.scheduled(delay="250s")
    samples.scheduled(delay=0)
    response = viewer.get(reverse(samples.LIST))
    assert f'title="{message.due_at:%Y-%m-%d %H:%M}' in response.content.decode()
    page = samples.text(response)
    assert re.search(r"in 4\sm\s\d+\ss", page)
    assert re.search(r"overdue by [\d.]+\sm?s", page)


def test_a_due_message_of_a_paused_queue_says_so_and_why_without_a_statement_more(viewer: Client) -> None:
    held, later, other = (samples.scheduled(queue=queue) for queue in ("mails", "mails", "letters"))
    samples.late(held, other, seconds=90)

    def look() -> tuple[str, int]:
        panels.forget()
        with CaptureQueriesContext(connection) as captured:
            html = viewer.get(reverse(samples.LIST)).content.decode()
        # Overrides of limits are kept for a second, whatever page reads them.
        return html, len([sql for sql in asked(captured) if "limit_override" not in sql])

    html, number = look()
    assert "dq-state-paused" not in html
    pause_queue("mails", reason="relay <moved>")
    html, number_then = look()
    assert number_then == number
    row, row_later, row_other = (_row(html, each.pk) for each in (held, later, other))
    assert '<span class="dq-badge dq-state-paused" title="relay &lt;moved&gt;">paused</span>' in row
    assert "due for 1\N{NO-BREAK SPACE}m" in row
    assert '<span class="dq-badge dq-state-overdue">overdue</span>' in row_other
    assert "overdue by 1\N{NO-BREAK SPACE}m" in row_other
    assert "dq-state-scheduled" in row_later
    # On a phone nothing is under the mouse: the reason stands above the list, too.
    assert f'<a href="{samples.admin_url("queue_detail", "mails")}">Queue mails</a> relay &lt;moved&gt;</span>' in html
    resume_queue("mails")
    assert "dq-state-paused" not in look()[0]


def test_each_column_of_a_mixed_list_says_its_own_time(viewer: Client) -> None:
    live, over = samples.scheduled(delay="250s"), samples.cancelled(delay="2h")
    unguarded(Message).filter(pk=over.pk).update(finished_at=now(samples.DB) - timedelta(minutes=5))
    html = viewer.get(reverse(samples.LIST), {"state": "all"}).content.decode()
    cells = {
        pk: dict(re.findall(r'<td class="field-(\w+)[^"]*">(.*?)</td>', _row(html, pk))) for pk in (live.pk, over.pk)
    }
    words = {pk: [samples.without_tags(cells[pk][name]).strip() for name in ("due", "ended")] for pk in cells}
    assert re.fullmatch(r"[\d: -]+ in 4\sm\s\d+\ss", words[live.pk][0])
    assert words[live.pk][1] == ""
    # A cancelled message is not due in two hours any more.
    assert re.fullmatch(r"[\d: -]+", words[over.pk][0])
    assert re.fullmatch(r"[\d: -]+ 5\sm(\s\d+\ss)? ago", words[over.pk][1])
    columns = {state: viewer.get(reverse(samples.LIST), {"state": state}).context["cl"].list_display for state in TIMES}
    assert {state: [name for name in found if name in ("due", "ended")] for state, found in columns.items()} == TIMES


# The columns of times by tab.
TIMES = {"live": ["due"], "scheduled": ["due"], "dead": ["ended"], "all": ["due", "ended"]}


def _row(html: str, pk: int) -> str:
    found = re.search(f">#{pk}</a>.*?</tr>", html)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"state": "live"}, ["cancel", "reschedule", "run", "move"]),
        ({"state": "running"}, ["cancel"]),
        ({"state": "dead"}, ["requeue", "purge"]),
        ({"state": "consumed"}, ["purge"]),
        ({"q": "state:scheduled,dead"}, ["cancel", "reschedule", "run", "move", "requeue", "purge"]),
    ],
)
def test_a_list_has_a_button_for_each_action_on_its_states(
    chief: Client, query: dict[str, str], expected: list[str]
) -> None:
    samples.one_of_each()
    html = chief.get(reverse(samples.LIST), query).content.decode()
    actions = re.findall(r'name="action" value="(\w+)_selected"', html)
    places = re.findall(r'<button type="submit" name="index" value="(\d+)" class="[^"]*">\s*[A-Z][a-z ]+…', html)
    assert actions == expected
    assert [int(place) for place in places] == [*range(len(expected))]


def test_the_button_that_is_pressed_is_the_action_that_is_asked_about(chief: Client) -> None:
    message = samples.scheduled()
    given = {"action": ["cancel_selected", "reschedule_selected", "run_selected"], "_selected_action": [message.pk]}
    for place, question in enumerate(("Cancel messages", "Reschedule messages", "Run messages now")):
        asked_for = chief.post(reverse(samples.LIST), {**given, "index": str(place)})
        assert str(asked_for.context["title"]) == question
    answered = chief.post(reverse(samples.LIST), {"action": given["action"], "index": "1"}, follow=True)
    assert samples.said(answered)[0].startswith("Items must be selected")


def test_a_user_without_an_action_on_the_states_of_a_list_has_nothing_to_tick(db: None) -> None:
    samples.one_of_each()
    client = logged_in(person("rita", "view_message", "requeue_message"))
    for state, ticked in (("live", False), ("dead", True)):
        html = client.get(reverse(samples.LIST), {"state": state}).content.decode()
        assert ('name="_selected_action"' in html, 'name="action"' in html) == (ticked, ticked)


@pytest.mark.usefixtures("small_pages")
def test_the_pages_of_a_list_are_links_with_gaps(viewer: Client) -> None:
    samples.many(60)
    html = viewer.get(reverse(samples.LIST) + "?state=live&p=6").content.decode()
    (pages,) = re.findall(r'data-dq-region="pages">(.*?)</div>', html, re.DOTALL)
    assert samples.without_tags(pages).split() == ["1", "…", "4", "5", "6", "7", "8", "…", "12", "60", "messages"]
    assert '<a class="dq-chip" href="?p=7&amp;state=live">7</a>' in pages
    assert "aria-current" in re.findall(r"<a [^>]*>6</a>", pages)[0]


def test_a_row_has_a_preview_of_its_payload_redacted_and_never_markup(viewer: Client) -> None:
    samples.scheduled({"order": 4711, "api_key": "leak", "text": "<script>alert(1)</script>"})
    samples.scheduled({"long": "x" * 200})
    samples.scheduled({"huge": "".join(random.Random(1).choices(string.ascii_letters, k=40_000))})
    samples.scheduled(None)
    html = viewer.get(reverse(samples.LIST)).content.decode()
    assert "&quot;order&quot;: 4711" in html
    assert "leak" not in html
    assert "<script>alert" not in html
    assert "x" * 69 + "…" in html
    # The rest is under the mouse.
    assert "x" * 200 in html
    assert "x" * 70 not in re.sub(r' title="[^"]*"', "", html)
    assert '<td class="field-preview">large</td>' in html
    assert html.count("large") == 1


def test_a_row_says_how_often_and_how_a_message_failed(viewer: Client) -> None:
    samples.failed(samples.running(max_attempts=5), reason="retry", delay=timedelta(hours=1), error="OSError: <b> 'x'")
    page = viewer.get(reverse(samples.LIST)).content.decode()
    assert ">1/5<" in page
    assert "OSError: &lt;b&gt; …" in page


def test_a_row_shows_its_state_as_a_word(viewer: Client) -> None:
    for state, message in samples.one_of_each().items():
        html = viewer.get(reverse(samples.LIST), {"q": message.pk}).content.decode()
        assert re.search(rf'<span class="dq-badge dq-state-{state}"( title="[^"]+")?>{state.label}</span>', html)


def test_a_worker_has_a_page_without_a_history(viewer: Client) -> None:
    samples.worker(samples.WORKER)
    assert re.search(r"\d\sm?s ago", samples.text(viewer.get(reverse("admin:delayq_worker_changelist"))))
    name = samples.WORKER.replace("/", "_2F")
    change, history = (reverse(f"admin:delayq_worker_{view}", args=[name]) for view in ("change", "history"))
    detail = viewer.get(change)
    assert samples.WORKER in samples.text(detail)
    assert history not in detail.content.decode()
    assert viewer.get(history).status_code == 404


def test_a_search_without_results_leads_to_the_names_that_are_like_its_own(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"reports": {"limit": 1}}}
    samples.worker(queues=("mails",), topics=["orders.close"])
    for search, near in (
        ("topic:order.close queue:mail", ["topic:orders.close", "queue:mails"]),
        ("order.close", ["topic:orders.close"]),
        ('limit:"queue reprots"', ['limit:"queue reports"']),
        ("orders.close", []),
        ("topic:order.*", []),
        ("zzz", []),
    ):
        response = viewer.get(reverse(samples.LIST), {"q": search})
        assert [text for text, _query in response.context["cl"].near] == near
        assert ("Did you mean" in samples.text(response)) == bool(near)
    wanted = schedule_message("orders.close", queue="mails")
    [(_text, query)] = viewer.get(reverse(samples.LIST), {"q": "order.close"}).context["cl"].near
    followed = viewer.get(reverse(samples.LIST) + query)
    assert [row.pk for row in followed.context["cl"].result_list] == [wanted.pk]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("text", ["", "queue:q*", "attempts:0"])
def test_the_first_of_few_queues_are_those_of_many(viewer: Client, tuned: Callable[..., None], text: str) -> None:
    """They are read in two ways."""
    for number in range(14):
        schedule_message("t.ok", delay=f"{number * 7 % 14 + 1}m", queue=f"q{number % 3}")
    samples.running()
    pages = []
    for merged in (50, 2, 0):
        tuned(merged_queues=merged)
        pages.append([listed(viewer, q=text, p=page) for page in (1, 2)])
    assert pages[0] == pages[1] == pages[2]
    assert pages[0][0]
