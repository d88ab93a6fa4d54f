"""The refresh of a page: it fetches when it should, and only then. The tests control the clock of the browser."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.urls import reverse

from django_delayq import schedule_message

from .chromium import MISSING, expect
from .conftest import Open

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.django_db(transaction=True)]

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
# A busy machine may take some seconds from the installation of the clock to its pause, which cannot go back in time.
BEFORE_NOON = NOON - timedelta(hours=1)
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  Object.defineProperty(document, "visibilityState", { value: hidden ? "hidden" : "visible", configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


class Live:
    """The dashboard in a browser, and the requests of its script."""

    def __init__(self, page: Any, forget: Callable[[], None]) -> None:
        self.page = page
        self.forget = forget
        self.asked = 0
        page.on("request", self._note)
        # The clock stands still from NOON on and moves only when a test moves it.
        page.clock.install(time=BEFORE_NOON)
        page.clock.pause_at(NOON)
        page.goto(reverse("admin:delayq_console_dashboard_changelist"))
        self.number = page.locator(".dq-tile").filter(has_text="Scheduled").locator(".dq-tile-number")
        expect(self.number).to_have_text("0")
        page.evaluate("window.loadedOnce = true")

    def _note(self, request: Any) -> None:
        self.asked += request.resource_type == "fetch"

    def schedule(self) -> None:
        schedule_message("t.ok", delay="1h")
        self.forget()

    def pass_time(self, seconds: int) -> None:
        self.page.clock.run_for(seconds * 1000)

    def shows(self, number: int) -> None:
        expect(self.number).to_have_text(str(number))
        assert self.page.evaluate("window.loadedOnce"), "the page was loaded again"


@pytest.fixture
def live(open_page: Open, forget_panels: Callable[[], None]) -> Live:
    return Live(open_page(), forget_panels)


def test_a_tile_changes_without_a_reload(live: Live) -> None:
    live.schedule()
    live.pass_time(6)
    live.shows(1)
    expect(live.page.get_by_role("status").filter(has_text="Updated")).to_be_visible()
    live.schedule()
    live.pass_time(6)
    live.shows(2)
    assert live.asked == 2


def test_nothing_is_asked_while_the_tab_is_hidden_and_at_once_afterwards(live: Live) -> None:
    live.page.evaluate(HIDE, True)
    live.schedule()
    live.pass_time(600)
    live.shows(0)
    assert live.asked == 0
    live.page.evaluate(HIDE, False)
    live.shows(1)


def test_nothing_is_asked_when_refresh_is_off_and_the_choice_is_kept(live: Live) -> None:
    page = live.page
    page.get_by_label("Refresh every").select_option("0")
    live.schedule()
    live.pass_time(600)
    live.shows(0)
    assert live.asked == 0

    page.reload()
    live.schedule()
    live.pass_time(600)
    assert live.asked == 0
    expect(page.get_by_label("Refresh every")).to_have_value("0")
    page.get_by_label("Refresh every").select_option("2")
    live.pass_time(3)
    expect(live.number).to_have_text("2")


def test_the_page_says_since_when_it_is_stale_and_recovers(live: Live) -> None:
    page = live.page
    page.route("**/dashboard/", lambda route: route.fulfill(status=204))
    live.pass_time(6)
    stale = page.get_by_role("status").filter(has_text="Stale since")
    expect(stale).to_be_visible()
    page.unroute("**/dashboard/")
    live.schedule()
    live.pass_time(11)
    live.shows(1)
    expect(stale).to_have_count(0)


def test_a_region_with_the_focus_is_left_alone(live: Live) -> None:
    live.page.locator(".dq-tile").first.focus()
    live.schedule()
    live.pass_time(6)
    expect(live.page.get_by_role("status").filter(has_text="Updated")).to_be_visible()
    assert live.page.evaluate("document.activeElement.classList.contains('dq-tile')")
