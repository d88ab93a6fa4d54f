"""Low-water marks: where searches along an index begin, so that they need not pass the dead rows before it.

While a transaction holds an old snapshot, no vacuum removes the rows that were changed or deleted since, and a search
for the first row of an index walks over all of them.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from .sql.rows import BEGINNING, IndexPosition

# The mark stays this far in the past, for rows whose transactions have not committed yet. A row that is committed later
# than this after its statement waits for the next full scan.
LATE_COMMIT = timedelta(seconds=5)


class LowWater:
    """The mark of one index, or of one queue in it. One thread at a time uses it.

    Most rows are behind the mark: those that fall due from now on, and those that the last search left there. A full
    scan finds a row that a later write puts before the mark, such as a message that was rescheduled into the past.
    """

    def __init__(self, parts: float = 10.0, late: timedelta = LATE_COMMIT) -> None:
        """Full scans, which begin before all rows, use at most 1/``parts`` of the time. The mark lags by ``late``.

        Without dead rows a full scan is cheap, so nearly every search is one.
        """
        self._parts, self._late = parts, late
        self.mark = BEGINNING
        # True during a full scan.
        self._is_full = False
        # The seconds that this full scan has taken.
        self._spent = 0.0
        # The time from which the next full scan may begin (monotonic, seconds).
        self._full_at = 0.0

    def begin(self) -> IndexPosition:
        """Return where a search begins that ends with its first candidate."""
        return BEGINNING if self.begin_full_scan() else self.mark

    def begin_full_scan(self) -> bool:
        """Return whether it is time for a full scan; if so, it has begun."""
        if self._is_full or time.monotonic() < self._full_at:
            return False
        self._is_full, self._spent = True, 0.0
        return True

    def note(
        self, begin: IndexPosition, first: IndexPosition | None, now: datetime, took: float, *, is_over: bool = True
    ) -> None:
        """Take note of a search at the record's time ``now``: where it began, and the first row that it found.

        ``took``: seconds. ``is_over``: the search has found a candidate, or that there is none.
        """
        if begin <= self.mark:
            late = (now - self._late, 0)
            # The mark stands right before the first row, whose message may not have begun.
            self.mark = late if first is None else min((first[0], first[1] - 1), late)
        self._spent += took
        if self._is_full and is_over:
            self._is_full = False
            self._full_at = time.monotonic() + self._parts * self._spent
