"""Tasks of an operator in a browser, from the first click to the effect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from django_delayq import pause_queue, schedule_message, schedule_messages
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.core.states import State
from django_delayq.models import LimitOverride, Message, Queue
from tests.console.admin import samples
from tests.console.admin.samples import admin_url as url
from tests.support.limits import Declare
from tests.support.processes import Start

from .chromium import expect
from .conftest import Open

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("configure")]


def search(page: Any, text: str) -> None:
    page.get_by_label("Search", exact=True).fill(text)
    with page.expect_navigation():
        page.get_by_role("button", name="Search").click()


def act(page: Any, action: str) -> None:
    """Press a button of the list for the selected messages."""
    page.locator("#changelist-form").get_by_role("button", name=action).click()


def confirm(page: Any, name: str, *, reason: str = "", **fields: str) -> None:
    """Confirm the question."""
    for label, value in fields.items():
        page.locator(f"[name={label}]").fill(value)
    page.get_by_label("Reason").fill(reason)
    page.get_by_role("button", name=name).click()


def rows(page: Any) -> Any:
    return page.locator("#result_list tbody tr")


def finished(page: Any, start: Start) -> Operation:
    """Start a worker, and wait until the page of the operation shows by itself that it is done."""
    expect(page.get_by_text("queued", exact=True)).to_be_visible()
    expect(page.get_by_text("No worker is alive to do this")).to_be_visible()
    page.evaluate("window.loadedOnce = true")
    page.get_by_label("Refresh every").select_option("2")
    start("--threads", "2")
    expect(page.get_by_text("done", exact=True)).to_be_visible()
    expect(page.get_by_text("No worker is alive to do this")).to_have_count(0)
    assert page.evaluate("window.loadedOnce"), "the page was loaded again"
    return Operation.objects.earliest("pk")


def test_a_message_is_found_and_cancelled(open_page: Open) -> None:
    wanted = schedule_message("t.ok", {"order": 17}, delay="1h", key="order-17")
    other = schedule_message("t.ok", {"order": 18}, delay="1h", key="order-18")
    page = open_page(url("message_changelist"))
    expect(rows(page)).to_have_count(2)

    search(page, "key:order-17")
    expect(rows(page)).to_have_count(1)
    page.get_by_role("link", name=f"#{wanted.pk}").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#forecast")).to_contain_text("will be cancelled")
    confirm(page, "Cancel messages", reason="customer refunded")

    expect(page.locator(".messagelist")).to_contain_text("1 cancelled")
    expect(page.locator("#timeline")).to_contain_text("customer refunded")
    assert (samples.fresh(wanted).state, samples.fresh(other).state) == (State.CANCELLED, State.SCHEDULED)
    assert AuditEvent.objects.get().actor == "user:anna"


def test_all_that_a_search_finds_is_rescheduled_by_a_worker(open_page: Open, start: Start) -> None:
    later = timezone.now() + timedelta(hours=3)
    schedule_messages([{"topic": "t.ok", "delay": "1h"}] * 230)
    spared = schedule_message("t.queued", delay="1h")
    page = open_page(url("message_changelist"))

    search(page, "topic:t.ok")
    expect(rows(page)).to_have_count(50)
    page.locator("#action-toggle").check()
    page.get_by_text("Select all 230").click()
    act(page, "Reschedule…")
    expect(page.locator("#forecast")).to_contain_text("230")
    confirm(page, "Reschedule messages", delay="3h", typed="231", reason="the mail server moves")
    expect(page.locator(".errorlist")).to_contain_text("This is not 230")
    assert not Operation.objects.exists()
    confirm(page, "Reschedule messages", typed="230", reason="the mail server moves")

    operation = finished(page, start)
    assert (operation.done, operation.outcomes) == (230, {"rescheduled": 230})
    expect(page.get_by_text("230 rescheduled")).to_be_visible()
    moved = Message.objects.filter(topic="t.ok")
    assert moved.filter(due_at__gte=later).count() == 230
    assert samples.fresh(spared).moves == 1


def test_a_queue_is_paused_and_resumed(open_page: Open) -> None:
    page = open_page(url("queue_changelist"))
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="special"))
    expect(row).to_contain_text("active")
    row.get_by_role("link", name="Pause…").click()
    page.get_by_label("For:", exact=True).fill("2h")
    page.get_by_label("Reason").fill("the relay is down")
    page.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("paused")
    expect(row).to_contain_text("the relay is down")

    page.get_by_role("navigation", name="Delayed messages").get_by_role("link", name="Now").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="special"))
    expect(row).to_contain_text("paused")
    row.get_by_role("link", name="Resume…").click()
    page.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("active")
    assert not Queue.objects.exists()


def test_a_message_is_cancelled_without_javascript(open_page: Open, boss: User) -> None:
    message = schedule_message("t.ok", {"order": 17}, delay="1h", key="order-17")
    pause_queue("special", reason="so")
    page = open_page(url("dashboard_changelist"), java_script_enabled=False)
    expect(page.locator(".dq-rows tr").filter(has_text="default").locator("[data-label=Scheduled]")).to_have_text("1")
    expect(page.get_by_role("link", name="Refresh", exact=True)).to_be_visible()
    for name in ("deadletters", "queue", "worker", "health", "operation", "auditevent"):
        page.goto(url(f"{name}_changelist"))
        expect(page.get_by_role("heading", level=1)).to_be_visible()

    page.goto(url("message_changelist"))
    page.locator("[name=_selected_action]").check()
    act(page, "Cancel…")
    confirm(page, "Cancel messages", reason="no scripts here")
    expect(page.locator(".messagelist")).to_contain_text("1 cancelled")
    assert samples.fresh(message).state == State.CANCELLED


def test_a_payload_is_copied_and_the_way_back_leads_to_the_search(open_page: Open) -> None:
    message = schedule_message("t.ok", {"order": 17}, delay="1h", key="order-17")
    page = open_page(url("message_changelist"), permissions=["clipboard-read"])
    search(page, "key:order-17")
    page.get_by_role("link", name=f"#{message.pk}").click()
    for place, copied in (
        ("#payload pre + button", '{\n  "order": 17\n}'),
        ("#facts dd:has-text('order-17') button", "order-17"),
    ):
        page.locator(place).first.click()
        expect(page.locator(place).first).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied
    page.get_by_role("link", name="Back to the search").click()
    expect(page.get_by_label("Search", exact=True)).to_have_value("key:order-17")
    without = open_page(samples.change_url(message), java_script_enabled=False)
    expect(without.locator("#payload > pre")).to_be_visible()
    expect(without.locator("#payload > pre + button")).to_be_hidden()


def test_a_topic_is_paused_from_the_list_and_reset(open_page: Open, overrides_forgotten: None) -> None:
    samples.many(3, topic="t.ok", delay=0)
    page = open_page(url("topics_changelist"))
    expect(page.get_by_role("link", name="no handler")).to_be_visible()
    page.get_by_role("link", name="Pause…").click()
    confirm(page, "Pause", reason="the bank is down", duration="2h")
    expect(page.locator(".messagelist")).to_contain_text("The limit topic t.ok holds in all workers.")
    expect(page.get_by_role("row").filter(has_text="t.ok")).to_contain_text("by anna · ")

    page.goto(url("topics_changelist"))
    expect(page.get_by_role("link", name="paused", exact=True)).to_be_visible()
    page.get_by_role("listitem").filter(has_text="topic t.ok is paused").get_by_role("button", name="Resume").click()
    expect(page.locator(".messagelist")).to_contain_text("The limit topic t.ok is as the code declares it.")
    assert [*AuditEvent.objects.order_by("pk").values_list("action", "reason")] == [
        ("override", "the bank is down"),
        ("reset", ""),
    ]


def test_a_limit_is_changed_from_its_row(open_page: Open, overrides_forgotten: None, declare: Declare) -> None:
    declare("t.ok", limit=4)
    page = open_page(url("limits_changelist"))
    row = page.get_by_role("row").filter(has_text="t.ok")
    for button, limit in (("×2", 8), ("×2", 16), ("½", 8), ("Pause", 0)):
        row.get_by_role("button", name=button, exact=True).click()
        expect(page.locator(".messagelist")).to_contain_text("The limit topic t.ok holds in all workers.")
        assert LimitOverride.objects.get().limit == limit
