"""Moments as whole milliseconds, which is what Redis knows of time, and as whole microseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_US = timedelta(microseconds=1)


def ceil_ms(moment: datetime) -> datetime:
    """The moment itself if it is a whole millisecond, else the next one: rounding must not make anything early."""
    rest = moment.microsecond % 1000
    return moment if not rest else moment + timedelta(microseconds=1000 - rest)


def to_ms(moment: datetime) -> int:
    """Milliseconds since 1970, rounded up."""
    return -((_EPOCH - moment) // _MS)


def from_ms(ms: int) -> datetime:
    """The inverse of ``to_ms``, exactly."""
    return _EPOCH + timedelta(milliseconds=ms)


def to_us(moment: datetime) -> int:
    """Microseconds since 1970: all that a database keeps of a time, in a form that is cheap to read."""
    return (moment - _EPOCH) // _US


def from_us(us: int) -> datetime:
    """The inverse of ``to_us``, exactly."""
    return _EPOCH + timedelta(microseconds=us)


def us_to_ms(us: int) -> int:
    """Milliseconds, rounded up as ``to_ms`` does."""
    return -(-us // 1000)
