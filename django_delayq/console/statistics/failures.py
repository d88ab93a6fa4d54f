"""Groups of dead messages: by topic, and by topic and kind of error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import QuerySet

from ...core.states import State
from ...models import Message
from ...record import transitions
from ..search import texts
from ..statements import statement_timeout

# The newest dead messages are read, up to this number.
DEAD_CAP = 10_000
# The statement timeout for reading them.
PAGE_TIMEOUT_MS = 500

# The times back from now that are counted and can be chosen, in the words of the search.
PERIODS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """The dead messages that are wanted: of one queue, or "" for all; of one of the ``PERIODS``, or "" for any time."""

    queue: str = ""
    period: str = ""

    @property
    def search(self) -> str:
        """The terms of the search that find these messages."""
        terms = [f"state:{State.DEAD}"]
        if self.queue:
            terms.append(texts.term_text("queue", self.queue))
        if self.period:
            terms.append(f"finished:<{self.period}")
        return " ".join(terms)


# Topic, kind of error, time of death, id, queue.
DeadRow = tuple[str, str, datetime, int, str]


@dataclass(slots=True)
class DeadGroup:
    """Dead messages that have something in common. ``error`` is None for those of a whole topic."""

    topic: str
    error: str | None
    last: datetime
    first: datetime
    # The id of the message that died last.
    sample: int
    # What the reader chose, which holds for every number here.
    chosen: DeadFilter
    count: int = 0
    # How many of them died within each of the periods.
    recent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PERIODS, 0))

    @property
    def search(self) -> str:
        """The search that finds exactly these messages."""
        text = f"{self.chosen.search} {texts.term_text('topic', self.topic)}"
        return text if self.error is None else f"{text} {texts.exact_error_text(self.error)}"

    @property
    def burst(self) -> tuple[list[int], int, datetime]:
        """The order of groups: most deaths in the last hour, then in the last day, the last week, and at any time."""
        return [*self.recent.values()], self.count, self.last


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """All groups, the newest burst first. ``capped`` is True when older dead messages were left out."""

    topics: list[DeadGroup]
    errors: list[DeadGroup]
    # The queues of these messages.
    queues: list[str]
    count: int
    capped: bool


def group_dead(rows: QuerySet[Message], chosen: DeadFilter) -> DeadGroups:
    """Group the newest dead messages among ``rows`` that the reader chose. Raises ``TooSlow``."""
    dead = rows.filter(state=State.DEAD, finished_at__isnull=False).order_by("-finished_at", "-id")
    if chosen.queue:
        dead = dead.filter(queue=chosen.queue)
    with statement_timeout(rows.db, PAGE_TIMEOUT_MS):
        now = transitions.now(rows.db)
        if chosen.period:
            dead = dead.filter(finished_at__gt=now - PERIODS[chosen.period])
        newest = list(dead.values_list("topic", "error", "finished_at", "pk", "queue")[: DEAD_CAP + 1])
    found: list[DeadRow] = [
        (topic, error, at, pk, queue) for topic, error, at, pk, queue in newest[:DEAD_CAP] if at is not None
    ]
    return DeadGroups(
        _groups(found, now, chosen, whole=True),
        _groups(found, now, chosen, whole=False),
        sorted({row[-1] for row in found}),
        len(found),
        len(newest) > DEAD_CAP,
    )


def _groups(rows: Iterable[DeadRow], now: datetime, chosen: DeadFilter, *, whole: bool) -> list[DeadGroup]:
    """Return the groups of rows with the same error, or of ``whole`` topics."""
    groups: dict[tuple[str, str | None], DeadGroup] = {}
    for topic, error, at, pk, _queue in rows:
        kind = None if whole else error
        # The newest come first.
        group = groups.setdefault((topic, kind), DeadGroup(topic, kind, at, at, pk, chosen))
        age = now - at
        group.count += 1
        group.first = at
        for period, length in PERIODS.items():
            group.recent[period] += age <= length
    return sorted(groups.values(), key=lambda group: group.burst, reverse=True)
