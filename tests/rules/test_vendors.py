"""Only the statements ask for the vendor of a database."""

from __future__ import annotations

import ast

from .sources import PACKAGE, SOURCES, name_of

# The homes of all that depends on the vendor.
HOMES = {PACKAGE / "record/sql", PACKAGE / "console/statements"}


def test_no_module_outside_the_statements_asks_for_the_vendor() -> None:
    asked = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in SOURCES.items()
        if not HOMES.intersection(path.parents)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "vendor"
    ]
    assert asked == []
