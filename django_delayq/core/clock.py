"""Converts moments to whole numbers and back.

Redis gets tenths of a millisecond: together with a rank such a number fits a double exactly until 2081.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

# Tenths of a millisecond in a second.
SECOND = 10_000

NO_TIME = timedelta(0)
# The least difference of two moments, in Python and in the databases.
MICROSECOND = timedelta.resolution

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ceil_tenth(moment: datetime) -> datetime:
    """Round a moment up to a whole tenth of a millisecond: rounding must not make a message early."""
    rest = moment.microsecond % 100
    return moment if not rest else moment + timedelta(microseconds=100 - rest)


def to_tenths(moment: datetime) -> int:
    """Return the tenths of a millisecond since 1970, rounded up."""
    return us_to_tenths(to_us(moment))


def from_tenths(tenths: int) -> datetime:
    """Convert the result of ``to_tenths`` back to a moment, exactly."""
    return _EPOCH + timedelta(microseconds=tenths * 100)


def to_us(moment: datetime) -> int:
    """Return the microseconds since 1970. Databases store times exactly to the microsecond."""
    return (moment - _EPOCH) // MICROSECOND


def from_us(us: int) -> datetime:
    """Convert the result of ``to_us`` back to a moment, exactly."""
    return _EPOCH + timedelta(microseconds=us)


def us_to_tenths(us: int) -> int:
    """Convert microseconds to tenths of a millisecond, rounded up as ``to_tenths`` does."""
    return -(-us // 100)


def iso(moment: datetime | None) -> str | None:
    """Return the moment as UTC in ISO 8601, to the millisecond; None for None."""
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
