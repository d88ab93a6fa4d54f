"""What the page of comparison says of us is shown by tests and pages that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from .blocks import PAGES, ROOT, text_of

_TEST = re.compile(r"``(tests/[\w/]+\.py)(?:::(\w+))?``")


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def rows() -> list[tuple[str, str]]:
    """What we have, and what shows it."""
    listed = text_of("explanation/compared").partition("\nUs\n==\n")[2].partition("\nWhat we have not")[0]
    found = re.findall(r"^(\S.+)\n((?:   .+\n)+)", listed, re.MULTILINE)
    assert len(found) > 10
    return found


@pytest.mark.parametrize(("what", "shown"), rows(), ids=[what for what, _shown in rows()])
def test_each_thing_that_we_have_is_shown_by_a_test_or_a_benchmark(what: str, shown: str) -> None:
    named = [function for _path, function in _TEST.findall(shown)]
    assert all(name.startswith("test_") for name in named)
    environments = re.findall(r"``tox -e (\w+)``", shown)
    tox = (ROOT / "tox.ini").read_text("utf-8")
    assert all(f"[testenv:{name}" in tox for name in environments)
    assert named or environments or shown.strip() == ":doc:`performance`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_test_that_a_page_names_exists(page: Path) -> None:
    for path, function in _TEST.findall(page.read_text("utf-8")):
        assert (ROOT / path).is_file(), path
        assert not function or function in functions_of(path), f"{path}::{function}"


def test_each_system_has_its_version_and_its_source() -> None:
    page = text_of("explanation/compared")
    systems, sources = (page.partition(f"\n{title}\n")[2] for title in ("Others", "Where that was read"))
    compared = re.findall(r"^   \* - (\w[\w-]*)", systems.partition("Where that was read")[0], re.MULTILINE)
    assert re.findall(r"^   \* - (\w[\w-]*)", sources, re.MULTILINE) == compared
