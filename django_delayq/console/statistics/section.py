"""The console's section of ``delayq_stats``: what falls due in the next hour, and what was delivered in the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils import timezone

from ...core.clock import iso
from ...core.durations import brief
from ...extensions import StatisticsSection
from ...inspector.numbers import total
from .throughput import RollupSum, Throughput, read_throughput
from .upcoming import Bar, count_upcoming

# The times for which throughput is shown. Full minutes.
SPANS = (1, 15, 60)


def collect(using: str, now: datetime) -> FlowSection:
    """Read the rollups of the past day, and count what falls due in the coming hour."""
    past = read_throughput(using, now, ("hour", "day"))
    return FlowSection(past, count_upcoming(using, "hour", now))


@dataclass(frozen=True, slots=True)
class FlowSection(StatisticsSection):
    """The section. ``past`` has the windows "hour" and "day"."""

    past: dict[str, Throughput]
    upcoming: list[Bar]

    def lines(self) -> Iterator[str]:
        yield from self._coming()
        yield from self._past()

    def _coming(self) -> Iterator[str]:
        """Yield a line for every five minutes, with a bar of 40 characters at most."""
        bars = self.upcoming
        size = len(bars) // 12
        groups = [bars[start : start + size] for start in range(0, len(bars), size)]
        numbers = [total(bar.number for bar in group) for group in groups]
        highest = max(number.count for number in numbers)
        if not highest:
            yield "Coming hour  nothing falls due"
            return
        yield f"Coming hour  {total(numbers)}"
        for group, number in zip(groups, numbers, strict=True):
            bar = "█" * math.ceil(number.count / highest * 40)
            yield f"  {timezone.localtime(group[0].start):%H:%M}  {bar:<40} {number}"

    def _past(self) -> Iterator[str]:
        hour = self.past["hour"]
        parts = [f"{brief(minutes * 60)}: {hour.last(minutes).outcomes['consumed']:,}" for minutes in SPANS]
        yield f"Consumed     {', '.join(parts)}, 24 h: {self.past['day'].sum.outcomes['consumed']:,}"
        others = [f"{number:,} {name}" for name, number in hour.last(60).outcomes.items() if name != "consumed"]
        yield f"In 60 m      {', '.join(others)}"

    def facts(self) -> dict[str, Any]:
        hour = self.past["hour"]
        return {
            # Sums of full minutes, as the workers counted them.
            "throughput": {
                **{f"{minutes}m": _ended(hour.last(minutes)) for minutes in SPANS},
                "24h": _ended(self.past["day"].sum),
            },
            "upcoming": [
                {"start": iso(bar.start), "end": iso(bar.end), **bar.number.as_json()} for bar in self.upcoming
            ],
        }


def _ended(sums: RollupSum) -> dict[str, Any]:
    late = {f"p{percent}": _finite(sums.lateness(percent)) for percent in (50, 95)}
    return {
        **sums.outcomes,
        # Upper bounds in seconds; null when there were no deliveries, or when they were later than the last bound.
        "lateness": {"of": sums.started, **late},
    }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds
