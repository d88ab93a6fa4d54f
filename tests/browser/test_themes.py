"""The pages in other themes of the admin, where they are installed: navigation, refresh, tabs and buttons are there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from django.contrib.auth.models import User

from django_delayq.core.states import State
from django_delayq.models import Message
from testproject.servers import free_port
from tests.console.admin import samples
from tests.console.admin.samples import admin_url
from tests.support.workers import eventually

from .chromium import expect
from .conftest import logged_in
from .seed import installation

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parents[2]
LAPTOP = {"width": 1366, "height": 768}
THEMES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
    for name in ("unfold", "grappelli", "jazzmin")
]
PAGES = ("dashboard", "message", "deadletters", "queue", "worker", "health", "operation")
# Tells of each element whether the middle of it can be seen and clicked, once it was scrolled to (smoothly in themes).
COVERED = """(elements) => elements.filter((one) => {
  one.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
  const box = one.getBoundingClientRect();
  if (box.left < 0 || box.right > window.innerWidth + 1 || !box.width) return true;
  const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return !(top && (one.contains(top) || top.contains(one)));
}).map((one) => one.outerHTML.slice(0, 120))"""


@pytest.fixture(params=THEMES)
def site(request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path) -> Iterator[str]:
    """Serve the admin in a theme, in a process of its own, since a theme replaces the admin's site; return its address.

    Themes have scripts in their pages, so no policy is sent.
    """
    url = f"http://127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DJANGO_SETTINGS_MODULE": "tests.browser.theme_settings",
        "DELAYQ_TEST_THEME": request.param,
    }
    command = [sys.executable, "-m", "django", "runserver", "--noreload", "--insecure", url.removeprefix("http://")]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: answers(server, url, log), "the server with the theme")
        yield url
    finally:
        server.terminate()
        server.wait()


def answers(server: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert server.poll() is None, log.read_text()
    try:
        with urlopen(f"{url}/admin/login/", timeout=10):
            return True
    except OSError:
        return False


@pytest.fixture
def seeded(site: str) -> dict[State, Message]:
    return installation()


@pytest.fixture
def page(browser: Any, site: str, seeded: dict[State, Message], boss: User) -> Iterator[Any]:
    with logged_in(browser, site, boss, viewport=LAPTOP) as context:
        yield context.new_page()


def reachable(page: Any, selector: str) -> None:
    """Assert that the page has such elements and that each of them can be clicked."""
    # A page that a click leads to is awaited.
    expect(page.locator(selector)).not_to_have_count(0)
    assert page.eval_on_selector_all(selector, COVERED) == []


def test_each_page_has_navigation_and_refresh_and_a_row_changes_without_a_reload(page: Any) -> None:
    for name in PAGES:
        page.goto(admin_url(f"{name}_changelist"))
        expect(page.locator(".dq-nav li a")).to_have_count(12)
        reachable(page, ".dq-nav li a")
        expect(page.get_by_label("Refresh every")).to_be_visible()
        reachable(page, ".dq-live select, .dq-live a")
    message = samples.running()
    page.goto(f"{admin_url('message_changelist')}?q={message.pk}")
    row = page.locator("#result_list tr").filter(has_text=f"#{message.pk}")
    expect(row).to_contain_text("running")
    page.evaluate("window.loadedOnce = true")
    samples.succeeded(message)
    page.get_by_label("Refresh every").select_option("2")
    expect(row).to_contain_text("consumed")
    assert page.evaluate("window.loadedOnce")


def test_the_list_and_dead_letters_have_tabs_search_and_buttons(page: Any, seeded: dict[State, Message]) -> None:
    page.goto(f"{admin_url('message_changelist')}?state=all")
    reachable(page, ".dq-chips a")
    reachable(page, "#changelist-search input[type=text], #changelist-search input[type=submit]")
    reachable(page, ".dq-head button")
    message = seeded[State.SCHEDULED]
    page.get_by_label("Search", exact=True).fill(f"#{message.pk}")
    page.locator("#changelist-search input[type=submit]").click()
    row = page.locator("#result_list tr").filter(has_text=f"#{message.pk}")
    expect(row).to_have_count(1)
    row.get_by_role("link", name=f"#{message.pk}").click()
    reachable(page, "[data-dq-region=actions] button")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#forecast")).to_contain_text("will be cancelled")
    page.goto(admin_url("deadletters_changelist"))
    reachable(page, ".dq-dead td button")
    page.get_by_role("button", name="Requeue all").first.click()
    expect(page.locator("#forecast")).to_contain_text("will be scheduled again")
