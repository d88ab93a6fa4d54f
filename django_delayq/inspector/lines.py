"""Reads limits: what runs under them, and the lines of messages that wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..core.limits import Limit, queue_name, topic_name
from ..models.record import Place
from ..project import conf, registry
from ..record import admission
from ..record.sql import limit_statements
from ..record.sql.limited import Count
from .numbers import NONE, Capped
from .waiting import WaitingLine, count_lines

# Limited messages that are counted along the lines, before numbers become lower bounds.
LINES_CAP = 10_000
# Places that are looked at for limits under which messages run.
PLACES_READ = 10_000


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit at a moment."""

    name: str
    # As the code of this process declares it. None: the code has it no more, or not yet.
    limit: Limit | None
    # False when this process has no handler of the limit's topic, and so cannot tell its limit.
    is_known: bool = True
    waiting: Capped = NONE
    # The earliest due time of the messages that wait.
    oldest: datetime | None = None
    running: int = 0
    # Places that are kept for messages that workers are about to take.
    kept: int = 0
    # When one more message may begin by the rate. None: at once.
    slot: datetime | None = None

    @property
    def is_full(self) -> bool:
        """True when all places are taken."""
        return self.limit is not None and self.limit.count is not None and self.running + self.kept >= self.limit.count


@dataclass(frozen=True, slots=True)
class Lines:
    """The longest lines, and the number of all."""

    number: Capped = NONE
    longest: tuple[LimitState, ...] = ()


def parts(name: str) -> tuple[str, str, str | None]:
    """Return what a limit counts, from its name: "topic" or "queue", its name, and the limit key or None."""
    kind, what, *rest = name.split(" ", 3)
    return kind, what, rest[1] if kind == "topic" and len(rest) == 2 else None


def longest_lines(using: str, most: int) -> Lines:
    """Return the longest lines, the longest first."""
    found = count_lines(using, LINES_CAP)
    first = sorted(found, key=lambda line: (-line.number, line.oldest, line.name))[:most]
    states = read_limits(using, [line.name for line in first], first)
    more = any(line.more for line in found) or sum(line.number for line in found) > LINES_CAP
    return Lines(Capped(len(found), more), tuple(states))


def all_limits(using: str, most: int) -> Lines:
    """Return the longest lines, and after them limits that are declared or under which messages run."""
    lines = longest_lines(using, most)
    names = {line.name for line in lines.longest}
    # Limits without a line. Those of single keys are known only while messages run under them.
    others = {queue_name(queue) for queue in conf.get().LIMITS or {}}
    others |= {topic_name(h.topic, None) for h in registry.handlers().values() if h.limit and not h.limit_key}
    others |= set(Place.objects.using(using).order_by("name").values_list("name", flat=True)[:PLACES_READ])
    rest = read_limits(using, sorted(others - names)[: max(0, most - len(names))])
    return Lines(lines.number, (*lines.longest, *rest))


def read_limits(using: str, names: Collection[str], lines: Iterable[WaitingLine] = ()) -> list[LimitState]:
    """Return these limits as they are now, in this order, with the ``lines`` that were counted already."""
    if not names:
        return []
    counts = limit_statements(using).counts(names)
    counted = {line.name: line for line in lines}
    return [_state(name, counts[name], counted.get(name)) for name in names]


def _state(name: str, count: Count, line: WaitingLine | None) -> LimitState:
    try:
        limit, is_known = admission.declared(name), True
    except KeyError:
        limit, is_known = None, False
    return LimitState(
        name,
        limit,
        is_known,
        NONE if line is None else Capped(line.number, line.more),
        None if line is None else line.oldest,
        count.running,
        count.kept,
        _slot(limit, count),
    )


def _slot(limit: Limit | None, count: Count) -> datetime | None:
    """Return when one more message may begin by the rate, after those for which places are kept."""
    if limit is None or limit.interval is None or count.full_at is None:
        return None
    slot = max(count.full_at, count.now) + limit.interval * count.kept - limit.tolerance
    return slot if slot > count.now else None


def limit_facts(limit: Limit | None) -> dict[str, Any] | None:
    """Return a limit for ``--json``; ``interval`` is in seconds."""
    if limit is None:
        return None
    if limit.interval is None:
        return {"count": limit.count, "interval": None, "burst": None}
    return {"count": limit.count, "interval": limit.interval.total_seconds(), "burst": limit.burst}


def waits_since(oldest: datetime, now: datetime) -> timedelta:
    """Return how long a message has waited that was due at a time; zero for two clocks that differ."""
    return max(timedelta(0), now - oldest)
