"""No queryset of the package joins the view of the log: joined by message, it reads all messages for each of them.

``Transition`` is asked about messages whose ids are known. Whoever asks about rows of a queryset asks ``LogRow`` by its
key, and the columns in which messages keep their own moves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .sources import PACKAGE, TREES, name_of

# The model itself, and the statements that make the view.
EXCUSED = {PACKAGE / name for name in ("models/messages.py", "models/log_view.py", "migrations/0001_initial.py")}
# What ties a queryset to the rows of another one.
TIES = {"OuterRef", "Exists", "Subquery", "select_related", "prefetch_related"}
# Lookups that follow the relation, from either end.
ACROSS = ("transitions__", "message__")


def joins(tree: ast.AST) -> Iterator[str]:
    """Yield the places that would join the view."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and (node.arg or "").startswith(ACROSS):
            yield f"line {node.value.lineno}: {node.arg}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(ACROSS) or "delayq_transition" in node.value:
                yield f"line {node.lineno}: {node.value}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            if "Transition" in names and TIES & names:
                yield f"line {node.lineno}: {node.name} uses Transition with {', '.join(sorted(TIES & names))}"


def test_no_queryset_of_the_package_joins_the_view_of_the_log() -> None:
    found = [
        f"{name_of(path)}, {place}" for path, tree in TREES.items() if path not in EXCUSED for place in joins(tree)
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return Exists(Transition.objects.filter(message=OuterRef('pk')))",
        "def f():\n    return models.Transition.objects.select_related('message')",
        "Message.objects.filter(transitions__at__gt=at)",
        "Message.objects.order_by('transitions__at')",
        "Transition.objects.filter(message__state='dead')",
        "cursor.execute('SELECT 1 FROM delayq_message JOIN delayq_transition ON true')",
    ],
)
def test_a_join_would_be_noticed(source: str) -> None:
    assert [*joins(ast.parse(source))]
