"""Each name has one meaning: no two modules and no two classes of the package share one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from .sources import SOURCES

# Django looks for these in each app.
DJANGOS_MODULES = {"__init__", "admin", "apps", "checks", "models"}
DJANGOS_CLASSES = {"Command", "Meta"}


def shared(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_modules_share_a_name() -> None:
    assert shared(path.stem for path in SOURCES) <= DJANGOS_MODULES


def test_no_two_classes_share_a_name() -> None:
    nodes = (node for tree in SOURCES.values() for node in ast.walk(tree))
    assert shared(node.name for node in nodes if isinstance(node, ast.ClassDef)) <= DJANGOS_CLASSES
