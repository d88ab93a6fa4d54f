"""``python -m benchmarks.page``: draw the pictures of the performance page again, from the tables of the page.

A section of the page may be of another run than the others. So the pictures are always drawn from the page, and show
what its tables say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from . import picture
from .driver import ROOT
from .measures import Measures, Results, at
from .systems import SYSTEMS
from .targets import OURS
from .workloads import WORKLOADS

DOCS = ROOT / "docs" / "explanation"
PAGE = DOCS / "performance.rst"
PICTURE = DOCS / "performance.svg"
GROWTH = DOCS / "growth.svg"

_HEADING = re.compile(r"(?m)^(\S.*)\n-{4,}$")
_TABLE = re.compile(r"(?m)^\.\. list-table::\n   :header-rows: 1\n\n((?:   .*\n)+)")
_CELL = re.compile(r"(?m)^   ([* ]) - ?(.*)$")
# What a system does early is below 0.
_FIGURE = re.compile(r"(-?[\d,.]+)(?: \((-?[\d,.]+)–(-?[\d,.]+)\))?")


def results(text: str) -> Results:
    """Return what the tables of a page say: two rounds more than the median when it has a spread."""
    found = Results()
    sections = _sections(text)
    # A page has its sections in the order of the workloads, some of which have the same title.
    for workload in WORKLOADS:
        section = next((section for title, section in sections if title == workload.title), None)
        if section is None:
            continue
        del sections[: 1 + sections.index((workload.title, section))]
        tables = [_table(table) for table in _TABLE.findall(section)]
        for name, *cells in tables[0][1:]:
            system = next(system.name for system in SYSTEMS if system.title == name)
            rounds: list[Measures] = [{}, {}, {}]
            for measure, cell in zip(workload.measures, cells, strict=True):
                for measures, value in zip(rounds, _values(cell), strict=False):
                    measures[measure] = value
            for measures in rounds:
                found.add(workload.name, system, measures)
        if workload.grows:
            for measures in found.rounds[workload.name][OURS]:
                measures |= dict(_grown(tables[1]))
    return found


def draw() -> None:
    """Draw both pictures from the page."""
    said = results(PAGE.read_text())
    PICTURE.write_text(picture.draw(said))
    GROWTH.write_text(picture.draw_growth(said))


def _sections(text: str) -> list[tuple[str, str]]:
    """Return the titles of the sections, each with what follows it."""
    headings = [*_HEADING.finditer(text)]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return [(heading[1], text[heading.end() : end]) for heading, end in zip(headings, ends, strict=True)]


def _table(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for mark, cell in _CELL.findall(text):
        if mark == "*":
            rows.append([])
        rows[-1].append(cell)
    return rows


def _values(cell: str) -> list[float]:
    """Return the values of a figure: none, the only one, or the least, the median and the most."""
    match = _FIGURE.fullmatch(cell)
    if match is None:
        return []
    median, least, most = (None if text is None else float(text.replace(",", "")) for text in match.groups())
    return [value for value in (least, median, most) if value is not None]


def _grown(rows: list[list[str]]) -> Iterator[tuple[str, float]]:
    """Yield the measures of a growth table."""
    head, *levels = rows
    for level, *cells in levels:
        for title, cell in zip(head[1:], cells, strict=True):
            name, _comma, unit = title.rpartition(", ")
            if values := _values(cell):
                yield at(name, int(level.replace(",", "")), unit), values[len(values) // 2]


if __name__ == "__main__":
    draw()
