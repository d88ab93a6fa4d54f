"""Reads limits: what runs under them, and the lines of messages that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from ..core.limits import Limit, queue_name, topic_name
from ..core.states import State
from ..models import Message
from ..models.messages import Place
from ..project import conf, registry
from ..record import admission, transitions
from ..record.sql import limit_statements
from ..record.sql.limited import Count
from .numbers import NONE, Capped
from .waiting import may_be_more, read_due

# Places that are looked at for limits under which messages run.
PLACES_READ = 10_000


class LimitState(NamedTuple):
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
    # When one more message may begin by the rate. None: at once.
    slot: datetime | None = None

    @property
    def is_full(self) -> bool:
        """True when all places are taken."""
        return self.limit is not None and self.limit.count is not None and self.running >= self.limit.count

    def waited(self, now: datetime) -> float:
        """Return for how many seconds the oldest message has waited; zero for two clocks that differ."""
        return 0.0 if self.oldest is None else max(0.0, (now - self.oldest).total_seconds())


class Lines(NamedTuple):
    """The longest lines, those whose messages wait longest, and the number of all."""

    number: Capped = NONE
    longest: tuple[LimitState, ...] = ()
    oldest: tuple[LimitState, ...] = ()


def longest_lines(using: str, most: int) -> Lines:
    """Return the longest lines, the longest first, and as many of those with the oldest messages, the oldest first."""
    closed = admission.full_lately(using)
    if not closed:
        return Lines()
    now = transitions.now(using)
    numbers: Counter[str] = Counter()
    oldest: dict[str, datetime] = {}
    all_due = [*read_due(using, closed, now=now, overdue_since=now)]
    for due in all_due:
        if due.limit is not None:
            numbers[due.limit] += due.number
            oldest[due.limit] = min(due.oldest, oldest.get(due.limit, due.oldest))
    more = may_be_more(all_due)
    longest = sorted(numbers, key=lambda name: (-numbers[name], oldest[name], name))[:most]
    first = sorted(oldest, key=lambda name: (oldest[name], name))[:most]
    states = {
        state.name: state._replace(waiting=Capped(numbers[state.name], more), oldest=oldest[state.name])
        for state in read_limits(using, {*longest, *first})
    }
    return Lines(Capped(len(numbers), more), *(tuple(states[name] for name in names) for names in (longest, first)))


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


def waits_for(using: str, messages: Iterable[Message], now: datetime) -> dict[int, str]:
    """Return the names of the limits for which those of the messages wait that are due, by their ids."""
    due = [message for message in messages if message.state == State.SCHEDULED and message.due_at <= now]
    closed = admission.full_lately(using) if due else set()
    found = {each.pk: admission.refusing(closed, each.topic, each.queue, each.limit_key) for each in due}
    return {pk: name for pk, name in found.items() if name is not None}


def read_limits(using: str, names: Collection[str]) -> list[LimitState]:
    """Return these limits as they are now, in this order, without the messages that wait for them."""
    if not names:
        return []
    counts = limit_statements(using).counts(names)
    return [_state(name, counts[name]) for name in names]


def _state(name: str, count: Count) -> LimitState:
    try:
        limit, is_known = admission.declared(name), True
    except KeyError:
        limit, is_known = None, False
    return LimitState(name, limit, is_known, running=count.running, slot=_slot(limit, count))


def _slot(limit: Limit | None, count: Count) -> datetime | None:
    """Return when one more message may begin by the rate; None: at once."""
    if limit is None or limit.interval is None or count.full_at is None:
        return None
    slot = count.full_at - limit.tolerance
    return slot if slot > count.now else None


def limit_facts(limit: Limit | None) -> dict[str, Any] | None:
    """Return a limit for ``--json``; ``interval`` is in seconds."""
    if limit is None:
        return None
    if limit.interval is None:
        return {"count": limit.count, "interval": None, "burst": None}
    return {"count": limit.count, "interval": limit.interval.total_seconds(), "burst": limit.burst}
