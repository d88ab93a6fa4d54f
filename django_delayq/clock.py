"""Moments as whole numbers.

Redis is told tenths of a millisecond: with a rank beside it such a number fits a double exactly, until 2081.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

# Tenths of a millisecond in a second.
SECOND = 10_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def ceil_tenth(moment: datetime) -> datetime:
    """The moment itself if it is a whole tenth, else the next one: rounding must not make anything early."""
    rest = moment.microsecond % 100
    return moment if not rest else moment + timedelta(microseconds=100 - rest)


def to_tenths(moment: datetime) -> int:
    """Tenths of a millisecond since 1970, rounded up."""
    return us_to_tenths(to_us(moment))


def from_tenths(tenths: int) -> datetime:
    """The inverse of ``to_tenths``, exactly."""
    return _EPOCH + timedelta(microseconds=tenths * 100)


def to_us(moment: datetime) -> int:
    """Microseconds since 1970: all that a database keeps of a time, in a form that is cheap to read."""
    return (moment - _EPOCH) // _US


def from_us(us: int) -> datetime:
    """The inverse of ``to_us``, exactly."""
    return _EPOCH + timedelta(microseconds=us)


def us_to_tenths(us: int) -> int:
    """Tenths of a millisecond, rounded up as ``to_tenths`` does."""
    return -(-us // 100)
