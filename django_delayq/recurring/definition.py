"""The definition of a schedule: its messages, its times, and the fate of occurrences that nobody could deliver."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypedDict

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core import names, values
from ..core.bounds import LENGTHS
from ..core.durations import Duration, seconds
from ..core.exceptions import InvalidMessage
from ..core.text import shown
from ..project import registry, validation
from .schedule_tuning import tuning
from .times import Times

# The role of the workers that make occurrences.
ROLE = "scheduler"
# A cron expression has at most this many characters.
CRON_LENGTH = 200
# The name of a time zone has at most this many characters.
ZONE_LENGTH = 64
# An interval has at most this many characters.
SPAN_LENGTH = 40


# What other queues call the arguments of a schedule.
MEANT = {
    **dict.fromkeys(
        ("minute", "hour", "day_of_week", "day_of_month", "month_of_year", "month", "day", "crontab"),
        'cron, such as "0 3 * * *"',
    ),
    **dict.fromkeys(
        ("seconds", "minutes", "hours", "days", "interval", "period", "run_every", "schedule"), 'every, such as "10m"'
    ),
    **dict.fromkeys(("args", "kwargs"), "payload"),
    **dict.fromkeys(("timezone", "time_zone"), "tz"),
    **dict.fromkeys(("schedule_type", "trigger"), 'cron, such as "0 3 * * *", or every, such as "10m"'),
    **dict.fromkeys(("coalesce", "misfire_grace_time", "catch_up"), "missed"),
    **dict.fromkeys(("start_time", "start_date", "next_run"), "starts_at"),
    **dict.fromkeys(("end_time", "end_date", "repeats"), "ends_at"),
    **dict.fromkeys(("task", "func"), "topic"),
    "id": "name",
    "replace_existing": 'on_conflict="replace"',
    "max_instances": "limit=1 at @handler",
    **dict.fromkeys(("jitter", "jobstore"), names.NOTHING),
}


class Missed(models.TextChoices):
    """The ways to treat occurrences that nobody could deliver, as while no worker ran."""

    # One message for all of them; and while an occurrence waits for its delivery, no other one is made.
    ONCE = "once", _("run once")
    # A message for each of them.
    ALL = "all", _("run all")
    # None: an occurrence that does not start in time expires.
    SKIP = "skip", _("skip")


class ScheduleOptions(TypedDict, total=False):
    """The arguments of a call about a schedule, besides its name, topic, payload and cron expression."""

    every: Duration | None
    tz: str | None
    queue: str | None
    priority: int | None
    starts_at: datetime | None
    ends_at: datetime | None
    missed: Missed | str
    expires: Duration | None


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """A checked definition. ``queue`` "" and ``priority`` None are those of the topic; spans are "" or texts.

    ``topic_queue`` and ``topic_priority`` are those that the handler of the topic gave to its messages where the
    definition was made, or "" and None where the handler was not known.
    """

    topic: str
    payload: Any
    queue: str
    priority: int | None
    cron: str
    every: str
    time_zone: str
    starts_at: datetime | None
    ends_at: datetime | None
    missed: str
    expires: str
    topic_queue: str
    topic_priority: int | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and values.same_json(asdict(self), asdict(other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def times(self) -> Times:
        return Times(self.cron, self.every, self.time_zone, self.starts_at, self.ends_at)

    def after(self, former: Definition) -> Definition:
        """Return this definition. If it knows nothing of the handler, it gets what the former definition knows."""
        if self.topic_queue or self.topic != former.topic:
            return self
        return replace(self, topic_queue=former.topic_queue, topic_priority=former.topic_priority)

    @property
    def time_to_start(self) -> timedelta | None:
        """How long after its time an occurrence may still start; None: for ever."""
        if self.expires:
            return timedelta(seconds=seconds(self.expires))
        return tuning.late if self.missed == Missed.SKIP else None


def checked(
    topic: str,
    payload: Any = None,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    tz: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    missed: Missed | str = Missed.ONCE,
    expires: Duration | None = None,
) -> Definition:
    """Check all arguments of a schedule. Raises ``InvalidMessage``, or ``ImproperlyConfigured`` without cronsim."""
    topic = validation.topic(topic)
    if (cron is None) == (every is None):
        given = "neither" if cron is None else "both"
        raise InvalidMessage(f"give a schedule a cron expression or an interval (every), not {given}")
    if isinstance(cron, int | float | timedelta):
        raise InvalidMessage(f'cron must be text such as "0 3 * * *", not {shown(cron)}; an interval is every')
    if missed not in Missed.values:
        raise InvalidMessage(f"missed is one of {', '.join(Missed.values)}, not {shown(missed)}")
    validation.expires(expires)
    handler = registry.find(topic)
    definition = Definition(
        topic,
        # The payload as the database will return it.
        json.loads(validation.payload(payload if handler is None else handler.stored(payload)[0])),
        "" if queue is None else validation.queue(queue),
        None if priority is None else validation.priority(priority),
        "" if cron is None else _text("cron", cron, CRON_LENGTH),
        "" if every is None else _span("every", every),
        _text("tz", settings.TIME_ZONE if tz is None else tz, ZONE_LENGTH),
        _moment("starts_at", starts_at),
        _moment("ends_at", ends_at),
        str(Missed(missed)),
        "" if expires is None else _span("expires", expires),
        "" if handler is None else registry.default_queue(topic),
        None if handler is None else handler.priority,
    )
    definition.times.check()
    return definition


def name(value: Any) -> str:
    """Check the name of a schedule, which has the characters of a topic."""
    return validation.checked("the name of a schedule", values.topic, value, LENGTHS.topic)


def _text(what: str, value: Any, limit: int) -> str:
    found = " ".join(validation.checked(what, values.text, value, limit).split())
    if not found:
        raise InvalidMessage(f"{what} must not be empty")
    return found


def _span(what: str, value: Duration) -> str:
    """Return a span as text. A text stays as it is."""
    span = validation.checked(what, values.span, value)
    if isinstance(value, str):
        return _text(what, value, SPAN_LENGTH)
    return f"{span:.6f}".rstrip("0").rstrip(".") + "s"


def _moment(what: str, value: Any) -> datetime | None:
    if value is None:
        return None
    found = validation.checked(what, values.moment, value)
    if not 2000 <= found.year < 2200:
        raise InvalidMessage(f"{what} is out of range")
    return found
