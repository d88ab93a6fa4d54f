"""The refresh of a page: it fetches when it should, and only then. The tests control the clock of the browser."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.console.admin import panels
from tests.console.admin import samples
from tests.console.admin.samples import admin_url

from .chromium import expect
from .conftest import Open

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
# A busy machine may take some seconds from the installation of the clock to its pause, which cannot go back in time.
BEFORE_NOON = NOON - timedelta(hours=1)
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  Object.defineProperty(document, "visibilityState", { value: hidden ? "hidden" : "visible", configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


class Watched:
    """A page whose clock stands still but for ``pass_time``; it must never be loaded again."""

    def __init__(self, page: Any, path: str) -> None:
        self.page = page
        # The requests of its script.
        self.asked = 0
        page.on("request", self._note)
        page.clock.install(time=BEFORE_NOON)
        page.clock.pause_at(NOON)
        page.goto(path)
        page.evaluate("window.loadedOnce = true")

    def _note(self, request: Any) -> None:
        self.asked += request.resource_type == "fetch"

    def pass_time(self, seconds: int) -> None:
        self.page.clock.run_for(seconds * 1000)

    def is_the_same(self) -> None:
        assert self.page.evaluate("window.loadedOnce"), "the page was loaded again"

    def refresh(self) -> None:
        asked = self.asked
        self.pass_time(6)
        expect(self.page.get_by_role("status").filter(has_text="Updated")).to_be_visible()
        assert self.asked == asked + 1
        self.is_the_same()


class Live(Watched):
    """The dashboard."""

    def __init__(self, page: Any) -> None:
        super().__init__(page, admin_url("dashboard_changelist"))
        self.number = page.locator(".dq-rows tbody tr").filter(has_text="default").locator("[data-label=Scheduled]")
        expect(self.number).to_have_text("0")

    def schedule(self) -> None:
        schedule_message("t.ok", delay="1h")
        # The server has kept for some seconds what it showed.
        panels.forget()

    def shows(self, number: int) -> None:
        expect(self.number).to_have_text(str(number))
        self.is_the_same()


@pytest.fixture
def live(open_page: Open) -> Live:
    return Live(open_page())


def test_a_tile_changes_without_a_reload(live: Live) -> None:
    live.schedule()
    live.refresh()
    live.shows(1)
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
    live.page.locator(".dq-rows a").first.focus()
    live.schedule()
    live.refresh()
    assert live.page.evaluate("document.activeElement.matches('.dq-rows a')")
    region = live.page.locator("[data-dq-region=queues]")
    expect(live.number).to_have_text("0")
    expect(region.get_by_text("As it was at")).to_be_visible()
    expect(live.page.get_by_role("status").filter(has_text="except for what is marked")).to_be_visible()

    live.page.evaluate("document.activeElement.blur()")
    live.pass_time(6)
    live.shows(1)
    expect(live.page.get_by_text("As it was at")).to_have_count(0)


def test_rows_of_the_list_change_in_their_places(open_page: Open) -> None:
    first, second = samples.running(), samples.running()
    watched = Watched(open_page(), f"{admin_url('message_changelist')}?state=all")
    page = watched.page
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(2)
    row = rows.filter(has_text=f"#{first.pk}")
    row.locator(".action-select").check()
    samples.succeeded(first)
    watched.refresh()
    expect(row).to_contain_text("consumed")
    expect(row.locator(".action-select")).to_be_checked()
    expect(page.locator(".dq-gone")).to_have_count(0)
    expect(page.get_by_text("The list has changed")).to_be_hidden()
    expect(rows.filter(has_text=f"#{second.pk}")).to_contain_text("running")


def test_rows_that_left_the_list_are_greyed_and_a_note_leads_to_the_others(open_page: Open) -> None:
    gone, stays = samples.running(), samples.running()
    watched = Watched(open_page(), f"{admin_url('message_changelist')}?state=running")
    page = watched.page
    samples.succeeded(gone)
    newcomer = samples.running()
    watched.refresh()
    expect(page.locator("tr.dq-gone")).to_contain_text(f"#{gone.pk}")
    expect(page.locator("tr.dq-gone")).to_have_count(1)
    expect(page.get_by_text("The list has changed")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="except for what is marked")).to_be_visible()
    with page.expect_navigation():
        page.get_by_role("link", name="Show the list as it is now").click()
    shown = page.locator("#result_list tbody tr")
    expect(shown).to_have_count(2)
    for message in (stays, newcomer):
        expect(shown.filter(has_text=f"#{message.pk}")).to_have_count(1)


@pytest.mark.usefixtures("slow_searches")
def test_a_slow_search_is_not_repeated(open_page: Open) -> None:
    schedule_message("t.ok", delay="1h")
    watched = Watched(open_page(), f"{admin_url('message_changelist')}?q=topic:t.ok")
    page = watched.page
    expect(page.get_by_role("status").filter(has_text="Not refreshed by itself")).to_be_visible()
    watched.pass_time(600)
    page.get_by_label("Refresh every").select_option("2")
    watched.pass_time(600)
    assert watched.asked == 0


def test_a_page_that_takes_long_is_asked_for_less_often(live: Live) -> None:
    """By the clock of the browser each answer takes four seconds: the next one is asked for after twenty."""
    live.page.evaluate("{ let at = 0; performance.now = () => (at += 4000); }")
    live.refresh()
    live.schedule()
    live.pass_time(18)
    assert live.asked == 1
    live.pass_time(3)
    live.shows(1)
    assert live.asked == 2
