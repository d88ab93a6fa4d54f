"""Makes the occurrences of schedules whose rows the caller has locked, each with its message in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ..api.scheduling import schedule_messages
from ..core.states import State
from ..models import Message, Transition
from ..project import registry
from .definition import Definition, Missed
from .models import Occurrence, Schedule

logger = logging.getLogger("django_delayq")

# Occurrences that one transaction makes at most; a schedule gets its share of them.
MADE_TOGETHER = 1000
# Schedules in one statement that notes how far each has come. The time for a statement grows with their square.
WRITTEN_TOGETHER = 50
# Clocks of two hosts differ a little. A time that this host's clock puts further into the past is given as a delay.
CLOCK_MARGIN = timedelta(seconds=30)


def make_due(using: str, locked_rows: Iterable[Schedule], now: datetime) -> None:
    """Make the occurrences that are to be made now: what was missed, and the next one."""
    late = [schedule for schedule in locked_rows if schedule.last_at <= now]
    times: dict[Schedule, list[datetime]] = {}
    for schedule, begin in _begins(using, late, now):
        limit = 1 if schedule.missed == Missed.ONCE else max(1, MADE_TOGETHER // len(late))
        times[schedule] = list(_to_make(schedule.definition, begin, now, limit))
    _end(schedule for schedule in times if not times[schedule])
    times = {schedule: some for schedule, some in times.items() if some}
    if times:
        made = _make(using, times, now)
        for schedule, some in times.items():
            schedule.last_at = max(now, some[-1]) if schedule.missed == Missed.ONCE else some[-1]
            schedule.message_id = made[schedule.pk, some[-1]]
        _write(using, times)


def _begins(using: str, late: Sequence[Schedule], now: datetime) -> Iterator[tuple[Schedule, datetime]]:
    """Yield the schedules that get occurrences now, each with the moment after which their times are to be made."""
    stand = {
        schedule.message_id for schedule in late if schedule.missed == Missed.ONCE and schedule.message_id is not None
    }
    left = _left(using, stand, now) if stand else {}
    for schedule in late:
        begin, time_to_start = schedule.last_at, schedule.definition.time_to_start
        if schedule.message_id in stand:
            if schedule.message_id not in left:
                continue
            # The occurrence stands for all times that came while it waited.
            begin = min(now, max(begin, left[schedule.message_id]))
        if time_to_start is not None:
            # What could not start in time any more is not made.
            begin = max(begin, now - time_to_start)
        yield schedule, begin


def _to_make(definition: Definition, begin: datetime, now: datetime, limit: int) -> Iterator[datetime]:
    """Yield the times after ``begin`` up to the first that is still to come, ``limit`` at most."""
    for place, at in enumerate(definition.times.following(begin), start=1):
        yield at
        if at > now or place == limit:
            return


def _make(using: str, times: dict[Schedule, list[datetime]], now: datetime) -> dict[tuple[str, datetime], int]:
    """Schedule a message for each of these times that has none, and return the ids of the messages of all of them."""
    wanted = [(schedule, at) for schedule, some in times.items() for at in some]
    taken = Occurrence.objects.using(using).filter(
        schedule__in=[schedule.pk for schedule in times], at__in={at for _schedule, at in wanted}
    )
    there = {(name, at): message_id for name, at, message_id in taken.values_list("schedule", "at", "message_id")}
    new = [(schedule, at) for schedule, at in wanted if (schedule.pk, at) not in there]
    given: list[Any] = [
        {
            **content(schedule),
            **_due(schedule.definition, at, now),
            "headers": {"schedule": schedule.pk, "occurrence": _iso(at)},
        }
        for schedule, at in new
    ]
    messages = schedule_messages(given, using=using)
    # In one transaction with the messages: were another process to make the same time, one of the two fails.
    Occurrence.objects.using(using).bulk_create(
        Occurrence(schedule=schedule.pk, at=at, message_id=message.pk)
        for (schedule, at), message in zip(new, messages, strict=True)
    )
    for (schedule, at), message in zip(new, messages, strict=True):
        there[schedule.pk, at] = message.pk
        _note_key(schedule, message)
    return there


def _note_key(schedule: Schedule, made: Message) -> None:
    """Note the limit key that the handler found, for processes that do not know it."""
    if made.limit_key != schedule.limit_key and registry.find(schedule.topic) is not None:
        update(schedule, limit_key=made.limit_key)


def _end(schedules: Iterable[Schedule]) -> None:
    for schedule in schedules:
        update(schedule, ended=True)
        logger.info("Schedule %s has no further time", schedule.pk)


def _due(definition: Definition, at: datetime, now: datetime) -> dict[str, Any]:
    """Return the arguments that make a message due at this time, or now if that is past."""
    late = max(timedelta(0), now - at)
    options: dict[str, Any] = {"due_at": at}
    if late or at < datetime.now(UTC) - CLOCK_MARGIN:
        options = {"delay": max(timedelta(0), at - now)}
    if definition.time_to_start is not None:
        options["expires"] = max(timedelta.resolution, definition.time_to_start - late)
    return options


def content(schedule: Schedule) -> dict[str, Any]:
    content = {
        "topic": schedule.topic,
        "payload": schedule.payload,
        "queue": schedule.queue or None,
        "priority": schedule.priority,
    }
    is_known = registry.find(schedule.topic) is not None
    # The handler that belongs to a declaration may be newer than that of this process.
    if schedule.declared or not is_known:
        content["queue"] = content["queue"] or schedule.topic_queue or None
        content["priority"] = schedule.topic_priority if schedule.priority is None else schedule.priority
    if not is_known:
        content["limit_key"] = schedule.limit_key
    return content


def _left(using: str, ids: Collection[int], now: datetime) -> dict[int, datetime]:
    """Return when each of these messages began its first delivery, or ended without one.

    Those that wait are missing. One that expires has ended at that time, and not when it is swept.
    """
    # A message that is not found was purged, which only finished messages are.
    left = dict.fromkeys(ids, datetime.min.replace(tzinfo=UTC))
    rows = Message.objects.using(using).filter(pk__in=ids)
    for pk, state, deliveries, created_at, expires_at in rows.values_list(
        "pk", "state", "deliveries", "created_at", "expires_at"
    ):
        if state == State.SCHEDULED and not deliveries and (expires_at is None or expires_at > now):
            del left[pk]
        else:
            left[pk] = created_at if deliveries or expires_at is None else expires_at
    moves = Transition.objects.using(using).filter(message_id__in=left.keys())
    moves = moves.exclude(to_state__in=[State.SCHEDULED, State.EXPIRED])
    # The first move is the last to be noted.
    left.update(moves.order_by("-number").values_list("message_id", "at"))
    return left


def _write(using: str, advanced: Iterable[Schedule]) -> None:
    """Write how far these schedules have come. Their rows are locked."""
    Schedule._base_manager.using(using).bulk_update(advanced, ["last_at", "message_id"], batch_size=WRITTEN_TOGETHER)


def update(schedule: Schedule, **values: Any) -> None:
    """Update a row that is locked, and the object with it."""
    Schedule._base_manager.using(schedule._state.db).filter(pk=schedule.pk).update(**values)
    for field, value in values.items():
        setattr(schedule, field, value)


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
