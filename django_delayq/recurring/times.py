"""The times of a schedule: those of a cron expression in a time zone, or at an interval. No database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from django.core.exceptions import ImproperlyConfigured

from ..core import text, values
from ..core.clock import MICROSECOND
from ..core.durations import seconds
from ..core.exceptions import InvalidMessage
from ..project import validation

# Intervals are counted from here, unless the schedule has a start: "10m" means :00, :10, :20 and so on.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The longest interval of a schedule.
LONGEST = timedelta(days=366)
# No change of clocks is as large as this, and two changes are further apart.
CHANGE = timedelta(hours=3)


@dataclass(frozen=True, slots=True)
class Times:
    """All times of a schedule. Either ``cron`` or ``every`` is not empty. The start and the end belong to the times.

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
            moment = max(moment, self.starts_at - MICROSECOND)
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
        is_even = any(field.startswith("*") for field in self.cron.split()[-5:-3])
        try:
            return self._even_after(moment) if is_even else self._time_of_day_after(moment)
        except (StopIteration, OverflowError):
            return None

    def _time_of_day_after(self, moment: datetime) -> datetime:
        tz = zone(self.time_zone)
        walls = _parsed(self.cron, moment.astimezone(tz).replace(tzinfo=None))
        return next(at for at in (_time_of_day(wall, tz) for wall in walls) if at > moment)

    def _even_after(self, moment: datetime) -> datetime:
        """Return the first moment after this one at which the clocks show a time of the expression.

        The library reads clocks that nobody changes, once for each offset of the next hours.
        """
        tz = zone(self.time_zone)

        def offset(at: datetime) -> timedelta:
            return at.astimezone(tz).utcoffset() or timedelta(0)

        def first(ahead: timedelta) -> datetime:
            walls = _parsed(self.cron, (moment + ahead).replace(tzinfo=None))
            times = (wall.replace(tzinfo=UTC) - ahead for wall in walls)
            return next(at for at in times if at > moment + CHANGE or offset(at) == ahead)

        # Not a ``map``: a ``StopIteration`` for an offset without a further time would end it early.
        while (found := min([first(one) for one in {offset(moment), offset(moment + CHANGE)}])) > moment + CHANGE:
            moment = max(moment + CHANGE, found - CHANGE)
        return found


def _time_of_day(wall: datetime, tz: tzinfo) -> datetime:
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


def _parsed(cron: str, start: datetime) -> Iterator[datetime]:
    """Return the times of a cron expression after ``start``, without changes of clocks. Raises ``InvalidMessage``."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ImproperlyConfigured(
            "Cron expressions need the package cronsim: install django-delayq[recurring]"
        ) from None
    try:
        found: Iterator[datetime] = CronSim(cron, start)
        return found
    except (CronSimError, ValueError) as error:
        hint = 'write one such as "0 3 * * *"'
        with suppress(ValueError):
            seconds(cron)
            hint = f"an interval is every={cron!r}"
        raise InvalidMessage(f"not a cron expression: {text.shown(cron)}: {str(error)[:60]}; {hint}") from None
