"""Steps of local time: the steps of a chart begin at full minutes or hours."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.utils import timezone

# Steps are counted from here. No message is older.
ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Window:
    """A time to look ahead or back over: so many steps of so many seconds."""

    steps: int
    seconds: int


def floor(now: datetime, step: timedelta) -> datetime:
    """Return the beginning of the step of local time in which ``now`` lies."""
    offset = timezone.localtime(now).utcoffset() or timedelta(0)
    return ORIGIN + (now - ORIGIN + offset) // step * step - offset
