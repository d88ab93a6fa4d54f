"""The charts and sentences of the past: throughput, lateness and run times of a window, step by step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from django.utils import formats, timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from ...core.durations import brief
from ..statistics.throughput import RollupSum, Throughput
from . import charts
from .charts import Column

# The texts under the axis stand this many minutes apart, counted from midnight.
_MINUTES_PER_TICK = {"hour": 15, "day": 240, "week": 1440, "month": 1440}


def tick(at: datetime, window: str) -> str:
    """Return the text under the axis for a step that begins at a round time."""
    if (at.hour * 60 + at.minute) % _MINUTES_PER_TICK[window]:
        return ""
    if window == "month":
        return formats.date_format(at, pgettext("date format", "j N"))
    return formats.date_format(at, pgettext("date format", "D j") if window == "week" else "H:i")


def clock_span(start: datetime, end: datetime) -> str:
    """Return a time in words, by the clock and, unless it is today's, the day."""
    clock = f"{start:%H:%M}–{end:%H:%M}"
    if start.date() == timezone.localdate():
        return clock
    day = formats.date_format(start, pgettext("date format", "D j N"))
    return f"{day} {clock}"


def throughput(past: Throughput) -> SafeString:
    names = [_("consumed"), _("retried"), _("dead"), _("expired")]

    def column(tally: RollupSum) -> tuple[list[float | None], str]:
        numbers: list[float | None] = [*tally.outcomes.values()]
        text = ", ".join(f"{number:,} {name}" for number, name in zip(numbers, names, strict=True) if number)
        return numbers, text or _("nothing")

    description = _("%(consumed)s consumed, %(retried)s retried, %(dead)s dead, %(expired)s expired.") % {
        name: f"{number:,}" for name, number in past.sum.outcomes.items()
    }
    fills = ("0", "1", "bad", "3")
    return charts.bars("dq-throughput", _("Throughput"), description, names, steps(past, column), fills=fills)


def lateness(past: Throughput) -> SafeString:
    return _lengths("dq-lateness", _("Lateness of first deliveries"), late(past.sum), past, RollupSum.lateness)


def runtimes(past: Throughput) -> SafeString:
    return _lengths("dq-runtimes", _("Run time of handlers"), ran(past.sum), past, RollupSum.runtime)


def _lengths(
    name: str, title: str, description: str, past: Throughput, read: Callable[[RollupSum, int], float | None]
) -> SafeString:
    """Draw the chart of a length of time: half of the deliveries were within it, and 95 % of them."""

    def column(tally: RollupSum) -> tuple[list[float | None], str]:
        p50, p95 = read(tally, 50), read(tally, 95)
        text = _("half %(p50)s, 95 %% %(p95)s") % {"p50": charts.bound(p50), "p95": charts.bound(p95)}
        return [p50, p95], _("no delivery") if p50 is None else text

    series = [_("half of them (p50)"), _("%(share)d %% of them (p95)") % {"share": 95}]
    return charts.lines(name, title, description, series, steps(past, column))


def steps(
    past: Throughput, column: Callable[[RollupSum], tuple[list[float | None], str]], near: int = 0
) -> list[Column]:
    """Return a column for each step; those that are fewer than ``near`` from the end get no text under the axis."""
    columns = []
    for place, tally in enumerate(past.steps):
        start, end = (timezone.localtime(past.start + n * past.step) for n in (place, place + 1))
        values, text = column(tally)
        left = len(past.steps) - place
        below = "" if left < near else tick(start, past.window)
        columns.append(Column(clock_span(start, end), values, text, below, filling=left == 1))
    return columns


def late(tally: RollupSum) -> str:
    """Return in words how late messages started."""
    p50, p95 = tally.lateness(50), tally.lateness(95)
    if p50 is None:
        return _("No message was delivered in this time.")
    return _("Half of the messages started %(p50)s after the due time, 95 %% of them %(p95)s after it.") % {
        "p50": charts.bound(p50),
        "p95": charts.bound(p95),
    }


def ran(tally: RollupSum) -> str:
    """Return in words how long handlers ran."""
    p50, p95, mean = tally.runtime(50), tally.runtime(95), tally.mean_runtime
    if mean is None:
        return _("The run times of this time are not known.")
    return _("Half of the runs took %(p50)s, 95 %% of them %(p95)s; the mean is %(mean)s.") % {
        "p50": charts.bound(p50),
        "p95": charts.bound(p95),
        "mean": brief(mean),
    }
