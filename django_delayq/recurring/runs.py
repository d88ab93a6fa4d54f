"""The last runs of a schedule: what became of the messages of its occurrences, and how long their handlers took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice, takewhile

from django.core.exceptions import ImproperlyConfigured
from django.db.models import OuterRef, Q, Subquery

from ..core.exceptions import InvalidMessage
from ..core.states import State
from ..models import Message, Transition
from .models import Occurrence, Schedule
from .schedule_tuning import tuning


@dataclass(frozen=True, slots=True)
class PastRun:
    """An occurrence whose time has come, or whose delivery has begun before that.

    ``began_at`` is the start of the last delivery, None before the first; ``took`` its duration, None while it goes on.
    ``without`` counts the times between this run and the next one that have no message, ``times_counted`` at most.
    """

    at: datetime
    message: Message
    began_at: datetime | None
    took: timedelta | None
    without: int


def last_runs(using: str, schedule: Schedule, now: datetime) -> list[PastRun]:
    """Return the last runs of a schedule whose messages are still there, the latest first."""
    rows = Occurrence.objects.using(using).filter(schedule=schedule.pk)
    some = list(rows.order_by("-at").values_list("at", "message_id")[: tuning.runs_shown + 1])
    ids = [message_id for _at, message_id in some]
    messages = Message.objects.using(using).defer("payload", "headers", "result").in_bulk(ids)
    there = [(at, messages[pk]) for at, pk in some if pk in messages]
    there = [(at, message) for at, message in there if at <= now or message.deliveries][: tuning.runs_shown]
    deliveries = _last_deliveries(using, [message for _at, message in there])
    ends = [now, *(at for at, _message in there)]
    found = []
    for (at, message), end in zip(there, ends, strict=False):
        began_at, took = deliveries.get(message.pk, (None, None))
        found.append(PastRun(at, message, began_at, took, _between(schedule, at, end)))
    return found


def of_each(using: str, found: list[Schedule], now: datetime) -> dict[str, tuple[list[Message], timedelta | None]]:
    """Return the messages of the last runs of each of these schedules, the latest first, and how long the latest took.

    The lists lack messages that are purged.
    """
    past = Occurrence.objects.filter(schedule=OuterRef("pk"), at__lte=now).order_by("-at")
    # Each query is a look-up in an index: a window function would read all occurrences.
    last = [Subquery(past.values("message_id")[place : place + 1]) for place in range(tuning.runs_shown)]
    rows = Schedule.objects.using(using).filter(pk__in=[schedule.pk for schedule in found])
    ids = {name: some for name, *some in rows.values_list("pk", *last)}
    messages = (
        Message.objects.using(using).defer("payload", "headers", "result").in_bulk({*chain(*ids.values())} - {None})
    )
    there = {name: [messages[pk] for pk in some if pk in messages] for name, some in ids.items()}
    deliveries = _last_deliveries(using, [some[0] for some in there.values() if some])
    return {name: (some, deliveries.get(some[0].pk, (None, None))[1]) for name, some in there.items() if some}


def took(message: Message) -> float | None:
    """Return for how many seconds the handler of a message ran, if it succeeded at once; None: only the log knows."""
    ends = (message.claimed_at, message.finished_at)
    return None if None in ends else (ends[1] - ends[0]).total_seconds()  # type: ignore[operator]


def _last_deliveries(using: str, messages: list[Message]) -> dict[int, tuple[datetime, timedelta | None]]:
    """Return when the last delivery of each message began, and its duration, if it has ended."""
    ends = Q()
    for message in messages:
        ends |= Q(message_id=message.pk, number__gt=message.moves - tuning.moves_looked_at)
    # The ids by themselves, too: the view of the log reads the rows of these messages alone.
    moves = Transition.objects.using(using).filter(ends, message_id__in=[message.pk for message in messages])
    found: dict[int, tuple[datetime, timedelta | None]] = {}
    former = ""
    for pk, state, at in moves.order_by("message_id", "number").values_list("message_id", "to_state", "at"):
        if state == State.RUNNING:
            found[pk] = (at, None)
        elif former == State.RUNNING and pk in found:
            found[pk] = (found[pk][0], at - found[pk][0])
        former = state
    return found


def _between(schedule: Schedule, after: datetime, before: datetime) -> int:
    """Count the times of a schedule, by its present definition, between two moments."""
    return sum(1 for _at in islice(_times(schedule, after, before), tuning.times_counted))


def _times(schedule: Schedule, after: datetime, before: datetime) -> Iterator[datetime]:
    # The page says elsewhere what is wrong with a definition.
    with suppress(InvalidMessage, ImproperlyConfigured, OverflowError):
        yield from takewhile(lambda at: at < before, schedule.definition.times.following(after))
