"""Writes the tables of the documentation that say what the code says: ``python -m docs.tables``.

The texts are the comments above the settings, the moves and the verdicts in the code, and what findings advise.
A table stands in a page between ``.. settings: begin HORIZON GRACE`` and ``.. settings: end``; names behind *begin*
choose the rows.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
django.setup()

from django_delayq.core import states, verdicts  # noqa: E402
from django_delayq.core.retry import RetryPolicy  # noqa: E402
from django_delayq.management import _common as commands  # noqa: E402
from django_delayq.project import conf, console_conf, http_conf  # noqa: E402

from . import findings  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120

Row = tuple[str, ...]
_MARKED = re.compile(r"(^\.\. ([\w-]+): begin(.*)\n\n)(?:.*\n)*?(\n?\.\. \2: end$)", re.MULTILINE)


def comments(module: ModuleType, owner: str) -> dict[str, str]:
    """Return the comment above each member of a class or a dict, by the member as the source has it."""
    source = inspect.getsource(module)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        members: Iterable[tuple[ast.expr, int]] = ()
        match node:
            case ast.ClassDef(name=name, body=body) if name == owner:
                members = [(one.target, one.lineno) for one in body if isinstance(one, ast.AnnAssign)]
                members += [(one.targets[0], one.lineno) for one in body if isinstance(one, ast.Assign)]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)) if name == owner:
                members = [(key, key.lineno) for key in keys if key is not None]
        for member, number in members:
            text: list[str] = []
            while (line := lines[number - 2 - len(text)].strip()).startswith("# "):
                text.insert(0, line[2:])
            found[ast.unparse(member)] = " ".join(text)
    return found


def default(value: Any) -> str:
    """Return the default of a setting as a project would write it."""
    if isinstance(value, RetryPolicy):
        return "RetryPolicy.exponential()"
    if isinstance(value, float):
        unit, size = next(((u, s) for u, s in (("d", 86_400), ("h", 3600), ("m", 60)) if not value % s), ("s", 1))
        return f'"{value / size:g}{unit}"'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def settings(module: ModuleType, owner: type[Any], names: list[str]) -> tuple[Row, list[Row]]:
    """Make the table of these settings."""
    texts, defaults = comments(module, owner.__name__), owner._field_defaults
    rows = [(f"``{name}``", f"``{default(defaults[name])}``", texts[name]) for name in names or defaults]
    return ("setting", "default", "meaning"), rows


def moves(names: list[str]) -> tuple[Row, list[Row]]:
    """Make the table of the moves between states."""
    texts = list(comments(states, "MOVES").values())
    words = [f"{'' if before is None else before.value} → {after.value}".strip() for before, after in states.MOVES]
    return ("move", "when"), list(zip(words, texts, strict=True))


def all_verdicts(names: list[str]) -> tuple[Row, list[Row]]:
    """Make the table of verdicts."""
    rows = [(f"``{name}``", text) for name, text in comments(verdicts, "Verdict").items()]
    return ("verdict", "meaning"), rows


def exit_codes(names: list[str]) -> tuple[Row, list[Row]]:
    """Make the table of the exit codes of commands."""
    return ("code", "meaning"), [(str(code), text) for code, text in commands.MEANINGS.items()]


def all_findings(names: list[str]) -> tuple[Row, list[Row]]:
    """Make the table of the findings of ``delayq_check``."""
    kinds = {"WARN": "a warning", "CRITICAL": "critical"}
    rows = [
        (
            f"`{name}`_",
            " or ".join(word for level, word in kinds.items() if level in known.levels) or "no more than a word",
            "; or: ".join(known.advice) or "–",
        )
        for name, known in findings.findings().items()
    ]
    return ("finding", "at worst", "what the line advises"), rows


TABLES: Mapping[str, Callable[[list[str]], tuple[Row, list[Row]]]] = {
    "settings": partial(settings, conf, conf.Settings),
    "console-settings": partial(settings, console_conf, console_conf.ConsoleSettings),
    "http-settings": partial(settings, http_conf, http_conf.HttpSettings),
    "moves": moves,
    "verdicts": all_verdicts,
    "exit-codes": exit_codes,
    "findings": all_findings,
}


def drawn(head: Row, rows: list[Row]) -> str:
    """Draw a simple table, whose last column is wrapped."""
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head) - 1)]
    widths.append(WIDTH - sum(widths) - 2 * len(widths))
    line = "  ".join("=" * width for width in widths)
    drawn_rows = [line, _drawn_row(head, widths), line]
    for *cells, text in rows:
        first, *more = textwrap.wrap(text, widths[-1], break_long_words=False, break_on_hyphens=False)
        drawn_rows += [_drawn_row((*cells, first), widths)]
        drawn_rows += [_drawn_row((*[""] * len(cells), part), widths) for part in more]
    return "\n".join([*drawn_rows, line, ""])


def _drawn_row(cells: Iterable[str], widths: list[int]) -> str:
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def with_tables(page: str) -> str:
    """Return the text of a page with its tables as the code has them."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            return found[0]
        return found[1] + drawn(*TABLES[found[2]](found[3].split())) + "\n" + found[4].lstrip()

    return _MARKED.sub(made, page)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.rst", *sorted((ROOT / "docs").rglob("*.rst"))]


def main() -> None:
    """Write all tables."""
    for path in pages():
        page = path.read_text(encoding="utf-8")
        if (made := with_tables(page)) != page:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
