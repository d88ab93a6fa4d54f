"""The times of a schedule: those of a cron expression in a time zone, or every so many seconds. No database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from django.core.exceptions import ImproperlyConfigured

from ..core import text, values
from ..core.exceptions import InvalidMessage
from ..project import validation

# Intervals are counted from here, unless the schedule has a start: "10m" means :00, :10, :20 and so on.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The longest interval of a schedule.
LONGEST = timedelta(days=366)
# Times that a change of the clocks puts before the moment that was asked for, at most: each second of an hour.
BACKWARD = 3700

_US = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Times:
    """All times of a schedule. Either ``cron`` or ``every`` is not empty. The end belongs to them, as does the start.

    A cron expression whose hour and minute are given (``30 2 * * *``) names times of day: on the day on which the
    clocks skip 02:30 it means the moment of the change, and when 02:30 comes twice it means the first. Other
    expressions (``*/30 * * * *``), and intervals, go on through a change of the clocks evenly.
    """

    cron: str = ""
    every: str = ""
    time_zone: str = "UTC"
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment, in UTC; None when there is none."""
        if self.starts_at is not None:
            moment = max(moment, self.starts_at - _US)
        found = self._cron_after(moment) if self.cron else self._interval_after(moment)
        if found is None or (self.ends_at is not None and found > self.ends_at):
            return None
        return found

    def following(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times after a moment, in UTC."""
        while (found := self.after(moment)) is not None:
            yield found
            moment = found

    def check(self) -> None:
        """Raise ``InvalidMessage`` for what is no expression, no interval or no time zone, or never comes."""
        zone(self.time_zone)
        if self.cron:
            _parsed(self.cron, EPOCH)
        else:
            interval(self.every)
        if self.starts_at is not None and self.ends_at is not None and self.ends_at < self.starts_at:
            raise InvalidMessage("the schedule ends before it starts")
        if self.after(self.starts_at or EPOCH) is None and self.ends_at is None:
            raise InvalidMessage(f"no day has the time {text.shown(self.cron)}")

    def _interval_after(self, moment: datetime) -> datetime:
        step, start = interval(self.every), self.starts_at or EPOCH
        return start if moment < start else start + step * ((moment - start) // step + 1)

    def _cron_after(self, moment: datetime) -> datetime | None:
        # In the hour that comes twice, the library counts from the first one.
        local = moment.astimezone(zone(self.time_zone))
        # The library does so by itself, with five fields only.
        is_of_day = len(self.cron.split()) == 6 and not any(self.cron.split()[n].startswith("*") for n in (1, 2))
        expression = _parsed(self.cron, local.replace(tzinfo=None) if is_of_day else local)
        for _turn in range(BACKWARD):
            try:
                found = next(expression)
                # Two times in one zone would be compared as a clock on the wall shows them.
                found = _time_of_day(found, local.tzinfo) if is_of_day else found.astimezone(UTC)
            except (StopIteration, OverflowError):
                return None
            if found > moment:
                return found
        raise InvalidMessage(f"the times of {text.shown(self.cron)} do not go on")


def _time_of_day(wall: datetime, tz: tzinfo | None) -> datetime:
    """Return when clocks first show a time; for one that they skip, the moment at which they do."""
    at = wall.replace(tzinfo=tz)
    while at.astimezone(UTC).astimezone(tz) != at:
        at = at.replace(second=0) + timedelta(minutes=1)
    return at.astimezone(UTC)


def interval(text: str) -> timedelta:
    """Return the interval that a text such as ``10m`` means. Raises ``InvalidMessage``."""
    return timedelta(seconds=validation.checked("every", values.span, text, 1, LONGEST.total_seconds()))


@lru_cache(maxsize=256)
def zone(name: str) -> ZoneInfo:
    """Return the time zone of this name. Raises ``InvalidMessage``."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InvalidMessage(f"not a time zone: {text.shown(name)}; it is a name such as 'Europe/Berlin'") from None


def shown(moment: datetime, name: str) -> str:
    """Write a moment as the clocks of a time zone show it. Raises ``InvalidMessage``."""
    local = moment.astimezone(zone(name))
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"


def _parsed(cron: str, start: datetime) -> Any:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ImproperlyConfigured(
            "Cron expressions need the package cronsim: install django-delayq[recurring]"
        ) from None
    try:
        return CronSim(cron, start)
    except (CronSimError, ValueError) as error:
        raise InvalidMessage(f"not a cron expression: {text.shown(cron)}: {str(error)[:60]}") from None
