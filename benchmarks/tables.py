"""Tables on the terminal and in the documentation."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

from .systems import HERE

PAGE = HERE.parent / "docs" / "explanation" / "performance.rst"

Table = list[list[str]]


def as_text(table: Table) -> str:
    """Write a table as padded columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def as_rst(table: Table) -> str:
    """Write a table in reStructuredText."""
    widths = [max(1, *(len(row[column]) for row in table)) for column in range(len(table[0]))]
    rule = "  ".join("=" * width for width in widths)
    # An empty first column would join a row to the one above.
    cells = [[row[0] or "\\", *row[1:]] for row in table]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    head, *body = [row.rstrip() for row in rows]
    return "\n".join([rule, head, rule, *body, rule])


def cores() -> str:
    """Return a description of this machine."""
    return f"{len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else platform.machine()


def measured_on(machine: str) -> str:
    """Return when and where this is measured."""
    return f"measured {datetime.now(UTC):%Y-%m-%d} on {machine}"


def write_docs(name: str, text: str) -> None:
    """Replace what the page has between the comments of this name."""
    begin, end = f".. {name}: begin", f".. {name}: end"
    head, found, rest = PAGE.read_text().partition(begin)
    _old, ended, tail = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{PAGE.name} has no {begin!r} … {end!r}")
    PAGE.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")
