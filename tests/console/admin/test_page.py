"""The parts that all pages share: navigation, environment, refresh, script and style sheet."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.db import connection
from django.test import Client
from django.test.html import parse_html
from django.test.utils import CaptureQueriesContext

from django_delayq import pause_queue
from django_delayq.console import audit
from django_delayq.console.admin import MessageAdmin, panels
from django_delayq.console.console_tuning import tuning
from django_delayq.console.models import Operation, Rollup
from django_delayq.core.states import State
from django_delayq.models import Message, Worker
from django_delayq.record import reads
from tests.support.rows import unguarded
from tests.support.statements import asked, assert_asks_the_same_of_many_queues
from tests.support.transactions import lock_table, unfinished

from . import samples
from .conftest import logged_in, person

pytestmark = pytest.mark.django_db

ROOT = "/admin/delayq_console/"
# The pages that refresh themselves, but for those of single rows.
REFRESHED = (
    "/admin/delayq_console/dashboard/",
    "/admin/delayq/message/",
    "/admin/delayq_console/deadletters/",
    "/admin/delayq/queue/",
    "/admin/delayq_console/topics/",
    "/admin/delayq/worker/",
    "/admin/delayq_console/health/",
    "/admin/delayq_console/operation/",
)


# The pages, and searches of the list, that look at all queues.
OF_ALL_QUEUES = (
    *REFRESHED,
    "/admin/delayq_console/limits/",
    "/admin/delayq/queue/default/detail/?window=month",
    "/admin/delayq_console/topics/t.ok/detail/",
    "/admin/delayq/message/?state=scheduled&p=2",
    "/admin/delayq/message/?state=overdue",
    "/admin/delayq/message/?state=all",
    "/admin/delayq/message/?q=topic:t.*+due:<2h",
    "/admin/delayq/message/?q=is:limited",
    "/admin/delayq_console/dashboard/?window=week&past=week",
)


def asset(name: str) -> str:
    found = finders.find(f"delayq_console/{name}")
    assert isinstance(found, str)
    return Path(found).read_text()


def navigation(html: str) -> str:
    [nav] = re.findall(r'<nav class="dq-nav".*?</nav>', html, re.DOTALL)
    return str(nav)


def links(html: str) -> dict[str, str]:
    """Return the addresses in the navigation by their labels."""
    found = re.findall(r'<li><a href="([^"]*)"[^>]*>([^<]*?) *<', navigation(html))
    return {label: url for url, label in found}


def test_each_page_links_to_all_others_and_marks_itself(boss: Client) -> None:
    for page in REFRESHED:
        html = boss.get(page).content.decode()
        assert list(links(html)) == [
            "Now", "Messages", "Failures", "Queues", "Topics", "Limits", "Schedules", "Tokens", "Workers", "Health",
            "Operations", "Audit",
        ]  # fmt: skip
        assert re.findall(r'<a href="([^"]*)" aria-current="page"', navigation(html)) == [page]
        regions = re.findall(r'data-dq-region="([^"]*)"', html)
        assert len(set(regions)) == len(regions) > 0
    assert {boss.get(url).status_code for url in links(html).values()} == {200}
    vera = logged_in(person("vera", "view_message"))
    assert "Audit" not in links(vera.get(f"{ROOT}dashboard/").content.decode())


def counts(html: str) -> dict[str, str]:
    """Return the numbers in the navigation by the labels of their links."""
    found = re.findall(r"<li><a [^>]*>([^<]*?) <em [^>]*>([^<]*)</em>", navigation(html))
    return dict(found)


@pytest.mark.parametrize("address", [*REFRESHED, f"{ROOT}auditevent/", "/admin/delayq_recurring/schedule/"])
def test_the_numbers_beside_the_links_are_on_every_page(boss: Client, address: str) -> None:
    samples.late(*samples.many(3, queue="mail"), seconds=4000)
    pause_queue("mail")
    samples.worker()
    at = reads.now(samples.DB).replace(second=0, microsecond=0) - timedelta(minutes=5)
    Rollup.objects.create(at=at, seconds=60, queue="mail", topic="t.a", dead=1234)
    things = str(len(boss.get(f"{ROOT}dashboard/").context["rows"]))
    panels.forget()
    for _time in range(14):
        with CaptureQueriesContext(connection) as captured:
            shown = counts(boss.get(address).content.decode())
        assert len(asked(captured)) <= 25
    assert shown == {"Now": things, "Failures": "1,234", "Queues": "1 paused", "Workers": "1"}


def test_the_next_page_reads_the_numbers_for_which_a_page_had_no_time(boss: Client, timed: Callable[..., None]) -> None:
    samples.worker()
    address = f"{ROOT}auditevent/"
    timed(0, "navigation")
    boss.get(address)
    timed(60_000, "navigation")
    assert counts(boss.get(address).content.decode())["Workers"] == "1"


def test_the_numbers_are_those_of_the_page_that_was_just_read(boss: Client) -> None:
    assert "Queues" not in counts(boss.get(f"{ROOT}dashboard/").content.decode())
    pause_queue("mail")
    panels.forget()
    boss.get(f"{ROOT}dashboard/")
    assert counts(boss.get(f"{ROOT}auditevent/").content.decode())["Queues"] == "1 paused"


def test_the_environment_and_the_read_only_badge_are_on_every_page(boss: Client, settings: Any) -> None:
    for page in REFRESHED:
        assert "dq-environment" not in boss.get(page).content.decode()
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"ENVIRONMENT": "<production>", "READ_ONLY": True}}
    panels.forget()
    for page in REFRESHED:
        html = boss.get(page).content.decode()
        assert "&lt;production&gt;" in html
        assert "read only" in samples.text(boss.get(page))


def test_the_refresh_is_a_plain_link_without_a_script(boss: Client) -> None:
    html = boss.get(f"{ROOT}dashboard/?window=week&past=day").content.decode()
    [live] = re.findall(r'<span class="dq-live".*?</span>', html, re.DOTALL)
    assert re.findall(r'<a class="dq-refresh" href="([^"]*)">', live) == [f"{ROOT}dashboard/?window=week&amp;past=day"]
    assert "<select" not in live


def outside(part: Any) -> Iterator[str]:
    """Yield what a page shows outside of the regions that are refreshed, and its buttons there."""
    if isinstance(part, str):
        yield from filter(None, [part.strip()])
        return
    given = dict(part.attributes)
    if "data-dq-region" in given:
        return
    if part.name in ("a", "button", "form") and given.get("class") != "dq-refresh":
        yield f"{part.name} {given.get('href') or given.get('action') or given.get('value') or ''}"
    for child in part.children:
        yield from outside(child)


def parts_outside(html: str) -> list[str]:
    return list(outside(parse_html(html)))


def test_all_that_changes_on_a_page_is_in_a_region_that_is_refreshed(boss: Client) -> None:
    """Each page is read before and after everything that it shows has changed."""
    message = samples.scheduled({"a": 1}, delay=0, key="one")
    operation = samples.operation()
    worker = samples.worker()
    pages = [
        *REFRESHED,
        samples.change_url(message),
        samples.admin_url("operation_change", operation.pk),
        samples.admin_url("worker_change", "w"),
    ]
    before = {page: parts_outside(boss.get(page).content.decode()) for page in pages}
    samples.failed(samples.claimed(message), dead=True, reason="given up", error="ValueError: no")
    samples.one_of_each()
    Operation.objects.update(state="failed", done=5, total=5, finished_at=worker.seen_at, error="so")
    Worker.objects.update(seen_at=worker.seen_at - timedelta(minutes=30), queues=["default", "mails"])
    pause_queue("default", reason="so")
    panels.forget()
    for page in pages:
        shown = boss.get(page).content.decode()
        assert "data-dq-region" in shown
        assert parts_outside(shown) == before[page], page


def test_the_parts_outside_of_the_regions_are_noticed() -> None:
    html = '<p>a</p><div data-dq-region="x"><a href="/no">b</a><br></div><form action="/yes"><input>c</form>'
    assert parts_outside(html) == ["a", "form /yes", "c"]


def test_no_page_has_markup_of_others_or_inline_code(boss: Client) -> None:
    """All that came from elsewhere is text, and nothing needs more than a strict Content-Security-Policy allows."""
    hostile = '<script>"&'
    error = {"error": hostile, "traceback": hostile, "reason": hostile}
    message = samples.running({hostile: hostile}, key=hostile, headers={"h": hostile})
    samples.failed(message, dead=True, **error)
    samples.late(*samples.many(2))
    samples.scheduled(delay="30m", queue="mail")
    unguarded(Message).update(topic=hostile)
    at = message.created_at.replace(second=0, microsecond=0)
    Rollup.objects.create(at=at, seconds=60, queue="mail", topic=hostile, consumed=1, late_5=1)
    samples.worker(hostile, (hostile,))
    pause_queue("mail", reason=hostile)
    operation = samples.operation("cancel", described=hostile, reason=hostile)
    Operation.objects.update(state="failed", error=hostile)
    audit.record(samples.DB, "cancel", hostile, reason=hostile)
    pages = [
        *(*REFRESHED, f"{ROOT}limits/", f"{ROOT}auditevent/", f"{ROOT}dashboard/?window=week&past=week"),
        *(f"/admin/delayq/message/?{query}" for query in ("state=all", "q=due:<script>", "q=is:dead&state=<script>")),
        *(samples.admin_url(f"queue_{name}", "mail") for name in ("pause", "resume")),
        samples.change_url(message),
        samples.admin_url("operation_change", operation.pk),
        samples.admin_url("health_restore"),
    ]
    shown = {page: boss.get(page) for page in pages}
    shown["question"] = boss.post(samples.action_url("requeue"), {"ids": samples.ids(message)})
    for page, response in shown.items():
        html = response.content.decode()
        assert hostile not in html, page
        assert not re.search(r"<style|<[^>]*\s(style|on[a-z]+)\s*=|<script(?![^>]*\ssrc=)", html), page
        assert response.status_code == 200, page
    for page in (samples.change_url(message), f"{ROOT}dashboard/"):
        assert "&lt;script&gt;&quot;&amp;" in shown[page].content.decode()


@pytest.mark.parametrize(
    "address",
    [
        "/admin/delayq/message/?q=%00&state=%00",
        "/admin/delayq_console/deadletters/?queue=%00&period=%00",
        "/admin/delayq_console/limits/override/?name=a",
        "/admin/delayq_console/limits/override/?name=topic%00",
        "/admin/delayq_console/auditevent/?action=a%00b&actor=%00&period=%00&q=%00&before=%00",
        *(
            f"/admin/delayq/{model}/a%00b/{view}/"
            for model, views in (("queue", ("change", "delete", "pause", "detail")), ("worker", ("change", "delete")))
            for view in views
        ),
    ],
)
def test_a_character_that_no_database_keeps_finds_nothing(boss: Client, address: str) -> None:
    samples.worker("ab", ("ab",))
    for response in (boss.get(address, follow=True), boss.post(address, follow=True)):
        assert response.status_code in (200, 403, 404)


def test_a_forged_field_changes_nothing(boss: Client) -> None:
    message = samples.dead()
    forged = boss.post(samples.admin_url("message_repeat", message.pk), {"nonce": "a\0b"})
    assert forged.status_code == 302
    told = boss.post(samples.admin_url("limits_reset"), {"name": "topic a\0b"}, follow=True)
    assert "was not overridden" in samples.text(told)


def test_a_process_keeps_nothing_of_panels_that_it_dropped() -> None:
    def kept(number: int) -> int:
        for name in range(number):
            panels.load(f"timeline order-{name}", samples.DB, str, kept=0.0)
        gc.collect()
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, panels.__file__)])
        return sum(each.size for each in taken.statistics("filename"))

    tracemalloc.start()
    try:
        kept(2 * tuning.panels)
        few, many = kept(2 * tuning.panels), kept(6 * tuning.panels)
    finally:
        tracemalloc.stop()
    assert many < 1.3 * few


def test_script_and_style_sheet_are_small_and_load_nothing_else() -> None:
    script, sheet = asset("admin.js"), asset("admin.css")
    assert len(script.encode()) <= 8 * 1024
    for word in ("eval(", "innerHTML", "new Function", 'setAttribute("style"', ".style", "http:", "https:", "import "):
        assert word not in script, word
    assert "@import" not in sheet
    assert "url(" not in sheet


def test_every_css_rule_is_limited_to_our_pages_and_all_are_small() -> None:
    sheet = re.sub(r"/\*.*?\*/", "", asset("admin.css"), flags=re.DOTALL)
    # All rules stand within one.
    assert re.match(r"\s*\.delayq \{", sheet)
    depths = list(accumulate((mark == "{") - (mark == "}") for mark in re.findall(r"[{}]", sheet)))
    assert depths.index(0) == len(depths) - 1
    assert len(asset("admin.css").encode()) <= 14_000


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours such as #a01313, by WCAG."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(factor * part for factor, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_contrast_with_the_background_in_both_themes() -> None:
    pairs = re.findall(r"--([a-z0-9-]+): light-dark\((#\w+), (#\w+)\);", asset("admin.css"))
    palette = {name: (light, dark) for name, light, dark in pairs}
    for theme, ground in enumerate(palette["card"]):
        for name in ("fg", "quiet", "link", "bad", "warn", "good"):
            assert contrast(palette[name][theme], ground) >= 4.5, name
            assert contrast(palette[name][theme], palette["soft"][theme]) >= 4.5, name
        for name in ("c0", "c3"):
            assert contrast(palette[name][theme], ground) >= 3, name


def is_unbounded(sql: str) -> bool:
    """Tell whether a statement groups rows, or reads a table more often than it has limits and not by an id."""
    # Few queues are paused at a time.
    reads, limits = (len(re.findall(part, sql)) for part in (r'FROM "?delayq_(?!queue\b)', r"\bLIMIT \d{1,5}\b"))
    # A part that has a limit may be grouped.
    rest = re.sub(r"\bLIMIT \d{1,5}\s*\)( m)? GROUP BY\b", "", sql)
    is_grouped = re.search(r"\b(DISTINCT|GROUP BY|OFFSET \d{5,})\b", rest, re.IGNORECASE)
    # Workers bound what is leased.
    return bool(is_grouped) or (reads > limits and not re.search(r'\bid"? (=|IN) |"leased_until"', sql))


SEARCHES = (
    *("1", "key:a", "topic:t.admin", "topic:a*", "queue:default", "a", "due:<1h", "due:today", "finished:<1h"),
    *("created:<1h state:dead", "error:Timeout", "worker:a", "attempts:>3", "is:retrying", "payload.order.id:42"),
)
QUERIES = ("p=2", "o=2.-3.4", "all=", "_facets=", *(f"state={state}" for state in State), *(f"q={q}" for q in SEARCHES))
OF_LISTS = [f"/admin/delayq/message/?{query}" for query in QUERIES] + [f"{ROOT}auditevent/?q=something&actor=a"]


def test_no_page_asks_what_grows_with_a_table(
    boss: Client, monkeypatch: pytest.MonkeyPatch, tuned: Callable[..., None]
) -> None:
    monkeypatch.setattr(MessageAdmin, "list_per_page", 5)
    tuned(bar_rows=1)
    samples.many(7, delay="30m")
    samples.late(*samples.many(3))
    for address in (*OF_ALL_QUEUES, *OF_LISTS):
        panels.forget()
        with CaptureQueriesContext(connection) as captured:
            assert boss.get(address).status_code == 200
        asked_of_tables = [
            entry["sql"] for entry in captured if re.search('(?s)^[^E].* "?delayq_(message|audit)', entry["sql"])
        ]
        assert [sql for sql in asked_of_tables if is_unbounded(sql)] == [], address
    assert is_unbounded('SELECT COUNT(*) FROM "delayq_message"')
    assert is_unbounded("SELECT queue, count(*) FROM delayq_message GROUP BY queue LIMIT 10")


@pytest.mark.parametrize("address", OF_ALL_QUEUES)
def test_a_page_asks_the_same_of_two_queues_as_of_many(boss: Client, address: str) -> None:
    def show() -> None:
        panels.forget()
        assert boss.get(address).status_code == 200

    assert_asks_the_same_of_many_queues(show)


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql("locks a table")
@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("deadletters", {}),
        ("message", {"q": "order-17"}),
        ("message", {"q": "order:17"}),
        ("message", {"q": "queue:mailz", "state": "all"}),
    ],
)
def test_a_page_waits_for_no_lock(chief: Client, timed: Callable[..., None], page: str, query: dict[str, Any]) -> None:
    timed(50)
    with unfinished(lambda: lock_table("delayq_message")):
        response = chief.get(samples.admin_url(f"{page}_changelist"), query)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted")
            assert cursor.fetchone()[0], "the page was there when the lock was gone"
    assert response.status_code == 200
