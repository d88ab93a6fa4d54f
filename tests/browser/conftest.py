"""A real browser before the real admin: one browser for all tests here, one context for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.test import Client, override_settings
from pytest_django.live_server_helper import LiveServer

from django_delayq.console.admin import panels
from tests.console.admin.conftest import raise_time_limits

from .chromium import STEP_TIMEOUT_MS, launched
from .middleware import wait_until_idle

DESKTOP = {"width": 1400, "height": 900}


class Open(Protocol):
    def __call__(self, path: str = ..., *, user: User | None = ..., **options: Any) -> Any: ...


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Let Django use the database although Playwright runs an event loop in this thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "DJANGO_ALLOW_ASYNC_UNSAFE", "1")
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
def _raised_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits of the pages, so that none gives up, and drop what the test before left."""
    raise_time_limits(monkeypatch)
    panels.forget()


@pytest.fixture
def boss(transactional_db: None) -> User:
    """A user with all permissions."""
    return User.objects.create_superuser("anna")


@pytest.fixture
def complaints() -> list[str]:
    """Collect the complaints of the browser; any of them fails the test at its end."""
    return []


@pytest.fixture
def open_page(browser: Any, live_server: LiveServer, boss: User, complaints: list[str]) -> Iterator[Open]:
    """Open a page of the admin in a context of its own, logged in."""
    contexts: list[Any] = []

    def visit(path: str = "", *, user: User | None = None, **options: Any) -> Any:
        context = browser.new_context(base_url=live_server.url, viewport=DESKTOP, **options)
        contexts.append(context)
        context.set_default_timeout(STEP_TIMEOUT_MS)
        context.add_cookies([_session(user or boss, live_server.url)])
        context.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
        page.on("console", lambda said: _note(complaints, page, said))
        if path:
            page.goto(path)
        return page

    yield visit
    for context in contexts:
        context.close()
    wait_until_idle()
    assert not complaints, "\n".join(complaints)


def _note(complaints: list[str], page: Any, said: Any) -> None:
    """Collect errors of a page; a violation of the policy is an error of the browser's console too."""
    if said.type in ("error", "warning"):
        complaints.append(f"{page.url}: {said.text}")


def _session(user: User, url: str) -> dict[str, str]:
    client = Client()
    client.force_login(user)
    name = django_settings.SESSION_COOKIE_NAME
    return {"name": name, "value": client.cookies[name].value, "url": url}


@pytest.fixture
def forget_panels() -> Callable[[], None]:
    """Return a function that makes the server drop what it has kept for some seconds."""
    return panels.forget
