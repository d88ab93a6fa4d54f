"""Each name has one meaning: no two modules or packages and no two classes of the package share one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from .sources import SOURCES

# Django looks for these in each app.
DJANGOS_MODULES = {"admin", "apps", "checks", "commands", "management", "models", "urls"}
DJANGOS_CLASSES = {"Command", "Meta"}


def shared(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_modules_or_packages_share_a_name() -> None:
    names = (path.parent.name if path.stem == "__init__" else path.stem for path in SOURCES)
    assert shared(names) <= DJANGOS_MODULES


def test_no_two_classes_share_a_name() -> None:
    nodes = (node for tree in SOURCES.values() for node in ast.walk(tree))
    assert shared(node.name for node in nodes if isinstance(node, ast.ClassDef)) <= DJANGOS_CLASSES
