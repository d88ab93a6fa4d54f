"""A real browser before the real admin: one browser for all tests here, one context for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client, override_settings
from pytest_django.live_server_helper import LiveServer

from django_delayq.console.admin import panels
from tests.console.admin.conftest import slow_searches
from tests.console.conftest import timed

from .chromium import MISSING, STEP_TIMEOUT_MS, launched
from .middleware import wait_until_idle

# Fixtures of the console's tests for those here.
__all__ = ["slow_searches", "timed"]

DESKTOP = {"width": 1400, "height": 900}
# Opens the page at an address, if one is given, in a context with these options.
Open = Callable[..., Any]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Let Django use the database although Playwright runs an event loop in this thread."""
    if MISSING:
        pytest.skip(MISSING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        # Beside an event loop, Django has connections of its own: nobody could close those from before.
        connections.close_all()
        with launched() as running:
            yield running


@pytest.fixture(scope="package")
def live_server() -> Iterator[LiveServer]:
    """Serve the admin over HTTP under a strict Content-Security-Policy."""
    middleware = ["tests.browser.middleware.Strict", *django_settings.MIDDLEWARE]
    with override_settings(MIDDLEWARE=middleware):
        server = LiveServer("localhost")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _raised_time_limits(timed: Callable[..., None]) -> None:
    """Raise the time limits of the pages, so that none gives up, and drop what the test before left."""
    timed(60_000)
    panels.forget()


@pytest.fixture
def boss(transactional_db: None) -> User:
    """A user with all permissions."""
    return User.objects.create_superuser("anna")


@contextmanager
def logged_in(browser: Any, url: str, user: User, **options: Any) -> Iterator[Any]:
    """A context of its own of the browser, for pages of the site at this address."""
    client = Client()
    client.force_login(user)
    name = django_settings.SESSION_COOKIE_NAME
    context = browser.new_context(base_url=url, **{"viewport": DESKTOP, **options})
    context.set_default_timeout(STEP_TIMEOUT_MS)
    context.add_cookies([{"name": name, "value": client.cookies[name].value, "url": url}])
    yield context
    context.close()


@pytest.fixture
def open_page(browser: Any, live_server: LiveServer, boss: User) -> Iterator[Open]:
    """Open a page of the admin in a context of its own, logged in. Any complaint of the browser fails the test."""
    complaints: list[str] = []
    with ExitStack() as contexts:

        def visit(path: str = "", **options: Any) -> Any:
            context = contexts.enter_context(logged_in(browser, live_server.url, boss, **options))
            context.route("**/favicon.ico", lambda route: route.fulfill(status=204))
            page = context.new_page()
            page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
            page.on("console", lambda said: _note(complaints, page, said))
            if path:
                page.goto(path)
            return page

        yield visit
    wait_until_idle()
    assert not complaints, "\n".join(complaints)


def _note(complaints: list[str], page: Any, said: Any) -> None:
    """Collect errors of a page; a violation of the policy is an error of the browser's console too."""
    if said.type in ("error", "warning"):
        complaints.append(f"{page.url}: {said.text}")
