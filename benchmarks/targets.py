"""The project's targets for its own performance, mostly as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .measures import Results, Spread, shown
from .systems import BY_NAME, SYSTEMS

OURS = "delayq"


@dataclass(frozen=True, slots=True)
class Target:
    """The least (or greatest) value that a measure should have: ``bound`` times the reference, or ``bound`` itself."""

    workload: str
    # A measure, or the sum of some: "client + servers".
    measure: str
    bound: float
    # "" (an absolute figure), the name of a system, or a group: "durable" or "redis", whose fastest peer counts.
    against: str = ""
    at_most: bool = False

    @property
    def text(self) -> str:
        limit = f"{'≤' if self.at_most else '≥'} {self.bound:,g}"
        if not self.against:
            return limit
        return f"{limit} × {GROUPS.get(self.against) or BY_NAME[self.against].title.removeprefix('floor: ')}"


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target and its measurement: a ratio where the target is one. ``met`` is None without a measurement."""

    target: Target
    found: float | None
    met: bool | None
    # The fastest peer, where that is the reference.
    beside: str = ""
    # The measurement of each round.
    rounds: tuple[float, ...] = ()

    @property
    def word(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]

    @property
    def measured(self) -> str:
        if self.found is None:
            return "–"
        rounds = self.rounds or (self.found,)
        return shown(Spread(self.found, min(rounds), max(rounds)), " ×" if self.target.against else "")


GROUPS = {"durable": "the fastest durable peer", "redis": "the fastest peer on Redis"}

TARGETS = (
    Target("schedule", "rate", 1.0, "orm"),
    Target("schedule-beyond", "rate", 1.2, "orm"),
    Target("schedule-bulk", "rate", 50_000),
    Target("schedule-bulk", "rate", 1.0, "durable"),
    Target("schedule-bulk", "rate", 0.5, "postgres"),
    Target("drain", "rate", 25_000),
    Target("drain", "client + servers", 50, at_most=True),
    Target("drain", "rate", 1.0, "durable"),
    Target("drain", "rate", 1.5, "redis"),
    Target("drain", "rate", 0.3, "postgres"),
    Target("drain-2", "rate", 30_000),
    Target("insert", "rate", 0.7, "orm"),
    Target("late-1000", "p50", 2.0, at_most=True),
    Target("late-1000", "p99", 3.0, at_most=True),
    Target("late-1000", "early", 0, at_most=True),
    Target("late-1000", "missing", 0, at_most=True),
    Target("late-3000", "p99", 10, at_most=True),
    Target("late-long", "p99", 3.0, at_most=True),
    Target("late-long", "max", 50, at_most=True),
    Target("new-queue", "max", 50, at_most=True),
    Target("purge", "ratio", 1.5, at_most=True),
    # 0.8 of what the waits alone allow.
    Target("async", "rate", 4_000),
    Target("async", "rate", 1.5, "redis"),
    Target("async", "rate", 1.5, "durable"),
    Target("async-late", "p99", 10, at_most=True),
    Target("restore", "rate", 100_000),
    Target("restore", "memory", 64, at_most=True),
    Target("memory", "bytes", 120, at_most=True),
    # Not 0: the memory of a server changes by a few bytes anyway.
    Target("memory", "beyond", 1, at_most=True),
    Target("life", "wal", 1_500, at_most=True),
    Target("idle", "redis", 2, at_most=True),
    Target("idle", "queries", 1, at_most=True),
    Target("growth-waiting", "ratio", 1.2, at_most=True),
    Target("growth-waiting", "p50", 1.2, at_most=True),
    Target("growth-waiting", "p99", 1.2, at_most=True),
    Target("growth-history", "ratio", 1.2, at_most=True),
    Target("growth-history", "p50", 1.2, at_most=True),
    Target("growth-history", "p99", 1.2, at_most=True),
    Target("burst", "early", 0, at_most=True),
    Target("burst", "missing", 0, at_most=True),
    Target("burst", "p99", 10, at_most=True),
)


def evaluate(results: Results, targets: Iterable[Target] = TARGETS) -> list[TargetResult]:
    """Compare each target with the medians of this run."""
    return [_evaluate(results, target) for target in targets]


def _evaluate(results: Results, target: Target) -> TargetResult:
    ours = results.median(target.workload, OURS, target.measure)
    if ours is None:
        return TargetResult(target, None, None)
    beside, reference, rounds = "", 1.0, results.each(target.workload, OURS, target.measure)
    if target.against:
        beside, found = _reference(results, target)
        if not found:
            return TargetResult(target, None, None)
        reference = found
        references = results.each(target.workload, beside or target.against, target.measure)
        # Values of the same round are compared.
        rounds = [a / b for a, b in zip(rounds, references, strict=False)]
    value = ours / reference
    met = value <= target.bound if target.at_most else value >= target.bound
    return TargetResult(target, value, met, beside, tuple(rounds))


def _reference(results: Results, target: Target) -> tuple[str, float | None]:
    """Return the peer that is the reference ("" for a floor), and its measurement."""
    if target.against not in GROUPS:
        return "", results.median(target.workload, target.against, target.measure)
    peers = [s for s in SYSTEMS if s.kind == "peer" and s.durable == (target.against == "durable")]
    medians = {peer.name: results.median(target.workload, peer.name, target.measure) for peer in peers}
    found = {name: median for name, median in medians.items() if median is not None}
    if not found:
        return "", None
    fastest = max(found, key=lambda name: found[name])
    return fastest, found[fastest]
