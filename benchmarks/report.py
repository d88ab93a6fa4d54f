"""The results as a table on the terminal, as JSON, and as the results section of the docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import targets
from .measures import Results, shown
from .systems import BY_NAME, FEATURES, SYSTEMS
from .workloads import WORKLOADS, Workload

BEGIN, END = ".. results: begin", ".. results: end"

Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """When, where and how much was measured."""

    date: str
    machine: str
    size: str
    rounds: int
    versions: dict[str, str]
    results: Results

    @property
    def line(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {self.machine}, size {self.size}, {self.rounds} rounds. {versions}."


def workload_table(workload: Workload, results: Results) -> Table:
    """A row for each system that did it, and what it measured."""
    found = results.rounds.get(workload.name, {})
    names = [system.name for system in SYSTEMS if system.name in found]
    # Growth adds measures of its own, with their units in their names.
    extra = [m for name in names for m in found[name][0] if m not in workload.measures]
    measures = {**workload.measures, **dict.fromkeys(extra, "")}
    head = ["system", *(f"{name}, {unit}" if unit else name for name, unit in measures.items())]
    rows = [[BY_NAME[n].title, *(shown(results.spread(workload.name, n, m)) for m in measures)] for n in names]
    return [head, *rows]


def features_table() -> Table:
    """What each system does and does not do."""
    head = ["system", "on disk when scheduled", *FEATURES.values(), "besides"]
    rows = [
        [s.title, _yes(s.durable), *(_yes(feature in s.has) for feature in FEATURES), s.note]
        for s in SYSTEMS
        if s.kind != "floor"
    ]
    return [head, *rows]


def _yes(it_has: bool) -> str:
    return "yes" if it_has else "no"


def targets_table(results: Results, *, measured_only: bool = False) -> Table:
    titles = {workload.name: workload.title for workload in WORKLOADS}
    rows = []
    for verdict in targets.evaluate(results):
        target = verdict.target
        if measured_only and verdict.met is None:
            continue
        beside = f" ({BY_NAME[verdict.beside].title})" if verdict.beside else ""
        name = f"{titles[target.workload]}: {target.measure}"
        rows.append([name, target.text, verdict.measured + beside, verdict.word])
    return [["what", "wanted", "measured", "verdict"], *rows]


def as_text(table: Table) -> str:
    """Columns, padded."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def as_rst(table: Table) -> str:
    """A list-table."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in table:
        lines += [f"   {'*' if not number else ' '} - {cell}".rstrip() for number, cell in enumerate(row)]
    return "\n".join(lines)


def measured(results: Results) -> Iterable[Workload]:
    return (workload for workload in WORKLOADS if workload.name in results.rounds)


def to_terminal(run: Run) -> str:
    parts = [run.line]
    parts += [f"{w.title}\n{as_text(workload_table(w, run.results))}" for w in measured(run.results)]
    for workload, failures in run.results.failures.items():
        parts += [f"{BY_NAME[system].title} could not do {workload}: {why}" for system, why in failures.items()]
    parts.append(f"What they do\n{as_text(features_table())}")
    parts.append(f"Targets\n{as_text(targets_table(run.results, measured_only=True))}")
    return "\n\n".join(parts)


def to_rst(run: Run, pictures: Sequence[str]) -> str:
    """The results section."""
    parts = [f"Measured {run.line} Medians of the rounds; in parentheses the least and the most."]
    parts += [f".. image:: {name}\n   :alt: The rates and latenesses of the tables below as bars" for name in pictures]
    parts += [f"{_headed('Targets', '-')}\n\n{as_rst(targets_table(run.results))}"]
    for workload in measured(run.results):
        parts.append(f"{_headed(workload.title, '-')}\n\n{as_rst(workload_table(workload, run.results))}")
        if failures := run.results.failures.get(workload.name):
            parts.append("Could not: " + ", ".join(BY_NAME[name].title for name in failures) + ".")
    parts.append(f"{_headed('What they do', '-')}\n\n{as_rst(features_table())}")
    return "\n\n".join(parts)


def _headed(title: str, line: str) -> str:
    return f"{title}\n{line * len(title)}"


def to_json(run: Run) -> dict[str, Any]:
    return {
        **dataclasses.asdict(run),
        "targets": [
            {**dataclasses.asdict(verdict.target), "found": verdict.found, "met": verdict.met}
            for verdict in targets.evaluate(run.results)
        ],
    }


def between_markers(text: str, section: str) -> str:
    """The text with its results section replaced."""
    head, begin, rest = text.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} … {END!r}")
    return f"{head}{BEGIN}\n\n{section}\n\n{END}{tail}"


def write_docs(page: Path, section: str) -> None:
    page.write_text(between_markers(page.read_text(), section))
