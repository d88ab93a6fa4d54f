"""The package uses no private part of its dependencies, but for those that CONTRIBUTING lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from asgiref.sync import SyncToAsync
from django.db import connection, transaction

from tests.support.workers import ROOT

from .sources import TREES, name_of

LISTED = {"_sock"}
# Names of Django's connections and querysets that its documentation does not have, of its models, and of asgiref, that
# do not look private.
OF_CONNECTIONS = {"run_on_commit", "savepoint_ids", "atomic_blocks", "commit_on_exit", "needs_rollback"} | {
    *("errors_occurred", "validate_no_broken_transaction"),
}
OF_ASGIREF = {"context_to_thread_executor", "thread_sensitive_context"}
LISTED_UNDOCUMENTED = OF_CONNECTIONS | OF_ASGIREF
UNDOCUMENTED = LISTED_UNDOCUMENTED | {"closed_in_transaction", "combinator", "ModelState"}
# With an underscore, and documented all the same: by Django, by namedtuple, by Python.
DOCUMENTED = {"_meta", "_state", "_base_manager", "_default_manager", "_replace", "_make", "_asdict", "_fields"} | {
    "_field_defaults",
    "_exit",
    "_current_frames",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def used_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of attributes and imports in code that runs: what is for type checkers only, does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names, level=0):
                yield from (alias.name for alias in names)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
                yield name
        yield from used_names(node)


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the code defines: functions, classes, variables, and attributes that it sets on itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name


USES = {path: set(used_names(tree)) for path, tree in TREES.items()}
OURS = {name for tree in TREES.values() for name in own_names(tree)}


def test_no_private_part_is_used_but_those_that_are_listed() -> None:
    used = set().union(*USES.values())
    assert {name for name in used if is_private(name)} - OURS - DOCUMENTED == LISTED
    assert used & UNDOCUMENTED == LISTED_UNDOCUMENTED


def test_the_list_names_them_all_and_the_files_that_use_them() -> None:
    text = (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8")
    listed = text.partition("Private parts of others\n")[2].partition("\nTranslations\n")[0]
    for name in LISTED | LISTED_UNDOCUMENTED:
        assert name in listed
        for path, used in USES.items():
            if name in used:
                assert f"``{name_of(path)}``" in listed, (name, path)


def test_the_installed_redis_py_has_them() -> None:
    assert "_sock" in vars(redis.Connection())


def test_the_installed_asgiref_has_them() -> None:
    assert vars(SyncToAsync).keys() >= OF_ASGIREF


@pytest.mark.django_db(transaction=True)
def test_the_installed_django_has_them() -> None:
    assert {name for name in OF_CONNECTIONS if not hasattr(connection, name)} == set()

    def later() -> None:
        pass

    with transaction.atomic():
        transaction.on_commit(later, robust=True)
        waiting: list[Any] = connection.run_on_commit
        assert waiting == [(set(connection.savepoint_ids), later, True)]
