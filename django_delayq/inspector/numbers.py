"""Numbers of rows that are counted up to a cap only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.utils.translation import gettext as _


class Caps(NamedTuple):
    """The most rows of each kind that a question to the record counts or reads, so that any table answers quickly."""

    # Waiting messages of each queue that are counted, by their kinds.
    counted: int = 10_000
    # Due messages of each queue; limits; messages that finished last.
    rows: int = 10_000
    # The messages that finished last, on which lateness is measured.
    lateness: int = 1000
    # Lines of messages before limits, of which a report or a check names some.
    lines: int = 100
    # Workers, unless more of them are alive, and the messages that they run.
    workers: int = 500
    running: int = 1000
    # In each queue the topics of the next due messages are read, of this number or more.
    topics: int = 50
    # Ids that are kept for a second comparison with Redis: 8 bytes each.
    suspects: int = 100_000
    # Messages, topics, queues or ids that one text names.
    named: int = 5

    def shared(self, queues: int) -> Caps:
        """Return the caps with fewer rows of each queue where there are many queues."""
        return self._replace(rows=max(self.topics, self.rows // max(1, queues)))


CAPS = Caps()


class Ages(NamedTuple):
    """The ages from which on something is a fault, or worth a warning. Seconds."""

    # A message that waits for a limit.
    limited: float = 3600.0
    # There is a warning up to this time after a sweep had to put messages.
    swept: float = 60.0
    # The next message of a queue that no worker serves. Workers search for new queues every 30 seconds, and write down
    # the queues that they serve every 10 seconds.
    unserved: float = 60.0
    # An id that a worker delayed past its due time, because it could not claim the message: another move locks the row.
    delayed: float = 60.0
    # A lease that ran out: a reaper ends it within seconds.
    unreaped: float = 30.0


AGES = Ages()


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
    """Make a capped number of a count that stopped one row beyond the cap."""
    return Capped(min(found, cap), found > cap)


def total(numbers: Iterable[Capped]) -> Capped:
    """Return the sum, which is as exact as the least exact of the numbers."""
    all_ = list(numbers)
    more = any(number.more for number in all_)
    return Capped(sum(number.count for number in all_), more, not more and any(number.about for number in all_))


def _rounded(number: int) -> int:
    """Round to three digits: an estimate is not more exact than that."""
    return int(float(f"{number:.3g}"))
