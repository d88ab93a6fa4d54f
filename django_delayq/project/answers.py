"""The answers of a handler: what it raises to say what is to become of its message."""

from __future__ import annotations

from typing import Any, Final

from ..core import names
from ..core.durations import Duration
from . import validation

# The payload stays as it is. None is a payload.
KEPT: Final = object()
# The reason of a handler that gives none.
REJECTED: Final = "rejected by the handler"

# What other queues call the arguments of ``RetryLater``.
_MEANT = {
    **dict.fromkeys((*names.DELAYS, *names.DUE_TIMES, "due_at"), "delay"),
    **dict.fromkeys(("args", "kwargs"), "payload"),
    **dict.fromkeys(("message", "text"), "reason"),
    **dict.fromkeys(("max_retries", "max_attempts"), "retry=RetryPolicy.exponential(max_attempts=…) at @handler"),
    **dict.fromkeys(("exc", "cause"), "raise RetryLater(…) from error"),
    "throw": names.NOTHING,
}


class RetryLater(Exception):
    """Raise it in a handler to have the message delivered again after ``delay``.

    ``delay`` is a timedelta, a number of seconds, or text such as ``"5m"``. The delivery counts as a failed attempt, so
    that ``max_attempts`` bounds how often this can happen, unless ``counts=False``. ``payload`` replaces the payload of
    the message, for the next attempt and all after it.

    Raises ``ValueError`` for an impossible delay, and ``InvalidMessage`` for a payload that is not JSON or too large.
    """

    @names.with_hints(_MEANT, "RetryLater")
    def __init__(self, delay: Duration, reason: str = "", *, counts: bool = True, payload: Any = KEPT) -> None:
        super().__init__(reason or "the handler asked for a later delivery")
        self.delay = validation.delay(
            delay, for_datetime="for a datetime write the time until then: due - timezone.now()"
        )
        self.counts = counts
        # The new payload as JSON; None: the payload stays.
        self.payload: str | None = None if payload is KEPT else validation.payload(payload)


class Reject(Exception):
    """Raise it in a handler to give the message up at once: the message is *dead*, with this reason."""

    def __init__(self, reason: str = REJECTED) -> None:
        super().__init__(reason)
        self.reason = reason
