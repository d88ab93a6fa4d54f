"""What the server of these tests adds to each answer, and knows about what it is doing."""

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
    """Nothing may run or be styled but from files of our own. Requests under way are counted."""

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
    """Return when no request is under way: the next thing to happen is the flush of the tables."""
    with _idle:
        assert _idle.wait_for(lambda: not _busy, timeout), f"{_busy} requests are still under way"
