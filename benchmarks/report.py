"""The tables of a run, on the terminal and in the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .measures import Measures, figure, spread
from .systems import BY_NAME, SYSTEMS, System
from .tables import Table
from .workloads import WORKLOADS, Workload

OURS = "delayq"
# A system that does this many times as much is by far ahead.
BY_FAR = 2.0
_TITLES = {workload.name: workload.title for workload in WORKLOADS}


@dataclass(slots=True)
class Results:
    """The measures by workload and system, one for each round; and the reasons why systems failed."""

    rounds: dict[str, dict[str, list[Measures]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, workload: str, system: str, measures: Measures) -> None:
        if measures:
            self.rounds.setdefault(workload, {}).setdefault(system, []).append(measures)

    def fail(self, workload: str, system: str, reason: str) -> None:
        self.failures.setdefault(workload, {})[system] = reason

    def each(self, workload: str, system: str, measure: str) -> list[float]:
        """Return the values of all rounds that measured it. "client + postgres" is the sum of two measures."""
        names = measure.split(" + ")
        rounds = self.rounds.get(workload, {}).get(system, [])
        return [sum(found[name] for name in names) for found in rounds if found.keys() >= set(names)]

    def median(self, workload: str, system: str, measure: str) -> float | None:
        values = self.each(workload, system, measure)
        return statistics.median(values) if values else None

    def ratios(self, workload: str, measure: str, other: str, system: str) -> list[float]:
        """Return ours divided by the measure of a system in the workload ``other``, round by round."""
        pairs = zip(self.each(workload, OURS, measure), self.each(other, system, measure), strict=False)
        return [ours / theirs for ours, theirs in pairs if theirs]


class Goal(NamedTuple):
    """What a measure of ours should be: ``bound``, or ``bound`` times that of ``system`` in the workload ``beside``."""

    workload: str
    measure: str
    bound: float
    system: str = ""
    beside: str = ""
    at_most: bool = False


GOALS = (
    Goal("schedule", "rate", 1.05, "orm"),
    Goal("bulk", "rate", 0.55, "postgres"),
    Goal("keyed", "rate", 0.3, "postgres", "bulk"),
    Goal("drain", "rate", 1.0, "graphile"),
    Goal("drain-2", "rate", 0.95, "graphile"),
    Goal("drain", "client + postgres + redis", 46, at_most=True),
    Goal("insert", "rate", 0.6, "graphile"),
    Goal("autocommit", "rate", 0.65, "graphile"),
    Goal("batch", "rate", 12_000),
    Goal("batch", "rate", 10, OURS, "insert"),
    Goal("lines", "rate", 0.75, OURS, "drain"),
    Goal("query", "rate", 0.8, OURS, "drain"),
    Goal("late-1000", "postgres", 250, at_most=True),
    Goal("late-1000", "p50", 0.5, at_most=True),
    Goal("late-1000", "p99", 1.5, at_most=True),
    Goal("late-1000", "max", 20, at_most=True),
    Goal("late-1000", "early + missing", 0, at_most=True),
)


def beside_the_best(results: Results) -> Table:
    """Return a row for each workload: ours, and the best peers that keep messages on disk and in Redis."""
    rows = [["", "django-delayq", "best on disk", "×", "best in Redis", "×"]]
    for workload in _measured(results):
        for measure in ("rate",) if workload.more_is_better else ("p50", "p99"):
            ours = spread(results.each(workload.name, OURS, measure))
            row = [f"{workload.title}, {workload.measures[measure] if measure == 'rate' else f'{measure}, ms'}", ours]
            for durable in (True, False):
                best = _best(results, workload, measure, durable)
                if best is None:
                    row += ["–", "–"]
                    continue
                theirs = spread(results.each(workload.name, best.name, measure))
                ratios = results.ratios(workload.name, measure, workload.name, best.name)
                row += [f"{best.title}: {theirs}", spread(ratios)]
            rows.append(row)
    return rows


def ahead(results: Results) -> str:
    """Return a sentence that says which peers did better than ours in which workload."""
    found = []
    for workload in _measured(results):
        measure = "rate" if workload.more_is_better else "p50"
        ours = results.median(workload.name, OURS, measure)
        for durable in (True, False):
            best = _best(results, workload, measure, durable)
            theirs = None if best is None else results.median(workload.name, best.name, measure)
            if best is None or ours is None or theirs is None:
                continue
            if (theirs > ours) == workload.more_is_better and theirs != ours:
                far = "by far, " if max(ours, theirs) >= BY_FAR * min(ours, theirs) else ""
                found.append(f"{best.title} {far}in *{workload.title}* ({figure(theirs)} beside {figure(ours)})")
    return f"**Ahead of django-delayq were** {'; '.join(found)}." if found else "No peer was ahead of django-delayq."


def goals(results: Results) -> Table:
    """Return a row for each goal that was measured; ratios are taken within a round."""
    rows = [["goal", "wanted", "measured", ""]]
    for goal in GOALS:
        beside = goal.beside or goal.workload
        values = results.each(goal.workload, OURS, goal.measure)
        if goal.system:
            values = results.ratios(goal.workload, goal.measure, beside, goal.system)
        if values:
            middle = statistics.median(values)
            is_met = middle <= goal.bound if goal.at_most else middle >= goal.bound
            name = f"{_TITLES[goal.workload]}: {goal.measure}"
            rows.append([name, _wanted(goal, beside), spread(values), "met" if is_met else "not met"])
    return rows


def _wanted(goal: Goal, beside: str) -> str:
    bound = f"{'≤' if goal.at_most else '≥'} {goal.bound:g}"
    if not goal.system:
        return bound
    return f"{bound} × {_TITLES[beside] if goal.system == OURS else BY_NAME[goal.system].title}"


def all_systems(results: Results) -> Table:
    """Return a row for each system with its medians: rates, and the lateness as p50 / p99."""
    workloads = list(_measured(results))
    rows = [["", *(workload.title for workload in workloads)]]
    for system in SYSTEMS:
        cells = [_cell(results, workload, system) for workload in workloads]
        if any(cell != "–" for cell in cells):
            rows.append([system.title, *cells])
    # A row for each workload is narrower.
    return [list(row) for row in zip(*rows, strict=True)] if len(rows) < len(rows[0]) else rows


def costs(results: Results) -> Table:
    """Return what a message costs: ours and the best peer on disk, by workload."""
    rows = [["µs of CPU for a message", "system", "process", "PostgreSQL", "Redis"]]
    for workload in _measured(results):
        best = _best(results, workload, next(iter(workload.measures)), durable=True)
        for system in [BY_NAME[OURS], *([best] if best else [])]:
            each = [results.each(workload.name, system.name, name) for name in ("client", "postgres", "redis")]
            if each[0]:
                rows.append([workload.title, system.title, *map(spread, each)])
    return rows


def failures(results: Results) -> str:
    return "\n".join(
        f"{BY_NAME[system].title} took no part in {workload}: {why}"
        for workload, systems in results.failures.items()
        for system, why in systems.items()
    )


def _measured(results: Results) -> Iterator[Workload]:
    return (workload for workload in WORKLOADS if OURS in results.rounds.get(workload.name, {}))


def _best(results: Results, workload: Workload, measure: str, durable: bool) -> System | None:
    found = {
        system: middle
        for system in SYSTEMS
        if system.kind == "peer" and system.durable == durable
        if (middle := results.median(workload.name, system.name, measure)) is not None
    }
    if not found:
        return None
    return (max if workload.more_is_better else min)(found, key=lambda system: found[system])


def _cell(results: Results, workload: Workload, system: System) -> str:
    names = ("rate",) if workload.more_is_better else ("p50", "p99")
    values = [results.median(workload.name, system.name, name) for name in names]
    return "–" if None in values else " / ".join(figure(value) for value in values if value is not None)
