"""Steps of local time: the steps of a chart begin at full minutes or hours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.utils import timezone

# Steps are counted from here. No message is older.
ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)


def floor(now: datetime, step: timedelta) -> datetime:
    """Return the beginning of the step of local time in which ``now`` lies."""
    offset = timezone.localtime(now).utcoffset() or timedelta(0)
    return ORIGIN + (now - ORIGIN + offset) // step * step - offset
