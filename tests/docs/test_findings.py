"""The page about the findings of ``delayq_check`` has each that the code can make, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import django_delayq

from .blocks import text_of

SOURCES = [*Path(django_delayq.__file__).parent.rglob("*.py")]


def made() -> dict[str, set[str]]:
    """The names of all findings in the code, each with the levels that its calls name."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for name, levels in in_function(function):
                    found.setdefault(name, set()).update(levels)
    return found


def in_function(function: ast.FunctionDef) -> Iterator[tuple[str, list[str]]]:
    """The findings that a function makes. A name stands in the call, or in a variable of the function."""
    named: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets, values = (
                one.elts if isinstance(one, ast.Tuple) else [one] for one in (node.targets[0], node.value)
            )
            pairs = zip(targets, values, strict=False)
            named |= {ast.unparse(target): text for target, value in pairs if (text := words(value))}
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="Finding"), args=[first, *rest]):
                name = words(first) or named[ast.unparse(first)]
                yield name, re.findall(r"Level\.(\w+)", " ".join(map(ast.unparse, rest)))


def words(node: ast.expr) -> str:
    """The text of a literal, marked for translation or not; empty for anything else."""
    match node:
        case ast.Constant(value=str(text)) | ast.Call(func=ast.Name(id="_"), args=[ast.Constant(value=str(text))]):
            return text
    return ""


def sections() -> dict[str, str]:
    """The sections of the page."""
    parts = re.split(r"^(.+)\n=+\n", text_of("howto/findings"), flags=re.MULTILINE)[3:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_finding_has_a_section_and_no_other_has() -> None:
    assert len(made()) > 10
    assert sections().keys() == made().keys()


def test_what_can_be_a_warning_is_told_as_one() -> None:
    only_warned = {name for name, levels in made().items() if "WARN" in levels and "CRITICAL" not in levels}
    assert {name for name in only_warned if "A warning" not in sections()[name]} == set()
    critical = {name for name, levels in made().items() if "CRITICAL" in levels}
    assert {name for name in critical if "ritical" not in sections()[name]} == set()
