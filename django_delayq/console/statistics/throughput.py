"""Throughput and lateness of the past: sums of the rollups that the workers write, in steps of local time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Case, F, IntegerField, Subquery, Sum, When
from django.db.models.functions import ExtractMinute, TruncHour
from django.db.models.lookups import GreaterThanOrEqual
from django.utils import timezone

from ...record import reads
from ..console_tuning import tuning
from ..models import Rollup
from .rollups import HOUR_SECONDS, MINUTE_SECONDS

# Steps are counted from here. No message is older.
ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)
# The offset of each time zone is a multiple of this.
QUARTER = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Window:
    """A time to look ahead or back over: ``steps`` steps of ``seconds`` each."""

    steps: int
    seconds: int


def floor(now: datetime, step: timedelta) -> datetime:
    """Return the beginning of the step of local time in which ``now`` lies."""
    offset = timezone.localtime(now).utcoffset() or timedelta(0)
    return ORIGIN + (now - ORIGIN + offset) // step * step - offset


# The windows ahead and back. Each has one step more than its time: the last one back is not over, the first one ahead
# has begun.
WINDOWS = {"hour": Window(61, 60), "day": Window(49, 1800), "week": Window(57, 10_800), "month": Window(61, 43_200)}


_LATE = Rollup.LATENESS[Rollup.BOUNDS.index(5_000) + 1 :]


class RollupSum(Counter[str]):
    """The sum of some rollups, by the names in ``Rollup.COUNTS``."""

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of each of ``Rollup.OUTCOMES``."""
        return {name: self[name] for name in Rollup.OUTCOMES}

    @property
    def started(self) -> int:
        """The number of first deliveries: those have a lateness."""
        return sum(self[name] for name in Rollup.LATENESS)

    @property
    def late(self) -> int:
        """The number of first deliveries that began more than 5 s after their time."""
        return sum(self[name] for name in _LATE)

    def lateness(self, percent: int) -> float | None:
        """Return the lateness, in seconds, that ``percent`` of the first deliveries do not exceed, as ``_bound``."""
        return self._bound(Rollup.LATENESS, percent)

    def runtime(self, percent: int) -> float | None:
        """Return the run time, in seconds, that ``percent`` of the handlers' runs do not exceed, as ``_bound``."""
        return self._bound(Rollup.RUNTIME, percent)

    @property
    def runs(self) -> int:
        """The number of runs whose time is known."""
        return sum(self[name] for name in Rollup.RUNTIME)

    @property
    def mean_runtime(self) -> float | None:
        """The mean run time in seconds; None when none is known."""
        return self["run_us"] / self.runs / 1e6 if self.runs else None

    @property
    def ended(self) -> int:
        """The number of runs that ended, however they did."""
        return self["consumed"] + self.failed

    @property
    def failed(self) -> int:
        """The number of runs that failed, with or without a retry to follow."""
        return self["retried"] + self["dead"]

    @property
    def failed_share(self) -> float:
        """The part of the runs that failed."""
        return self.failed / max(1, self.ended)

    def _bound(self, classes: Sequence[str], percent: int) -> float | None:
        """Return the bound of the first class up to which ``percent`` of those in all classes are.

        Returns ``inf`` when that is the last class, and None when there are none: nothing is known then.
        """
        wanted = -(-sum(self[name] for name in classes) * percent // 100)
        if not wanted:
            return None
        seen = 0
        for bound, name in zip(Rollup.BOUNDS, classes, strict=False):
            seen += self[name]
            if seen >= wanted:
                return bound / 1000
        return float("inf")


@dataclass(slots=True)
class Throughput:
    """The sums of one window, one for each step."""

    window: str
    start: datetime
    step: timedelta
    steps: list[RollupSum]
    # The sum of the same length of time before the window; empty unless the window is compared.
    before: RollupSum = field(default_factory=RollupSum)
    # The most runs that ended in one minute, as far as rollups of minutes are kept; 0 unless it is compared.
    most: int = 0

    @property
    def sum(self) -> RollupSum:
        return add_up(self.steps)

    def last(self, steps: int) -> RollupSum:
        """Return the sum of the last full steps."""
        return add_up(self.steps[-1 - steps : -1])


def add_up(sums: Iterable[RollupSum]) -> RollupSum:
    """Return the sum of sums."""
    return RollupSum(sum(sums, Counter()))


def read_throughput(
    using: str, now: datetime, windows: Iterable[str], compared: Collection[str] = (), **only: str
) -> dict[str, Throughput]:
    """Sum the rollups of these windows by their steps. ``only`` names a topic or a queue.

    For the ``compared`` windows, the same length of time before them is summed, too, and their busiest minute is found.
    """
    found = {name: _empty(name, now) for name in windows}
    since = min(past.start - len(past.steps) * past.step * (name in compared) for name, past in found.items())
    fine = min((past.start for past in found.values() if past.step < QUARTER), default=now + timedelta(days=1))
    most = [_most(using, found[name].start) for name in compared]
    for hour, quarter, minute, *more, counts in _sums(using, (*_times(fine), *most), since, **only):
        at = minute or hour + quarter * QUARTER
        for name, past in found.items():
            place = (at - past.start) // past.step
            if place >= 0:
                # The clock of a worker may be ahead: counts for a step beyond the last one go into the last one.
                past.steps[min(place, len(past.steps) - 1)].update(counts)
            elif name in compared and place >= -len(past.steps):
                past.before.update(counts)
        for name, number in zip(compared, more, strict=True):
            found[name].most = number or 0
    return found


def _times(fine: datetime) -> tuple[Any, ...]:
    """Return the columns of a time: its hour, the quarter of that, and the minute from ``fine`` on.

    Two days have 2,880 minutes, each with forty sums, and no step before ``fine`` begins within a quarter of an hour.
    """
    minute = ExtractMinute("at", tzinfo=UTC)
    quarter = Case(
        *(When(GreaterThanOrEqual(minute, 15 * number), then=number) for number in (3, 2, 1)),
        default=0,
        output_field=IntegerField(),
    )
    return TruncHour("at", tzinfo=UTC), quarter, Case(When(at__gte=fine, then="at"))


def _most(using: str, since: datetime) -> Subquery:
    """Return a column for the most runs that ended in one minute."""
    rows = Rollup.objects.using(using).filter(seconds=MINUTE_SECONDS, at__gte=since)
    ended = rows.values("at").annotate(ended=Sum(F("consumed") + F("retried") + F("dead")))
    return Subquery(ended.order_by("-ended").values("ended")[:1])


def read_last_hour(using: str, now: datetime, column: str, names: Collection[str] = ()) -> dict[str, Throughput]:
    """Sum the rollups of the last hour by a column and minute, those of these names if there are any."""
    found: dict[str, Throughput] = {}
    only = {f"{column}__in": list(names)} if names else {}
    for name, at, counts in _sums(using, (column, "at"), _empty("hour", now).start, **only):
        past = found.setdefault(name, _empty("hour", now))
        past.steps[min((at - past.start) // past.step, len(past.steps) - 1)].update(counts)
    return found


class Failing(NamedTuple):
    """A topic that fails far more often than before: its last hour, and the failed share of the day before."""

    topic: str
    hour: Throughput
    before: float

    @property
    def since(self) -> datetime:
        """The first minute of the hour in which more runs failed than usual."""
        usual = _usual(self.before)
        place = next(place for place, step in enumerate(self.hour.steps) if step.failed_share > usual)
        return self.hour.start + place * self.hour.step


def read_failing(using: str, now: datetime) -> list[Failing]:
    """Return the topics that fail far more often than the day before, those with the most failures first."""
    hour = now - timedelta(hours=1)
    before: dict[str, float] = {}
    names = ("consumed", "retried", "dead")
    for topic, each in _compared(using, "topic", hour - timedelta(days=1), hour, names).items():
        share = each.before.failed_share
        if each.now.failed >= tuning.failed_least and each.now.failed_share > _usual(share):
            before[topic] = share
    if not before:
        return []
    hours = read_last_hour(using, now, "topic", before)
    found = [Failing(topic, hours[topic], share) for topic, share in before.items()]
    return sorted(found, key=lambda each: (-each.hour.sum.failed, each.topic))


def _usual(before: float) -> float:
    """Return the share of failed runs in an hour from which on a topic fails, by that of the day before."""
    return max(tuning.failed_share, tuning.failed_times * before)


@dataclass(slots=True)
class Compared:
    """The sums of a window, and of as many full steps before it."""

    now: RollupSum = field(default_factory=RollupSum)
    before: RollupSum = field(default_factory=RollupSum)

    @property
    def slowdown(self) -> float:
        """The mean run time divided by that of the time before; 0 where too few runs of either are known."""
        few = min(self.now.runs, self.before.runs) < tuning.compared_runs
        return 0.0 if few else (self.now.mean_runtime or 0.0) / (self.before.mean_runtime or math.inf)


def compare(using: str, window: str, column: str, kind: str = "", name: str = "") -> dict[str, Compared]:
    """Sum the rollups of a window and of the time before it by topic or queue; all, or of one queue or topic."""
    past, only = _empty(window, reads.now(using)), {kind: name} if kind else {}
    return _compared(using, column, past.start - (len(past.steps) - 1) * past.step, past.start, **only)


def _compared(
    using: str, column: str, begin: datetime, middle: datetime, names: Sequence[str] = Rollup.COUNTS, **only: Any
) -> dict[str, Compared]:
    """Sum the rollups of two times by a column: from ``begin`` to ``middle``, and from then on."""
    found: defaultdict[str, Compared] = defaultdict(Compared)
    is_now = Case(When(at__gte=middle, then=1), default=0, output_field=IntegerField())
    for value, now, counts in _sums(using, (column, is_now), begin, names, **only):
        setattr(found[value], "now" if now else "before", counts)
    return dict(found)


def read_traffic(using: str, window: str, kind: str, name: str) -> tuple[Throughput, dict[str, Compared]]:
    """Sum the rollups of a topic by the steps of a window, and by queue; or those of a queue, and by topic."""
    past = read_throughput(using, reads.now(using), (window,), **{kind: name})[window]
    return past, compare(using, window, "queue" if kind == "topic" else "topic", kind, name)


def _sums(
    using: str, columns: tuple[Any, ...], since: datetime, names: Sequence[str] = Rollup.COUNTS, **only: Any
) -> Iterator[Any]:
    """Have the database sum counts by columns; yield the values of these and the sums."""
    sums = {f"sum_{name}": Sum(name) for name in names}
    rows = Rollup.objects.using(using).filter(seconds__in=(MINUTE_SECONDS, HOUR_SECONDS), at__gte=since, **only)
    for row in rows.values_list(*columns).annotate(**sums):
        yield *row[: len(columns)], RollupSum(dict(zip(names, row[len(columns) :], strict=True)))


def _empty(name: str, now: datetime) -> Throughput:
    window = WINDOWS[name]
    step = timedelta(seconds=window.seconds)
    newest = floor(now, step)
    return Throughput(name, newest - (window.steps - 1) * step, step, [RollupSum() for _ in range(window.steps)])
