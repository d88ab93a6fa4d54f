"""Only the statements ask for the vendor of a database."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import django_delayq

PACKAGE = Path(django_delayq.__file__).parent
# The homes of all that depends on the vendor. A migration must stand alone, so it may ask by itself.
HOMES = {PACKAGE / "record/sql", PACKAGE / "console/statements"}
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent.name != "migrations" and not HOMES.intersection(path.parents)
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_outside_the_statements_asks_for_the_vendor(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    asked = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr == "vendor"]
    assert asked == []
