"""Periods as people write them in a search: "<1h", "2026-01-02..2026-01-03", "today"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from ...core.durations import seconds

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?")
_SPAN = re.compile(r"([+-]?)([\d.]+(?:ms|[smhdw])(?:[\d.]+(?:ms|[smhdw]))*)", re.IGNORECASE)
_HAS_MILLISECONDS = re.compile(r"\.\d{3}(?!\d)")
_MIRRORED = str.maketrans("<>", "><")
_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}

# No time of a message lies outside of these bounds, and within them no arithmetic with time zones fails.
_EARLIEST = datetime(1900, 1, 1, tzinfo=UTC)
_LATEST = datetime(2300, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Period:
    """The time from ``start`` on and before ``end``; None means without a limit."""

    start: datetime | None = None
    end: datetime | None = None

    def described(self) -> str:
        """Return the period in words."""
        if self.start is None:
            return _("before %(end)s") % {"end": shown(self.end)}
        if self.end is None:
            return _("from %(start)s on") % {"start": shown(self.start)}
        return _("from %(start)s until before %(end)s") % {"start": shown(self.start), "end": shown(self.end)}

    def frozen(self) -> str:
        """Return the text of the period with absolute times."""
        return "..".join("" if at is None else at.astimezone(UTC).isoformat() for at in (self.start, self.end))


def shown(at: datetime | None) -> str:
    """Return a moment in the current time zone, to the second."""
    if at is None:
        return ""
    return timezone.localtime(at).replace(tzinfo=None).isoformat(sep=" ", timespec="seconds")


def parse(text: str, now: datetime, *, past: bool) -> Period | None:
    """Read a period; return None when the text is not one.

    A span such as ``1h`` counts from ``now``: ahead, or back when ``past`` is True. ``<1h`` is the time that is nearer
    to now than that, in its direction; a span alone means the same. A moment alone means every moment that is written
    like that: ``2026-01-02T12:00`` is a minute.
    """
    text = text.strip()
    if ".." in text:
        return _range(text, now, past=past)
    mark = re.match(r"[<>]?=?", text)[0]  # type: ignore[index]
    operand = text[len(mark) :].strip()
    interval = _interval(operand, now, past=past)
    if interval is None:
        return None
    start, end = interval
    beyond = end if start != end else start + timedelta.resolution
    is_span = _SPAN.fullmatch(operand) is not None
    if mark in ("", "="):
        if not is_span:
            return Period(start, max(beyond, start + _precision(operand)))
        mark = "<"
    if past and is_span:
        mark = mark.translate(_MIRRORED)
    if mark.startswith("<"):
        return Period(end=start if mark == "<" else beyond)
    return Period(start=start if mark == ">=" else beyond)


def _range(text: str, now: datetime, *, past: bool) -> Period | None:
    """Read ``FIRST..LAST``, either of which may be missing. None: the text is none."""
    first, _dots, last = text.partition("..")
    start, end = _interval(first, now, past=past), _interval(last, now, past=past)
    if (start is None and first) or (end is None and last) or (start is None and end is None):
        return None
    period = Period(start and start[0], end and end[1])
    if period.start is not None and period.end is not None:
        if past and period.start > period.end and _SPAN.fullmatch(first) and _SPAN.fullmatch(last):
            return Period(period.end, period.start)
        if period.start >= period.end:
            return None
    return period


def _interval(text: str, now: datetime, *, past: bool) -> tuple[datetime, datetime] | None:
    """Return begin and end of a day or a millisecond; for a moment they are equal. None: the text is none of these."""
    try:
        found = _unchecked(text, now, past=past)
    except (ValueError, OverflowError):
        return None
    return found if found is not None and found[0] >= _EARLIEST and found[1] <= _LATEST else None


def _unchecked(text: str, now: datetime, *, past: bool) -> tuple[datetime, datetime] | None:
    """Return the start and the end of a time, a day or a span; the times may be out of range."""
    if text.lower() in _DAYS:
        return _day(timezone.localtime(now).date() + timedelta(days=_DAYS[text.lower()]))
    if _DATE.fullmatch(text):
        return _day(date.fromisoformat(text))
    if _MOMENT.fullmatch(text.upper()):
        at = datetime.fromisoformat(text.upper())
        at = timezone.make_aware(at) if at.tzinfo is None else at
        # Pages show times cut to the millisecond: such a text means every moment that is shown like that.
        return at, at + (timedelta(milliseconds=1) if _HAS_MILLISECONDS.search(text) else timedelta(0))
    span = _SPAN.fullmatch(text)
    if span is None:
        return None
    length = timedelta(seconds=seconds(span[2]))
    at = now - length if past != (span[1] == "-") else now + length
    return at, at


def _precision(text: str) -> timedelta:
    """Return the length of time for which a moment is written like this text."""
    clock = re.search(r"[T ]\d\d:\d\d(:\d\d)?(\.\d+)?", text, re.IGNORECASE)
    if clock is None or clock[2]:
        return timedelta(0)
    return timedelta(seconds=1) if clock[1] else timedelta(minutes=1)


def _day(day: date) -> tuple[datetime, datetime]:
    start, end = (datetime.combine(d, time()) for d in (day, day + timedelta(days=1)))
    return timezone.make_aware(start), timezone.make_aware(end)
