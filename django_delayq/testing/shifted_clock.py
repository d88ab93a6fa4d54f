"""The record's clock in tests: Python's clock, and the time by which the test has travelled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.utils import timezone

from ..core.clock import ceil_tenth
from ..core.durations import Duration, seconds


class QueueClock:
    """Goes with Python's clock, also where freezegun or time-machine move that one, plus the time travelled.

    It is rounded up as due times are, so that a message without a delay is due at once also while Python's clock stands
    still. It never goes back by itself.
    """

    def __init__(self) -> None:
        self._travelled = timedelta(0)
        # While the clock stands still: its time.
        self._still: datetime | None = None

    def now(self) -> datetime:
        """Return the time."""
        return self._still or ceil_tenth(timezone.now().astimezone(UTC) + self._travelled)

    def moment(self, when: Duration | datetime) -> datetime:
        """Return a time from now on: after a duration, or an aware datetime. Raises ``ValueError`` for the past."""
        now = self.now()
        if not isinstance(when, datetime):
            when = now + timedelta(seconds=seconds(when))
        elif when.utcoffset() is None:
            raise ValueError("the time has no time zone; use an aware datetime, e.g. django.utils.timezone.now()")
        if when < now:
            raise ValueError(f"the queue's clock does not go back: it is {now.isoformat()} already")
        return ceil_tenth(when.astimezone(UTC))

    def move_to(self, moment: datetime) -> None:
        """Go to a time, unless it is over."""
        ahead = moment - self.now()
        if ahead > timedelta(0):
            self._travelled += ahead
            if self._still is not None:
                self._still = moment

    def stand_still(self) -> None:
        """Stop the clock: what is due in a moment must not depend on the speed of the machine."""
        self._still = self.now()

    def go_on(self) -> None:
        """Let the clock run on, from the time that it shows."""
        still, self._still = self._still, None
        if still is not None:
            self.move_to(still)
