"""What the console adds to ``delayq_stats``: what falls due in the next hour, and what was delivered in the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.utils import timezone

from ... import restore
from ...durations import brief
from ...extensions import StatisticsSection
from ...inspector.numbers import Capped, total
from . import throughput, upcoming
from .throughput import Series, Tally
from .upcoming import Upcoming

# Full minutes that throughput is told for.
SPANS = (1, 15, 60)
# Bars of the coming hour, and their length at most.
BARS = 12
WIDTH = 40


def collect(using: str, now: datetime) -> Flow:
    """Read the rollups and the index of what is scheduled."""
    past = throughput.series(using, now, ("hour", "day"))
    return Flow(past, upcoming.look(using, "hour", restore.queues(using), now))


@dataclass(frozen=True, slots=True)
class Flow(StatisticsSection):
    """The section: ``past`` by the names of windows, "hour" and "day"."""

    past: dict[str, Series]
    upcoming: Upcoming

    def lines(self) -> Iterator[str]:
        yield from self._coming()
        yield from self._past()

    def _coming(self) -> Iterator[str]:
        """Five minutes a line."""
        bars = self.upcoming.bars
        size = len(bars) // BARS
        groups = [bars[start : start + size] for start in range(0, len(bars), size)]
        numbers = [total(bar.number for bar in group) for group in groups]
        highest = max(number.count for number in numbers)
        if not highest:
            yield "Coming hour  nothing falls due"
            return
        yield f"Coming hour  {total(numbers)}"
        for group, number in zip(groups, numbers, strict=True):
            if group[0].start is not None:
                bar = "█" * math.ceil(number.count / highest * WIDTH)
                yield f"  {timezone.localtime(group[0].start):%H:%M}  {bar:<{WIDTH}} {number}"

    def _past(self) -> Iterator[str]:
        hour = self.past["hour"]
        parts = [f"{brief(minutes * 60)}: {hour.last(minutes).consumed:,}" for minutes in SPANS]
        yield f"Consumed     {', '.join(parts)}, 24 h: {self.past['day'].sum.consumed:,}"
        ended = hour.last(60)
        yield f"In 60 m      {ended.retried:,} retried, {ended.dead:,} dead, {ended.expired:,} expired"

    def facts(self) -> dict[str, Any]:
        hour = self.past["hour"]
        return {
            # Of full minutes, as the workers counted them.
            "throughput": {
                **{f"{minutes}m": _ended(hour.last(minutes)) for minutes in SPANS},
                "24h": _ended(self.past["day"].sum),
            },
            "upcoming": [
                {"start": _iso(bar.start), "end": _iso(bar.end), **_number(bar.number)} for bar in self.upcoming.bars
            ],
        }


def _ended(tally: Tally) -> dict[str, Any]:
    late = {f"p{percent}": _finite(tally.lateness(percent)) for percent in (50, 95)}
    return {
        "consumed": tally.consumed,
        "retried": tally.retried,
        "dead": tally.dead,
        "expired": tally.expired,
        # Upper bounds in seconds; null: none were delivered, or they were later than the last bound.
        "lateness": {"of": tally.started, **late},
    }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _number(number: Capped) -> dict[str, Any]:
    return {"count": number.count, "exact": not number.more and not number.about}


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
