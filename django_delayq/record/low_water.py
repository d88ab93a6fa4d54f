"""Low-water marks: where looks along an index begin, so that they need not pass the dead rows before it.

While some transaction holds an old snapshot, no vacuum removes the rows that were changed or deleted since, and whoever
looks for the first row of an index walks over all of them.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from .sql.rows import BEGINNING, Spot

# A transaction that commits later than this after its statement may leave a row behind the mark: the next look from
# the very beginning finds it.
LATE_COMMIT = timedelta(seconds=5)
# Looks from the very beginning may take one of so many parts of the time. Where no dead rows are, they take next to
# none, and nearly every look is one.
PARTS_OF_TIME = 10


class LowWater:
    """The mark of one index, or of one queue in it. Used by one thread.

    Behind the mark stands whatever is usual: what falls due from now on, and what stood there at the last look. What is
    put before it, such as a message that was rescheduled into the past, is found by a look from the very beginning.
    """

    def __init__(self) -> None:
        self.mark = BEGINNING
        # True during looks that have begun at the very beginning; they have taken so many seconds.
        self._is_full = False
        self._spent = 0.0
        # When the next ones may begin (monotonic).
        self._full_at = 0.0

    def begin_anew(self) -> bool:
        """Return whether it is time to look from the very beginning; then that has begun."""
        if self._is_full or time.monotonic() < self._full_at:
            return False
        self._is_full, self._spent = True, 0.0
        return True

    def note(self, begin: Spot, first: Spot | None, now: datetime, took: float) -> None:
        """Take note of a look at the record's time ``now``, which began at a spot and found this as its first row.

        ``took``: seconds.
        """
        if begin <= self.mark:
            late = (now - LATE_COMMIT, 0)
            # Right before the first row: it may not have begun.
            self.mark = late if first is None else min((first[0], first[1] - 1), late)
        self._spent += took

    def end(self) -> None:
        """Take note that the looks have found what they looked for, or that it is not there."""
        if self._is_full:
            self._is_full = False
            self._full_at = time.monotonic() + PARTS_OF_TIME * self._spent
