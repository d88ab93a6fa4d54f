"""Measures of the rounds, and their summary."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

Measures = dict[str, float]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the sorted values does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the least and the most of the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def at(name: str, level: int, unit: str) -> str:
    """Return the name of a measure that was taken at a level of a growth workload."""
    return f"{name} at {level:,}, {unit}"


def levels(measures: Measures) -> dict[int, Measures]:
    """Return the measures by level; the unit stays in the name."""
    found: dict[int, Measures] = {}
    for measure, value in measures.items():
        if match := _AT.fullmatch(measure):
            name, level, unit = match.groups()
            found.setdefault(int(level.replace(",", "")), {})[f"{name}, {unit}"] = value
    return found


_AT = re.compile(r"(.+) at ([\d,]+), (.+)")


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

    def spread(self, workload: str, system: str, measure: str) -> Spread | None:
        """Return the spread over the rounds; None when it was not measured."""
        values = self.each(workload, system, measure)
        return Spread.of(values) if values else None

    def each(self, workload: str, system: str, measure: str) -> list[float]:
        """Return the values of all rounds that measured it. "client + servers" is the sum of two measures."""
        names = measure.split(" + ")
        rounds = self.rounds.get(workload, {}).get(system, [])
        return [sum(found[name] for name in names) for found in rounds if found.keys() >= set(names)]

    def first(self, workload: str, system: str, measure: str) -> float | None:
        """Return the value of the first round, so that decisions based on it hold for all rounds."""
        rounds = self.rounds.get(workload, {}).get(system, [])
        return rounds[0].get(measure) if rounds else None

    def median(self, workload: str, system: str, measure: str) -> float | None:
        spread = self.spread(workload, system, measure)
        return None if spread is None else spread.median


def figure(value: float) -> str:
    """Write a number with three digits and separators: 17,400 · 4.12 · 0.038."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{digits}f}"


def shown(spread: Spread | None, unit: str = "") -> str:
    """Write a spread as ``17,400 (16,900–18,200)``, or as the median alone when the rounds agree."""
    if spread is None:
        return "–"
    median, least, most = map(figure, (spread.median, spread.least, spread.most))
    return f"{median}{unit}" if least == most else f"{median}{unit} ({least}–{most})"
