"""Judges limits by the log alone: what ran at once, and how close together deliveries began."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django_delayq.core import limits
from django_delayq.core.states import State
from django_delayq.models import Message, Transition

# So much time a busy machine may take between the decision that a message may begin, and its claim.
BUSY = timedelta(seconds=0.15)

# The limits of a message, by their names.
LimitsOf = Callable[[str, str, str | None], Mapping[str, limits.Limit]]


@dataclass(frozen=True, slots=True)
class Run:
    """One delivery. It ended at ``end``; None: it still runs."""

    message_id: int
    begin: datetime
    end: datetime | None


def runs(limits_of: LimitsOf) -> dict[str, list[Run]]:
    """Return the deliveries under each limit, from the log."""
    names = {
        pk: tuple(limits_of(topic, queue, key))
        for pk, topic, queue, key in Message.objects.values_list("pk", "topic", "queue", "limit_key")
    }
    found: dict[str, list[Run]] = defaultdict(list)
    open_runs: dict[int, Transition] = {}
    for move in Transition.objects.order_by("message_id", "number"):
        begun = open_runs.get(move.message_id)
        if begun is not None and move.to_state != State.RUNNING:
            del open_runs[move.message_id]
            for name in names[move.message_id]:
                found[name].append(Run(move.message_id, begun.at, move.at))
        elif move.to_state == State.RUNNING and begun is None:
            open_runs[move.message_id] = move
    for message_id, move in open_runs.items():
        for name in names[message_id]:
            found[name].append(Run(message_id, move.at, None))
    return found


def most_at_once(these: Iterable[Run]) -> int:
    """Return how many of these deliveries ran at the same moment, at most."""
    steps = []
    for run in these:
        steps.append((run.begin, 1))
        if run.end is not None:
            steps.append((run.end, -1))
    now = most = 0
    # One that ends at the very moment at which another one begins has made room for it.
    for _at, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def excess(limit: limits.Limit, these: Iterable[Run]) -> str:
    """Return how these deliveries exceed a rate, in words; "" when they keep to it.

    In any time no more may begin than the burst, and one for each interval of it. A delivery that is a little late
    counts for its due time, so that by the times of the claims they may be closer together by as much.
    """
    assert limit.interval is not None
    full: datetime | None = None
    for number, begin in enumerate(sorted(run.begin for run in these)):
        full = begin if full is None else max(full, begin)
        early = full - begin - limit.tolerance
        if early > limits.PUNCTUAL + BUSY:
            return f"delivery {number} began {early} too early, at {begin}"
        full += limit.interval
    return ""


def faults(limits_of: LimitsOf, declared: Mapping[str, limits.Limit] | None = None) -> list[str]:
    """Return everything that contradicts the limits, in words."""
    found = []
    names = runs(limits_of)
    by_name: dict[str, limits.Limit] = dict(declared or {})
    for kind in Message.objects.values_list("topic", "queue", "limit_key").distinct():
        by_name |= limits_of(*kind)
    for name, these in names.items():
        limit = by_name[name]
        most = most_at_once(these)
        if limit.count is not None and most > limit.count:
            found.append(f"{name}: {most} ran at once, and {limit.count} may")
        if limit.interval is not None and (words := excess(limit, these)):
            found.append(f"{name}: {words}")
    return found
