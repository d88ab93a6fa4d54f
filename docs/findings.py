"""Reads from the code which findings ``delayq_check`` can have, how bad each can be, and what it advises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "django_delayq"


@dataclass
class Known:
    """What the code says of one finding. The line is the first that makes it worse than *ok*, if any does."""

    line: int = 0
    levels: set[str] = field(default_factory=set)
    advice: list[str] = field(default_factory=list)


@cache
def findings() -> dict[str, Known]:
    """Return the findings that the code makes, by name, as they come in the code."""
    found: dict[str, Known] = {}
    # What the pages of the console find themselves is no line of the command.
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "console" / "admin")
    for place, path in enumerate(paths):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for name, levels, advice, line in _in(function):
                    known = found.setdefault(name, Known())
                    known.line = known.line if known.levels - {"OK"} else place * 10_000 + line
                    known.levels |= levels
                    known.advice += [text for text in advice if text not in known.advice]
    return dict(sorted(found.items(), key=lambda item: item[1].line))


def _in(function: ast.FunctionDef) -> Iterator[tuple[str, set[str], list[str], int]]:
    """Yield the findings that a function makes: each with its name, levels, advice and line."""
    given = _Given(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
            name, level, *_rest = map(given.meaning, node.args)
            advice = [word.value for word in node.keywords if word.arg == "advice"] + node.args[4:]
            texts = [text for text in map(_words, map(given.meaning, advice)) if text]
            yield _words(name), set(re.findall(r"Level\.(\w+)", ast.unparse(level))), texts, node.lineno


class _Given:
    """What a function assigns to its variables."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._values: list[tuple[str, ast.expr]] = []
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                targets, values = (one.elts if isinstance(one, ast.Tuple) else [one] for one in (target, value))
                self._values += zip(map(ast.unparse, targets), values, strict=False)

    def meaning(self, node: ast.expr) -> ast.expr:
        """Return an expression, or for a variable what was assigned to it last before that line."""
        name = ast.unparse(node)
        before = [value for variable, value in self._values if variable == name and value.lineno <= node.lineno]
        return max(before, key=lambda value: value.lineno, default=node)


def _words(node: ast.expr) -> str:
    """Return the text of a literal, marked for translation or not; empty for anything else."""
    match node:
        case ast.Constant(value=str(text)) | ast.Call(func=ast.Name(id="_"), args=[ast.Constant(value=str(text))]):
            return text
        case ast.IfExp(body=body):
            return _words(body)
    return ""
