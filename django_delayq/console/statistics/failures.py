"""What was given up, in groups: by topic, and by topic and kind of error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import QuerySet

from ... import transitions
from ...models import Message
from ...states import State
from ..search import language
from ..search.listing import PATIENCE
from ..statements.timeout import statement_timeout

# The newest dead messages that are looked at.
CAP = 10_000

HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(days=7)

# Topic, kind of error, time of death, id.
Row = tuple[str, str, datetime, int]


@dataclass(slots=True)
class Group:
    """Dead messages that have something in common. ``error`` is None for those of a whole topic."""

    topic: str
    error: str | None
    last: datetime
    first: datetime
    # The one that died last.
    sample: int
    count: int = 0
    hour: int = 0
    day: int = 0
    week: int = 0

    @property
    def search(self) -> str:
        """What finds exactly these."""
        text = f"state:{State.DEAD} {language.term('topic', self.topic)}"
        return text if self.error is None else f"{text} {language.exact_error(self.error)}"


@dataclass(frozen=True, slots=True)
class Dead:
    """All groups, the largest first. ``capped``: there are older ones that were not looked at."""

    topics: list[Group]
    errors: list[Group]
    count: int
    capped: bool


def dead(rows: QuerySet[Message]) -> Dead:
    """Group the newest dead messages among ``rows``. Raises ``TooSlow``."""
    lying = rows.filter(state=State.DEAD, finished_at__isnull=False).order_by("-finished_at", "-id")
    with statement_timeout(rows.db, PATIENCE):
        newest = list(lying.values_list("topic", "error", "finished_at", "pk")[: CAP + 1])
        now = transitions.now(rows.db)
    capped = len(newest) > CAP
    found: list[Row] = [(topic, error, at, pk) for topic, error, at, pk in newest[:CAP] if at is not None]
    return Dead(
        _groups(found, now, lambda row: row[0], whole=True),
        _groups(found, now, lambda row: row[:2], whole=False),
        len(found),
        capped,
    )


def _groups(rows: Iterable[Row], now: datetime, key: Callable[[Row], Hashable], *, whole: bool) -> list[Group]:
    groups: dict[Hashable, Group] = {}
    for row in rows:
        topic, error, at, pk = row
        # The newest come first.
        group = groups.setdefault(key(row), Group(topic, None if whole else error, at, at, pk))
        age = now - at
        group.count += 1
        group.first = at
        group.hour += age <= HOUR
        group.day += age <= DAY
        group.week += age <= WEEK
    return sorted(groups.values(), key=lambda group: (-group.count, group.topic, group.error or ""))
