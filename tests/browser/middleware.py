"""The middleware of the test server: a strict policy on each answer, and a count of open requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'"
)

_idle = threading.Condition()
_busy = 0


class Strict:
    """Allow scripts and styles from our own files only, and count the requests that are being answered."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        _count(1)
        try:
            response = self.get_response(request)
        finally:
            _count(-1)
        response["Content-Security-Policy"] = POLICY
        return response


def _count(change: int) -> None:
    global _busy  # noqa: PLW0603
    with _idle:
        _busy += change
        _idle.notify_all()


def wait_until_idle(timeout: float = 60.0) -> None:
    """Wait until no request is being answered, because the tables are flushed next."""
    with _idle:
        assert _idle.wait_for(lambda: not _busy, timeout), f"{_busy} requests are still under way"
