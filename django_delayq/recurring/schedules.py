"""Writes schedules, and advances them: their occurrences are made, each with its message in one transaction.

The lock on the row of a schedule makes those that advance it take turns, and the unique row of an occurrence decides:
however many processes do this at once, no time has two messages. All times are read from the record's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack

from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import Exists, OuterRef, Q

from ..api.actions import CANCEL
from ..api.pausing import end_of
from ..api.scheduling import schedule_message, schedule_messages
from ..core import names
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage, KeyConflict
from ..core.states import State
from ..core.values import flag, same_json
from ..models import Message, Transition
from ..models.messages import not_expired
from ..models.workers import seen_lately
from ..project import registry, validation
from ..project.message_options import OnConflict
from ..record import reads
from ..record.sql.moves import locked, writing
from ..record.sql.sessions import own_transaction
from . import definition as definitions
from .definition import Definition, Missed, ScheduleOptions
from .models import Declarations, Occurrence, Schedule
from .schedule_tuning import tuning

logger = logging.getLogger("django_delayq")


# An occurrence waits until its first delivery.
WAITS = Q(state=State.SCHEDULED, deliveries=0)


# --- the API ----------------------------------------------------------------------------------------------------------


@names.with_hints(definitions.MEANT, options=ScheduleOptions)
def create_schedule(
    name: str,
    topic: str,
    payload: Any = None,
    *,
    cron: str | None = None,
    paused: bool = False,
    on_conflict: OnConflict | str = OnConflict.ERROR,
    using: str | None = None,
    **options: Unpack[ScheduleOptions],
) -> Schedule:
    """Create a schedule with its first message, in the caller's transaction, and return it.

    The arguments are those of ``recurring`` and of ``schedule_message``. ``on_conflict`` chooses what becomes of a
    schedule that has this name already: "error", "keep" (it stays as it is) or "replace" (it gets the new definition,
    and its waiting message is cancelled and made anew). ``paused`` pauses a new or a replaced schedule; without it a
    paused one that is replaced stays paused.

    Raises ``InvalidMessage`` (nothing is written), ``PayloadTooLarge``, and ``KeyConflict`` when the name is taken, or
    belongs to a schedule that the code declares.
    """
    name, paused = definitions.name(name), validation.checked("paused", flag, paused)
    if on_conflict not in (OnConflict.ERROR, OnConflict.KEEP, OnConflict.REPLACE):
        raise InvalidMessage("on_conflict is one of error, keep, replace")
    definition = definitions.checked(topic, payload, cron=cron, **options)
    return save(_using(using), name, definition, OnConflict(on_conflict), paused=paused)


def delete_schedule(name: str, *, using: str | None = None) -> bool:
    """Delete a schedule and cancel its waiting messages. Return whether there was one.

    A message whose delivery has begun goes on. Raises ``KeyConflict`` for a schedule that the code declares, and
    ``InvalidMessage`` for what cannot be a name.
    """
    using = _using(using)
    with writing(using):
        schedule = _locked(using, definitions.name(name))
        if schedule is None:
            return False
        if schedule.declared:
            raise KeyConflict(f"the code declares schedule {name!r}: remove its @recurring, or pause it")
        _delete(using, schedule, "was deleted")
    return True


def pause_schedule(
    name: str, *, until: datetime | None = None, duration: Duration | None = None, using: str | None = None
) -> bool:
    """Pause a schedule and cancel its waiting messages. Return whether that changed anything.

    ``until`` (an aware datetime) or ``duration`` ends the pause by itself; without either it lasts until
    ``resume_schedule``. A schedule that is paused already gets the new end. A message whose delivery has begun goes on.
    Raises ``Schedule.DoesNotExist``, and ``InvalidMessage`` for what cannot be a name or an end.
    """
    using = _using(using)
    with writing(using):
        return _pause(using, _existing(using, name), end_of(reads.now(using), until, duration, "pause"))


def resume_schedule(name: str, *, using: str | None = None) -> bool:
    """Resume a paused schedule with its next time; times during the pause do not count as missed.

    Return whether it was paused. Raises ``Schedule.DoesNotExist``, and ``InvalidMessage`` for what cannot be a name.
    """
    using = _using(using)
    with writing(using):
        schedule, now = _existing(using, name), reads.now(using)
        was_paused = schedule.is_paused(now)
        if schedule.paused:
            _end_pause(schedule, now)
            make_due(using, [schedule], now)
    return was_paused


def run_schedule(name: str, *, using: str | None = None) -> Message:
    """Make a message of a schedule that is due now, beside its occurrences. A paused schedule can be run, too.

    Raises ``Schedule.DoesNotExist``, and ``InvalidMessage`` for what cannot be a name.
    """
    using = _using(using)
    schedule = _given(using, name, Schedule.objects.using(using).filter(pk=definitions.name(name)).first())
    return schedule_message(**content(schedule), headers={"schedule": name}, using=using)


def skip_next(name: str, *, using: str | None = None) -> Message:
    """Cancel the message of a schedule's next time, and return it. The time has its occurrence, and is not made again.

    Raises ``InvalidMessage`` when no message waits for a time to come, and ``Schedule.DoesNotExist``.
    """
    using = _using(using)
    with writing(using):
        schedule = _existing(using, name)
        ahead = Occurrence.objects.using(using).filter(schedule=schedule.pk, at__gt=reads.now(using))
        waiting = Message.objects.using(using).filter(WAITS, pk__in=ahead.values("message_id")).order_by("due_at")
        message = locked(using, waiting, wait=True).first()
        if message is None:
            raise InvalidMessage("no next run waits: it is paused, has ended, or its next run is skipped already")
        CANCEL.apply(using, [message.pk], reason=f"schedule {schedule.pk} skips this run")
    return message


# --- what a worker does -----------------------------------------------------------------------------------------------


def due(
    using: str, limit: int, now: datetime | None = None, *, since: timedelta = timedelta(0), free: bool = False
) -> list[str]:
    """Return the names of schedules whose next occurrence was due ``since`` ago or earlier, the most urgent first.

    ``free`` passes over those that another transaction has locked.
    """
    now = now or reads.now(using)
    rows = Schedule.objects.using(using).filter(behind(now, now - since))
    with own_transaction(using) if free else nullcontext():
        found = locked(using, rows, wait=False) if free else rows
        return list(found.order_by("last_at").values_list("pk", flat=True)[:limit])


def behind(now: datetime, until: datetime) -> Q:
    """Return the condition that the next occurrence of a schedule was to be made at ``until`` or earlier."""
    waits = Message.objects.filter(WAITS, not_expired(now), pk=OuterRef("message_id"))
    # While an occurrence waits, no other one is made for a schedule that runs once for all that were missed.
    return Q(_to_advance(until), ended=False) & ~Q(Exists(waits), missed=Missed.ONCE)


def until_next(using: str) -> float | None:
    """Return the seconds until the next schedule has to be advanced; None: no time is to come."""
    now = reads.now(using)
    rows = Schedule.objects.using(using).filter(ended=False)
    ways = {"last_at": rows.filter(paused=False), "resumes_at": rows.filter(paused=True)}
    # Each query is one look-up in an index.
    firsts = [
        some.filter(**{f"{at}__gt": now}).order_by(at).values_list(at, flat=True).first() for at, some in ways.items()
    ]
    return min(((first - now).total_seconds() for first in firsts if first is not None), default=None)


def late_for(using: str) -> float | None:
    """Return for how many seconds the least late schedule has been late; None: no schedule is late."""
    now = reads.now(using)
    rows = Schedule.objects.using(using).filter(paused=False, ended=False, last_at__lte=now).order_by("-last_at")
    latest = rows.values_list("last_at", flat=True).first()
    return None if latest is None else (now - latest).total_seconds()


def advance(using: str, *names: str) -> None:
    """Make the occurrences of these schedules that are to be made now, all or none.

    Passes over a schedule that another process advances.
    """
    with writing(using):
        now = reads.now(using)
        rows = Schedule.objects.using(using).filter(_to_advance(now), pk__in=names, ended=False).order_by("pk")
        found = list(locked(using, rows, wait=False))
        for schedule in found:
            if schedule.resumes_at is not None:
                _end_pause(schedule, now)
        make_due(using, found, now)


def declare(using: str, name: str, definition: Definition) -> Schedule:
    """Give a declared schedule the definition that the code has. Raises ``KeyConflict`` for the name of another one."""
    return save(using, name, definition, OnConflict.REPLACE, declared=True)


def retire(using: str, names: Collection[str]) -> list[str]:
    """Delete those of these declared schedules that no live worker declares, and cancel their waiting messages."""
    gone = []
    for name in sorted(names):
        with writing(using):
            schedule = _locked(using, name)
            # Read once more: a worker that declares it may have started since.
            live = Declarations.objects.using(using).filter(seen_lately(reads.now(using), tuning.forgotten_after))
            if schedule is not None and schedule.declared and not any(name in row.names for row in live):
                _delete(using, schedule, "is declared by no worker any more")
                gone.append(name)
    return gone


def prune(using: str) -> None:
    """Delete the occurrences whose messages were deleted. One that began before its time stays until that time.

    An occurrence that is later than a waiting one stays, too: a change of the topic makes all times anew from the
    waiting one on.

    Forget ends of pauses, too, that an older version of this code has left when it resumed a schedule.
    """
    there = Message.objects.filter(pk=OuterRef("message_id"))
    waiting = Occurrence.objects.filter(Exists(there.filter(WAITS)))
    before = waiting.filter(schedule=OuterRef("schedule"), at__lt=OuterRef("at"))
    with writing(using):
        Schedule._base_manager.using(using).filter(paused=False, resumes_at__isnull=False).update(resumes_at=None)
        past = Occurrence.objects.using(using).filter(at__lte=reads.now(using))
        past.filter(~Exists(there), ~Exists(before)).delete()


def silent(using: str, now: datetime) -> list[str]:
    """Return the names of schedules whose next time counts as decided, although no message was made for it.

    Looks at the thousand schedules that are decided the farthest into the future.
    """
    is_decided = Q(ended=False, last_at__gt=now) | Q(Q(ended=True), ~Q(ends_at__lte=now))
    rows = Schedule.objects.using(using).filter(is_decided, paused=False).order_by("-last_at")
    decided = {}
    for schedule in rows[: tuning.looked_at]:
        # Workers log what is wrong with a definition.
        with suppress(InvalidMessage, ImproperlyConfigured, OverflowError):
            at = schedule.definition.times.after(now)
            if at is not None and (schedule.ended or at <= schedule.last_at):
                decided[schedule.pk] = at
    made = set(Occurrence.objects.using(using).filter(at__gt=now, schedule__in=decided).values_list("schedule", "at"))
    return [name for name, at in decided.items() if (name, at) not in made]


# --- the rows ---------------------------------------------------------------------------------------------------------


def save(
    using: str,
    name: str,
    definition: Definition,
    on_conflict: OnConflict,
    *,
    declared: bool = False,
    paused: bool = False,
) -> Schedule:
    """Create a schedule, or change the one that has this name as ``on_conflict`` says."""
    for _round in range(tuning.rounds):
        with writing(using):
            schedule = _locked(using, name)
            if schedule is not None:
                changed = _change(using, schedule, definition, on_conflict, declared=declared)
                if paused and on_conflict == OnConflict.REPLACE:
                    _pause(using, changed, None)
                return changed
            created = _insert(using, name, definition, declared=declared, paused=paused)
            if created is not None:
                return created
    raise KeyConflict(f"the schedule {name!r} comes and goes too quickly")


def _pause(using: str, schedule: Schedule, until: datetime | None) -> bool:
    """Pause a schedule whose row is locked. Return whether that changed anything."""
    now = reads.now(using)
    if schedule.is_paused(now) and schedule.resumes_at == until:
        return False
    _withdraw(using, schedule, "was paused", now)
    update(schedule, paused=True, resumes_at=until)
    return True


def _end_pause(schedule: Schedule, now: datetime) -> None:
    """Let a schedule go on. Times up to now, or before the end of a pause that is over, do not count as missed."""
    if schedule.paused:
        since = now if schedule.resumes_at is None else min(now, schedule.resumes_at - timedelta.resolution)
        update(schedule, paused=False, ended=False, message_id=None, last_at=since)
    # An older version of this code resumes a schedule and leaves the end: it is not that of a later pause.
    update(schedule, resumes_at=None)


def _to_advance(now: datetime) -> Q:
    return Q(paused=False, last_at__lte=now) | Q(paused=True, resumes_at__lte=now)


def _insert(using: str, name: str, definition: Definition, *, declared: bool, paused: bool) -> Schedule | None:
    """Write a new schedule with its first occurrence; return None when another transaction has just written it."""
    now = reads.now(using)
    schedule = Schedule(name=name, **_fields(definition), declared=declared, paused=paused, created_at=now, last_at=now)
    rows = Schedule._base_manager.using(using)
    # A transaction that cannot see the other's row is told that it has to be repeated.
    rows.bulk_create([schedule], ignore_conflicts=True)
    if not rows.filter(pk=name, created_at=now).exists():
        return None
    if not paused:
        make_due(using, [schedule], now)
    return schedule


def _change(
    using: str, schedule: Schedule, definition: Definition, on_conflict: OnConflict, *, declared: bool
) -> Schedule:
    """Give a schedule that exists already a new definition, if ``on_conflict`` allows it; its row is locked.

    Raises ``KeyConflict`` otherwise. A definition that says the same changes nothing.
    """
    if on_conflict == OnConflict.KEEP:
        return schedule
    if schedule.declared != declared:
        whose = "the code declares it" if schedule.declared else "it was made at run time"
        raise KeyConflict(f"there is another schedule {schedule.pk!r}: {whose}")
    if on_conflict == OnConflict.ERROR:
        raise KeyConflict(f"there is a schedule {schedule.pk!r} already")
    definition = definition.after(schedule.definition)
    if schedule.definition != definition:
        _redefine(using, schedule, definition, reads.now(using))
    return schedule


def _redefine(using: str, schedule: Schedule, definition: Definition, now: datetime) -> None:
    """Write a new definition, cancel the occurrences that it does not have, and make those that are due by it."""
    if schedule.ended:
        # An ended schedule had no times since then: none was missed.
        update(schedule, last_at=now)
    # An occurrence whose time has come keeps the definition that it was made with. With another topic it does not:
    # the former topic may have no handler any more.
    has_same_topic = schedule.topic == definition.topic
    _withdraw(using, schedule, "was changed", now, after=now if has_same_topic else None)
    if not has_same_topic or not same_json(schedule.payload, definition.payload):
        update(schedule, limit_key=None)
    # The former definition decided that no time is left, and which times were made.
    update(schedule, ended=False, last_at=min(schedule.last_at, now), **_fields(definition))
    if not schedule.paused:
        make_due(using, [schedule], now)


def _delete(using: str, schedule: Schedule, why: str) -> None:
    _withdraw(using, schedule, why, reads.now(using))
    Schedule._base_manager.using(using).filter(pk=schedule.pk).delete()


def _withdraw(using: str, schedule: Schedule, why: str, now: datetime, *, after: datetime | None = None) -> None:
    """Cancel the occurrences that wait, of those after a time, and forget them, so that their times come again.

    One whose delivery has begun, however early, stays.
    """
    rows = Occurrence.objects.using(using).filter(schedule=schedule.pk)
    if after is not None:
        rows = rows.filter(at__gt=after)
    # The rows are locked, so that no delivery can begin before they are cancelled.
    waiting = Message.objects.using(using).filter(WAITS, pk__in=rows.values("message_id")).order_by("pk")
    ids = [message.pk for message in locked(using, waiting, wait=True)]
    if ids:
        CANCEL.apply(using, ids, reason=f"schedule {schedule.pk} {why}")
        gone = rows.filter(message_id__in=ids).order_by("at")
        before = gone[0].at - timedelta(microseconds=1)
        gone.delete()
        update(schedule, last_at=min(schedule.last_at, now, before), message_id=None)


def _locked(using: str, name: str) -> Schedule | None:
    return locked(using, Schedule.objects.using(using).filter(pk=name), wait=True).first()


def _existing(using: str, name: str) -> Schedule:
    return _given(using, name, _locked(using, definitions.name(name)))


def _given(using: str, name: str, schedule: Schedule | None) -> Schedule:
    if schedule is None:
        like = names.near(name, Schedule.objects.using(using).values_list("pk", flat=True))
        raise Schedule.DoesNotExist(f"there is no schedule {name!r}{f'; did you mean {like!r}?' if like else ''}")
    return schedule


def _fields(definition: Definition) -> dict[str, Any]:
    return {field: getattr(definition, field) for field in Definition.__dataclass_fields__}


def _using(using: str | None) -> str:
    # The messages and their schedules are written in one transaction, so they share a database.
    return using or router.db_for_write(Message)


# --- occurrences of schedules whose rows are locked, each with its message in one transaction -------------------------


def make_due(using: str, locked_rows: Iterable[Schedule], now: datetime) -> None:
    """Make the occurrences that are to be made now: what was missed, and the next one."""
    late = [schedule for schedule in locked_rows if schedule.last_at <= now]
    times: dict[Schedule, list[datetime]] = {}
    for schedule, begin in _begins(using, late, now):
        if schedule.missed == Missed.SKIP:
            times[schedule] = _last_and_next(schedule.definition, begin, now)
        else:
            limit = 1 if schedule.missed == Missed.ONCE else max(1, tuning.made_together // len(late))
            times[schedule] = list(_to_make(schedule.definition, begin, now, limit))
    for schedule in [schedule for schedule, some in times.items() if not some]:
        del times[schedule]
        update(schedule, ended=True)
        logger.info("Schedule %s has no further time", schedule.pk)
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
            # A message that could not start in time any more is not made.
            begin = max(begin, now - time_to_start)
        yield schedule, begin


def _to_make(definition: Definition, begin: datetime, now: datetime, limit: int | None = None) -> Iterator[datetime]:
    """Yield the times after ``begin`` up to the first that is still to come, ``limit`` at most."""
    for place, at in enumerate(definition.times.following(begin), start=1):
        yield at
        if at > now or place == limit:
            return


def _last_and_next(definition: Definition, begin: datetime, now: datetime) -> list[datetime]:
    """Return the last time after ``begin`` up to now, and the first that is still to come, as far as there are any.

    It looks back step by step: there may be millions of times before the last one.
    """
    back = tuning.late
    while True:
        since = max(begin, now - back)
        some = list(_to_make(definition, since, now))
        if since == begin or any(at <= now for at in some):
            return [at for at in some if at <= now][-1:] + [at for at in some if at > now]
        back *= 10


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
            "headers": {"schedule": schedule.pk, "occurrence": at.astimezone(UTC).isoformat().replace("+00:00", "Z")},
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
        # For processes that do not know the handler, which has found the limit key.
        if message.limit_key != schedule.limit_key and registry.find(schedule.topic) is not None:
            update(schedule, limit_key=message.limit_key)
    return there


def _due(definition: Definition, at: datetime, now: datetime) -> dict[str, Any]:
    """Return the arguments that make a message due at this time, or now if that is past."""
    late = max(timedelta(0), now - at)
    options: dict[str, Any] = {"due_at": at}
    if late or at < datetime.now(UTC) - tuning.clock_margin:
        options = {"delay": max(timedelta(0), at - now)}
    if definition.time_to_start is not None:
        options["expires"] = max(timedelta.resolution, definition.time_to_start - late)
    return options


def content(schedule: Schedule) -> dict[str, Any]:
    """Return the arguments that the messages of a schedule have in common."""
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

    Those that wait are missing. A message that expires has ended at its time of expiry, and not when the reaper finds
    it.
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
    # The first move comes last, and replaces the others.
    left.update(moves.order_by("-number").values_list("message_id", "at"))
    return left


def _write(using: str, advanced: Iterable[Schedule]) -> None:
    """Write how far these schedules have come. Their rows are locked."""
    Schedule._base_manager.using(using).bulk_update(
        advanced, ["last_at", "message_id"], batch_size=tuning.written_together
    )


def update(schedule: Schedule, **values: Any) -> None:
    """Update a row that is locked, and the object with it."""
    Schedule._base_manager.using(schedule._state.db).filter(pk=schedule.pk).update(**values)
    for field, value in values.items():
        setattr(schedule, field, value)
