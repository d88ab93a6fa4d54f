"""Numbers of rows that are counted up to a cap only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

# The most rows that one look counts or reads: of each queue, where it looks at the queues.
ROWS_READ = 10_000
# The most messages, topics, queues or ids that one text names.
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Capped:
    """A number of rows. ``more``: there are or may be more. ``about``: the database estimated it."""

    count: int
    more: bool = False
    about: bool = False

    def __str__(self) -> str:
        if self.about:
            return _("about %(number)s") % {"number": f"{_rounded(self.count):,}"}
        return f"{self.count:,}+" if self.more else f"{self.count:,}"

    def as_json(self) -> dict[str, Any]:
        """Return the number for ``--json``."""
        return {"count": self.count, "exact": not self.more and not self.about}


NONE = Capped(0)


def capped(found: int, cap: int) -> Capped:
    """Make a number of a count that stopped one row beyond the cap."""
    return Capped(min(found, cap), found > cap)


def total(numbers: Iterable[Capped]) -> Capped:
    """Return the sum, which is as exact as the least exact of the numbers."""
    all_ = list(numbers)
    more = any(number.more for number in all_)
    return Capped(sum(number.count for number in all_), more, not more and any(number.about for number in all_))


def _rounded(number: int) -> int:
    """Round to three digits: an estimate is not more exact than that."""
    return int(float(f"{number:.3g}"))
