"""The list of topics, and the pages of a topic and a queue: what got slower and what fails, beside the time before."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_delayq.console.models import Rollup
from django_delayq.record import reads
from tests.support.statements import asked

from . import samples

pytestmark = pytest.mark.django_db

URL = "/admin/delayq_console/topics/"
HOUR = timedelta(hours=1)


def ago(**span: float) -> datetime:
    return reads.now(samples.DB) - timedelta(**span)


def rolled(at: datetime, topic: str = "t.a", queue: str = "default", **counts: int) -> None:
    """Store a rollup: of an hour where ``at`` is so long ago that those of minutes are gone."""
    seconds = 3600 if reads.now(samples.DB) - at > timedelta(days=2) else 60
    Rollup.objects.create(at=at.replace(second=0, microsecond=0), seconds=seconds, queue=queue, topic=topic, **counts)


def runs(at: datetime, topic: str, number: int, milliseconds: int, **more: Any) -> None:
    """Have handlers of a topic run so often and so long."""
    run: dict[str, Any] = {f"run_{milliseconds}": number, "run_us": number * milliseconds * 1000}
    rolled(at, topic, consumed=number, **run, **more)


def names(page: Any) -> list[str]:
    return [row.name for row in page.context["rows"]]


def measures(page: Any) -> dict[str, tuple[str, str]]:
    """Return the values of each measure: in the window, and before it."""
    return {label: (now, before) for label, now, before, _listed in page.context["measures"]}


def test_what_got_slower_names_the_topics_whose_runs_take_longer_than_before(viewer: Client) -> None:
    for topic, before, now in (("t.slow", 100, 500), ("t.slower", 10, 200), ("t.same", 50, 50), ("t.quick", 50, 5)):
        runs(ago(minutes=90), topic, 40, before)
        runs(ago(minutes=20), topic, 60, now)
    page = viewer.get(URL, {"order": "slower", "window": "hour"})
    assert names(page) == ["t.slower", "t.slow"]
    html = page.content.decode()
    assert "20.0 × as long" in html
    assert "≤ 200 ms" in html
    assert f"{URL}t.slower/detail/?window=hour" in html


def test_nothing_got_slower_by_a_few_runs_or_beside_a_time_that_nobody_counted(viewer: Client) -> None:
    runs(ago(minutes=90), "t.few", 3, 10)
    runs(ago(minutes=20), "t.few", 60, 500)
    rolled(ago(minutes=90), "t.unknown", consumed=100)
    runs(ago(minutes=20), "t.unknown", 60, 500)
    page = viewer.get(URL, {"order": "slower"})
    assert names(page) == []
    assert "Nothing got slower" in page.content.decode()


def test_what_fails_most_is_the_topic_with_the_most_failed_runs(viewer: Client) -> None:
    rolled(ago(minutes=5), "t.a", consumed=900, dead=30)
    rolled(ago(minutes=5), "t.b", consumed=50, dead=20, retried=30)
    rolled(ago(minutes=5), "t.c", consumed=900)
    page = viewer.get(URL, {"order": "failing"})
    assert names(page) == ["t.b", "t.a"]
    assert "50 (50.0%)" in page.content.decode()


def test_a_topic_has_a_button_for_what_it_needs(boss: Client, viewer: Client) -> None:
    rolled(ago(minutes=5), "t.fine", consumed=9)
    rolled(ago(minutes=5), "t.failing", consumed=9, dead=3)
    page = boss.get(URL)
    acts = {row: re.findall(r">([^<>]+…)<", html) for row, html in table(page.content.decode()).items()}
    assert acts == {"t.fine": ["Limit…", "Pause…"], "t.failing": ["Limit…", "Pause…", "Requeue…"]}
    assert re.search(r'class="dq-button dq-ghost">Requeue…', page.content.decode())
    assert 'name="search" value="state:dead topic:t.failing"' in page.content.decode()
    seen = viewer.get(URL).content.decode()
    assert "…</" not in "".join(table(seen).values())
    assert "/admin/delayq_console/deadletters/?topic=t.failing" in table(seen)["t.failing"]


def table(html: str) -> dict[str, str]:
    """Return the rows of the table by their names."""
    rows = re.findall(r"<tr[^>]*>\s*(<th scope=\"row\">.*?)</tr>", html, re.DOTALL)
    return {re.findall(r">([^<]+)</a>", row)[0]: row for row in rows}


def test_the_page_of_a_topic_leads_to_what_can_be_done(boss: Client, viewer: Client) -> None:
    rolled(ago(minutes=5), "t.a", consumed=9, dead=3)
    html = boss.get(f"{URL}t.a/detail/").content.decode()
    assert "/admin/delayq_console/limits/override/?name=topic+t.a" in html
    assert 'name="search" value="state:dead topic:t.a"' in html
    assert "/admin/delayq_console/deadletters/?topic=t.a" in html
    seen = viewer.get(f"{URL}t.a/detail/").content.decode()
    assert "/override/" not in seen
    assert 'name="search"' not in seen


def test_the_list_is_searched_by_a_part_of_the_name(viewer: Client) -> None:
    for topic in ("mail.send", "mail.bounce", "sms.mail", "order.close"):
        rolled(ago(minutes=5), topic, consumed=9)
    assert names(viewer.get(URL, {"q": "mail"})) == ["mail.bounce", "mail.send", "sms.mail"]
    assert names(viewer.get(URL, {"q": " MAIL.* "})) == ["mail.bounce", "mail.send"]
    assert "No topic matches." in viewer.get(URL, {"q": "nothing"}).content.decode()
    misspelt = viewer.get(URL, {"q": "mail.bonuce"}).content.decode()
    (link,) = re.findall(r'<a href="([^"]*)">Did you mean mail.bounce[?]</a>', misspelt)
    assert names(viewer.get(URL + unescape(link))) == ["mail.bounce"]


def test_a_long_list_has_pages(viewer: Client) -> None:
    for number in range(103):
        rolled(ago(minutes=5), f"t.{number:03}", consumed=1)
    page = viewer.get(URL)
    assert [link.label for link in page.context["pages"]] == ["1", "2", "3"]
    assert names(viewer.get(URL + page.context["pages"][2].url)) == ["t.100", "t.101", "t.102"]
    assert names(viewer.get(URL, {"page": "none"})) == names(page)
    # Another order begins with its first page.
    assert "page=" not in "".join(each.url for each in viewer.get(URL, {"page": "3"}).context["columns"])
    assert viewer.get(URL, {"q": "t.00"}).context["pages"] == []


@pytest.mark.parametrize(
    ("order", "first"), [("name", "t.a"), ("consumed", "t.c"), ("failed", "t.b"), ("mean", "t.a"), ("late95", "t.b")]
)
def test_the_columns_sort(viewer: Client, order: str, first: str) -> None:
    runs(ago(minutes=5), "t.a", 20, 500)
    runs(ago(minutes=5), "t.b", 30, 5, dead=9, late_1000=30)
    runs(ago(minutes=5), "t.c", 40, 5)
    page = viewer.get(URL, {"order": order})
    found = names(page)
    assert (found[0], sorted(found)) == (first, ["t.a", "t.b", "t.c"])
    assert len(re.findall(r'aria-sort="(?:ascending|descending)"', page.content.decode())) == 1


def test_the_busiest_topics_come_first_and_a_strange_choice_is_the_first_one(viewer: Client) -> None:
    rolled(ago(minutes=5), "t.a", consumed=9)
    rolled(ago(minutes=5), "t.b", consumed=90)
    assert names(viewer.get(URL, {"order": "<b>", "window": "century"})) == ["t.b", "t.a"]
    assert "No handler failed in this time." in viewer.get(URL, {"order": "failing"}).content.decode()


@pytest.mark.parametrize(
    ("window", "inside", "before"),
    [
        ("hour", {"minutes": 30}, {"minutes": 90}),
        ("day", {"hours": 20}, {"hours": 40}),
        ("week", {"days": 6}, {"days": 12}),
        ("month", {"days": 25}, {"days": 50}),
    ],
)
def test_a_topic_has_a_page_with_each_window_beside_the_one_before(
    viewer: Client, window: str, inside: dict[str, float], before: dict[str, float]
) -> None:
    runs(ago(**inside), "t/a:b", 40, 20, late_5=30, retried=10)
    runs(ago(**before), "t/a:b", 80, 10, late_1=30)
    runs(ago(**inside), "t.other", 999, 500)
    page = viewer.get(f"{URL}t/a:b/detail/", {"window": window})
    found = measures(page)
    assert found["Consumed"] == ("40", "80")
    assert found["Failed"] == ("10 (20.0%)", "–")
    assert found["Run time p95"] == ("≤ 20 ms", "≤ 10 ms")
    assert found["Mean run time"] == ("20 ms", "10 ms")
    assert found["Lateness p95"] == ("≤ 5 ms", "≤ 1 ms")
    assert page.content.decode().count("<svg") >= 3
    # The page has the links of all others, and its own.
    assert {"Health", "Dead messages"} <= set(re.findall(r">([\w ]+)</a>", page.content.decode()))
    assert [(row.name, row.measures[0][:3]) for row in page.context["rows"]] == [("default", ("Consumed", "40", "80"))]


def test_the_page_of_a_topic_without_deliveries_has_no_empty_charts(viewer: Client) -> None:
    html = viewer.get(f"{URL}t.new/detail/").content.decode()
    assert "No message was delivered in this time." in html
    assert "Throughput" not in html


def test_run_times_that_nobody_counted_are_not_told_as_zero(viewer: Client) -> None:
    rolled(ago(minutes=5), "t.old", consumed=100, late_1=100)
    page = viewer.get(f"{URL}t.old/detail/")
    assert measures(page)["Run time p95"] == ("–", "–")
    assert "The run times of this time are not known." in page.content.decode()


def test_a_queue_has_a_page_with_its_topics(viewer: Client) -> None:
    rolled(ago(minutes=5), "t.a", "mail", consumed=40)
    rolled(ago(minutes=5), "t.b", "mail", consumed=60)
    rolled(ago(minutes=5), "t.b", "other", consumed=1000)
    page = viewer.get("/admin/delayq/queue/mail/detail/")
    assert measures(page)["Consumed"] == ("100", "0")
    assert names(page) == ["t.b", "t.a"]
    assert "/admin/delayq/queue/default/detail/" in viewer.get("/admin/delayq/queue/").content.decode()
    assert viewer.get("/admin/delayq/queue/no%20such%22%3Cb%3E/detail/").status_code == 200


def test_the_page_of_a_queue_names_its_limits(viewer: Client, queue_limits: Any) -> None:
    queue_limits(mail={"limit": 3}, other={"limit": 2})
    page = viewer.get("/admin/delayq/queue/mail/detail/")
    assert [limit.name for limit in page.context["limits"]] == ["queue mail"]
    assert not viewer.get(f"{URL}mail/detail/").context["limits"]


@pytest.mark.parametrize("url", [URL, f"{URL}t.a/detail/", "/admin/delayq/queue/default/detail/"])
def test_the_pages_need_the_permission_to_view_and_few_statements(
    viewer: Client, client: Client, django_user_model: Any, url: str
) -> None:
    rolled(ago(minutes=5), consumed=40)
    with CaptureQueriesContext(connection) as captured:
        assert viewer.get(url).status_code == 200
    assert len(asked(captured)) <= 25
    client.force_login(django_user_model.objects.create_user("guest", is_staff=True))
    assert client.get(url).status_code == 403


def test_a_window_and_the_time_before_it_are_read_together(boss: Client) -> None:
    with CaptureQueriesContext(connection) as captured:
        boss.get(URL)
    assert sum("delayq_rollup" in sql and '"topic" AS' in sql for sql in asked(captured)) == 1


def test_the_dashboard_leads_to_both_lists(viewer: Client) -> None:
    html = viewer.get("/admin/delayq_console/dashboard/").content.decode()
    assert f"{URL}?order=slower" in html
    assert f"{URL}?order=failing" in html
