"""Every page in a browser: strict Content-Security-Policy, accessibility, and width on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from django_delayq.console.admin import MessageAdmin, panels
from django_delayq.console.models import Operation
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.console.admin.samples import admin_url as url
from tests.support.rows import unguarded

from . import busy_day
from .chromium import expect
from .conftest import Open
from .seed import LONG, installation
from .tour import SIZES, TOO_WIDE, Tour

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def seeded(boss: User, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> dict[State, Message]:
    configure(CONSOLE={"ENVIRONMENT": "staging"})
    monkeypatch.setattr(MessageAdmin, "list_per_page", 12)
    return installation()


@pytest.fixture
def tour(open_page: Open, seeded: dict[State, Message]) -> Tour:
    return Tour(open_page())


def test_the_overview_pages_are_sound(tour: Tour) -> None:
    tour.visit("dashboard", url("dashboard_changelist"))
    tour.visit("dead-letters", url("deadletters_changelist"))
    tour.visit("dead-letter", url("deadletters_changelist"), do=lambda page: page.locator("summary").first.click())
    tour.visit("queues", url("queue_changelist"))
    tour.visit("queue", url("queue_detail", "mail"))
    tour.visit("topics", f"{url('topics_changelist')}?order=slower")
    tour.visit("topic", f"{url('topics_detail', LONG)}?window=day")
    tour.visit("pause", url("queue_pause", "default"))
    tour.visit("resume", url("queue_resume", "mail"))
    tour.visit("limits", url("limits_changelist"))
    tour.visit("workers", url("worker_changelist"))
    tour.visit("health", url("health_changelist"))
    tour.visit("restore", url("health_restore"))
    tour.end()


def test_now_is_sound_on_a_busy_day_and_short_on_a_phone(
    boss: User, open_page: Open, configure: Callable[..., None]
) -> None:
    configure(LIMITS=busy_day.LIMITS)
    busy_day.happen()
    tour = Tour(open_page())
    page = tour.page
    page.goto(url("dashboard_changelist"))
    expect(page.get_by_role("heading", level=1)).to_have_text("2 things need you")
    tour.visit("now", url("dashboard_changelist"))
    later = timezone.localtime() + timedelta(minutes=5)
    tour.visit("now-list", f"{url('message_changelist')}?q=due:{later:%Y-%m-%dT%H:%M}..", dark=False)
    tour.visit("now-week", f"{url('dashboard_changelist')}?window=week", dark=False)
    page.set_viewport_size(SIZES["phone"])
    assert page.evaluate("document.documentElement.scrollHeight") <= 2400
    tour.end()


def test_the_keys_lead_to_the_search_and_tell_what_they_do(boss: User, open_page: Open) -> None:
    page = open_page(url("queue_changelist"))
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_contain_text("search for messages")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    with page.expect_navigation():
        page.keyboard.press("/")
    box = page.get_by_label("Search", exact=True)
    expect(box).to_be_focused()
    page.keyboard.type("a/b?")
    expect(box).to_have_value("a/b?")
    box.blur()
    page.keyboard.press("/")
    expect(box).to_be_focused()


def test_the_lists_of_messages_are_sound(tour: Tour) -> None:
    messages = url("message_changelist")
    tour.visit("list", messages)
    tour.visit("list-all", f"{messages}?state=all", dark=False)
    tour.visit("list-search", f"{messages}?q=topic:{LONG}+due:<1h")
    tour.visit("list-nothing", f"{messages}?q=key:nobody", dark=False)
    tour.visit("list-problem", f"{messages}?q=attempts:many", do=lambda page: page.locator("summary").first.click())
    tour.end()


def test_the_page_of_a_message_is_sound_in_each_state(tour: Tour, seeded: dict[State, Message]) -> None:
    for state, message in seeded.items():
        tour.visit(f"message-{state.value}", url("message_change", message.pk))
    tour.end()


def test_the_confirmation_pages_are_sound(tour: Tour, seeded: dict[State, Message]) -> None:
    page = tour.page
    page.goto(url("message_change", seeded[State.SCHEDULED].pk))
    with page.expect_navigation():
        page.get_by_role("button", name="Reschedule").click()
    tour.look("confirm-reschedule")
    page.goto(url("deadletters_changelist"))
    with page.expect_navigation():
        page.get_by_role("button", name="Purge all").first.click()
    tour.look("confirm-purge")
    with page.expect_navigation():
        page.locator("input[type=submit].default").click()
    tour.look("confirm-error")
    tour.end()


def test_operations_and_the_audit_are_sound(tour: Tour) -> None:
    tour.visit("operations", url("operation_changelist"))
    for operation in Operation.objects.filter(state__in=["running", "failed"]).order_by("pk"):
        tour.visit(f"operation-{operation.action}-{operation.state}", url("operation_change", operation.pk))
    tour.visit("audit", url("auditevent_changelist"))
    tour.visit("audit-search", f"{url('auditevent_changelist')}?action=cancel&q=nothing")
    tour.end()


def test_the_pages_of_a_new_installation_are_sound(open_page: Open) -> None:
    tour = Tour(open_page())
    for page in ("dashboard", "message", "deadletters", "queue", "worker", "health", "operation", "auditevent"):
        tour.visit(f"empty-{page}", url(f"{page}_changelist"), dark=False)
    tour.end()


def heights(page: Any, rows: str) -> list[float]:
    """Return the heights of rows. One line of text with its padding takes some 30 pixels."""
    found: list[float] = page.evaluate(
        "(rows) => [...document.querySelectorAll(rows)].map((row) => row.getBoundingClientRect().height)", rows
    )
    assert found
    return found


def test_lists_have_short_rows_on_a_laptop_and_on_a_phone(open_page: Open, seeded: dict[State, Message]) -> None:
    message = seeded[State.DEAD]
    long = "ValueError: " + "x" * 150
    unguarded(Message).filter(pk=message.pk).update(error=long, payload={"note": "wait " * 60})
    page = open_page()
    for size in ("laptop", "phone"):
        page.set_viewport_size(SIZES[size])
        page.goto(f"{url('message_changelist')}?state=all")
        # On a phone a message is two lines: its id, its key and its error are the second.
        assert max(heights(page, "#result_list tbody tr")) < {"laptop": 40, "phone": 72}[size]
        page.goto(url("deadletters_changelist"))
        # On a phone, the name stands above the numbers and the buttons.
        assert max(heights(page, ".dq-dead tbody tr")) < {"laptop": 48, "phone": 110}[size]
    cell = page.locator(".dq-dead .dq-error-kind", has_text="x" * 150)
    assert cell.get_attribute("title") == long
    page.set_viewport_size(SIZES["laptop"])
    page.goto(f"{url('message_changelist')}?q=%23{message.pk}")
    assert page.locator(".field-failure span").get_attribute("title") == long
    assert "wait " * 60 in (page.locator(".field-preview code").get_attribute("title") or "")


def test_a_phone_shows_the_tab_of_the_page(open_page: Open, boss: User) -> None:
    page = open_page()
    page.set_viewport_size(SIZES["phone"])
    page.goto(url("limits_changelist"))
    expect(page.locator(".dq-nav [aria-current]")).to_be_in_viewport(ratio=1)


def test_a_phone_has_messages_on_its_first_screen_and_buttons_at_its_bottom_for_ticked_rows(
    open_page: Open, seeded: dict[State, Message]
) -> None:
    page = open_page()
    page.set_viewport_size(SIZES["phone"])
    page.goto(url("message_changelist"))
    dead, cancel = page.get_by_role("link", name="Dead"), page.get_by_role("button", name="Cancel…")
    expect(page.locator("#result_list tbody tr").nth(5)).to_be_in_viewport(ratio=1)
    expect(page.locator("#result_list .field-identity", has_text="order-").first).to_be_visible()
    expect(dead).not_to_be_in_viewport()
    expect(cancel).to_be_hidden()
    page.locator("#result_list .action-select").nth(3).check()
    expect(cancel).to_be_in_viewport(ratio=1)
    page.locator("#result_list .action-select").last.check()
    expect(cancel).to_be_in_viewport(ratio=1)
    assert not page.evaluate(TOO_WIDE)
    page.locator("#result_list .action-select").last.uncheck()
    page.locator("#result_list .action-select").nth(3).uncheck()
    with page.expect_navigation():
        dead.click()
    expect(page.locator("#result_list tbody tr")).to_have_count(7)


def test_a_laptop_shows_a_dozen_messages_at_once(open_page: Open, seeded: dict[State, Message]) -> None:
    # The numbers that other tests have read would stand in the navigation.
    panels.forget()
    page = open_page()
    page.set_viewport_size(SIZES["laptop"])
    page.goto(url("message_changelist"))
    bottoms = page.evaluate(
        "[...document.querySelectorAll('#result_list tbody tr')].map((row) => row.getBoundingClientRect().bottom)"
    )
    assert sum(bottom <= SIZES["laptop"]["height"] for bottom in bottoms) == 12
    assert page.locator("#nav-sidebar, #toggle-nav-sidebar").count() == 0
