"""Writes the results as tables on the terminal, as JSON, and as the results section of the docs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import captions, targets
from .measures import Results, at, levels, shown
from .systems import BY_NAME, FEATURES, SYSTEMS
from .workloads import WORKLOADS, Workload

PARTS = ("rounds", "failures")
BEGIN, END = ".. results: begin", ".. results: end"

Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its date, machine, size and rounds, and its results."""

    date: str
    machine: str
    size: str
    rounds: int
    versions: dict[str, str]
    results: Results
    # For each merged workload the line of the run that it comes from.
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"{self.date}, {self.machine}, size {self.size}, {rounds}. {versions}."


def workload_table(workload: Workload, results: Results) -> Table:
    """Return a row for each system that did the workload, with its measures."""
    found = results.rounds.get(workload.name, {})
    names = [system.name for system in SYSTEMS if system.name in found]
    head = ["system", *(f"{name}, {unit}" if unit else name for name, unit in workload.measures.items())]
    rows = [[BY_NAME[n].title, *(shown(results.spread(workload.name, n, m)) for m in workload.measures)] for n in names]
    return [head, *rows]


def growth_table(workload: Workload, results: Results) -> Table:
    """Return a row for each level, with the measures at it."""
    ours = targets.OURS
    by_level = levels(results.rounds[workload.name][ours][0])
    measures = [name.rpartition(", ")[::2] for name in by_level[min(by_level)]]
    head = [workload.grows, *(f"{name}, {unit}" for name, unit in measures)]
    rows = [
        [f"{level:,}", *(shown(results.spread(workload.name, ours, at(name, level, unit))) for name, unit in measures)]
        for level in by_level
    ]
    return [head, *rows]


def tables(workload: Workload, results: Results) -> list[Table]:
    """Return the tables of a workload."""
    found = [workload_table(workload, results)]
    return [*found, growth_table(workload, results)] if workload.grows else found


def features_table() -> Table:
    """Return the table of the systems' features."""
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
    known = {workload.name: workload for workload in WORKLOADS}
    rows = []
    for result in targets.evaluate(results):
        target = result.target
        if measured_only and result.met is None:
            continue
        beside = f" ({BY_NAME[result.beside].title})" if result.beside else ""
        workload = known[target.workload]
        name = f"{workload.title}: {target.measure}"
        if workload.grows:
            name += f", {workload.measures[target.measure]}"
        rows.append([name, target.text, result.measured + beside, result.word])
    return [["what", "wanted", "measured", "verdict"], *rows]


def as_text(table: Table) -> str:
    """Write a table as padded columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def as_rst(table: Table) -> str:
    """Write a table as a list-table of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in table:
        lines += [f"   {'*' if not number else ' '} - {cell}".rstrip() for number, cell in enumerate(row)]
    return "\n".join(lines)


def measured(results: Results) -> Iterable[Workload]:
    return (workload for workload in WORKLOADS if workload.name in results.rounds)


def to_terminal(run: Run) -> str:
    parts = [run.line]
    for w in measured(run.results):
        origin = f" (measured {run.origins[w.name]})" if w.name in run.origins else ""
        parts.append("\n\n".join([w.title + origin, *map(as_text, tables(w, run.results))]))
    for workload, failures in run.results.failures.items():
        parts += [f"{BY_NAME[system].title} could not do {workload}: {why}" for system, why in failures.items()]
    parts.append(f"What each system does\n{as_text(features_table())}")
    parts.append(f"Targets\n{as_text(targets_table(run.results, measured_only=True))}")
    return "\n\n".join(parts)


def to_rst(run: Run, pictures: Mapping[str, str]) -> str:
    """Write the results section. ``pictures`` maps file names to descriptions."""
    parts = [f"Measured {run.line} Medians of the rounds; in parentheses the least and the most."]
    if run.origins:
        parts.append("Sections with a date of their own are from other runs.")
    parts += [f".. image:: {name}\n   :alt: {shows}" for name, shows in pictures.items()]
    parts += [_headed("Targets", "-"), captions.TARGETS, as_rst(targets_table(run.results))]
    for workload in measured(run.results):
        parts += [_headed(workload.title, "-"), captions.CAPTIONS[workload.name]]
        if workload.name in run.origins:
            parts.append(f"Measured {run.origins[workload.name]}")
        parts += map(as_rst, tables(workload, run.results))
        if failures := run.results.failures.get(workload.name):
            parts.append("Could not: " + ", ".join(BY_NAME[name].title for name in failures) + ".")
    parts += [_headed("What each system does", "-"), captions.FEATURES, as_rst(features_table())]
    return "\n\n".join(parts)


def _headed(title: str, line: str) -> str:
    return f"{title}\n{line * len(title)}"


def to_json(run: Run) -> dict[str, Any]:
    return {
        **dataclasses.asdict(run),
        "targets": [
            {**dataclasses.asdict(result.target), "found": result.found, "met": result.met}
            for result in targets.evaluate(run.results)
        ],
    }


def read(file: Path) -> Run:
    """Read a run that was written as JSON."""
    data = json.loads(file.read_text())
    known = {workload.name for workload in WORKLOADS}
    results = Results(
        **{part: {w: found for w, found in data["results"][part].items() if w in known} for part in PARTS}
    )
    fields = ("date", "machine", "size", "rounds", "versions")
    return Run(**{name: data[name] for name in fields}, results=results, origins=data.get("origins", {}))


def merge(run: Run, earlier: Run) -> None:
    """Take over workloads that the run does not have, each as a whole: its systems were measured together."""
    has = {*run.results.rounds, *run.results.failures}
    for workload in ({*earlier.results.rounds, *earlier.results.failures}) - has:
        run.origins[workload] = earlier.origins.get(workload, earlier.line)
        for part in PARTS:
            if workload in getattr(earlier.results, part):
                getattr(run.results, part)[workload] = getattr(earlier.results, part)[workload]


def between_markers(text: str, section: str) -> str:
    """Return the text with its results section replaced."""
    head, begin, rest = text.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} … {END!r}")
    return f"{head}{BEGIN}\n\n{section}\n\n{END}{tail}"


def write_docs(page: Path, section: str) -> None:
    page.write_text(between_markers(page.read_text(), section))
