"""Groups of dead messages: by topic, and by topic and kind of error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import QuerySet

from ... import transitions
from ...models import Message
from ...states import State
from ..search import language
from ..search.listing import PAGE_TIMEOUT_MS
from ..statements import statement_timeout

# The newest dead messages are read, up to this number.
DEAD_CAP = 10_000

HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(days=7)

# Topic, kind of error, time of death, id.
DeadRow = tuple[str, str, datetime, int]


@dataclass(slots=True)
class DeadGroup:
    """Dead messages that have something in common. ``error`` is None for those of a whole topic."""

    topic: str
    error: str | None
    last: datetime
    first: datetime
    # The id of the message that died last.
    sample: int
    count: int = 0
    hour: int = 0
    day: int = 0
    week: int = 0

    @property
    def search(self) -> str:
        """The search that finds exactly these messages."""
        text = f"state:{State.DEAD} {language.term_text('topic', self.topic)}"
        return text if self.error is None else f"{text} {language.exact_error_text(self.error)}"


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """All groups, the largest first. ``capped`` is True when older dead messages were left out."""

    topics: list[DeadGroup]
    errors: list[DeadGroup]
    count: int
    capped: bool


def group_dead(rows: QuerySet[Message]) -> DeadGroups:
    """Group the newest dead messages among ``rows``. Raises ``TooSlow``."""
    dead = rows.filter(state=State.DEAD, finished_at__isnull=False).order_by("-finished_at", "-id")
    with statement_timeout(rows.db, PAGE_TIMEOUT_MS):
        newest = list(dead.values_list("topic", "error", "finished_at", "pk")[: DEAD_CAP + 1])
        now = transitions.now(rows.db)
    capped = len(newest) > DEAD_CAP
    found: list[DeadRow] = [(topic, error, at, pk) for topic, error, at, pk in newest[:DEAD_CAP] if at is not None]
    return DeadGroups(
        _groups(found, now, lambda row: row[0], whole=True),
        _groups(found, now, lambda row: row[:2], whole=False),
        len(found),
        capped,
    )


def _groups(
    rows: Iterable[DeadRow], now: datetime, key: Callable[[DeadRow], Hashable], *, whole: bool
) -> list[DeadGroup]:
    groups: dict[Hashable, DeadGroup] = {}
    for row in rows:
        topic, error, at, pk = row
        # The newest come first.
        group = groups.setdefault(key(row), DeadGroup(topic, None if whole else error, at, at, pk))
        age = now - at
        group.count += 1
        group.first = at
        group.hour += age <= HOUR
        group.day += age <= DAY
        group.week += age <= WEEK
    return sorted(groups.values(), key=lambda group: (-group.count, group.topic, group.error or ""))
