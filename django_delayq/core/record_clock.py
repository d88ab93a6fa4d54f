"""The record's clock, as a process knows it without asking. The scripts in Redis get their time from it."""

from __future__ import annotations

import time
from datetime import datetime
from functools import cache

from . import clock

# A process that got no answer of the record for this long asks it for the time. Seconds.
SURE_FOR = 30.0


class RecordClock:
    """Goes with this host's clock, as far as no answer of the record has proven it wrong. Any thread may use it.

    An answer proves that the record's clock showed a moment between the question and the answer. A clock that agrees
    with that is left as it is, so it does not jitter by the round trip. That the host's clock is set changes nothing.
    """

    def __init__(self) -> None:
        # By how many seconds the record's clock is ahead of the monotonic one.
        self._ahead = time.time() - time.monotonic()
        # When the record answered the last time (monotonic, seconds).
        self._learned = float("-inf")

    def learn(self, asked: float, shown: datetime) -> None:
        """Learn from an answer that has just come to a question sent at ``asked`` (monotonic): the record's time."""
        if clock.of_tests is not None:
            return
        answered, seconds = time.monotonic(), shown.timestamp()
        self._ahead = min(max(self._ahead, seconds - answered), seconds - asked)
        self._learned = answered

    def seconds(self) -> float:
        """Return the time by the record's clock, in seconds since 1970."""
        return time.monotonic() + self._ahead

    @property
    def is_sure(self) -> bool:
        """True when the record has answered lately."""
        return time.monotonic() - self._learned < SURE_FOR


@cache
def record_clock(using: str) -> RecordClock:
    """Return this process's knowledge of the clock of a database alias."""
    return RecordClock()
