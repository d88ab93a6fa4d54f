"""The import contracts of pyproject.toml: the code keeps them, and every kind of breach is found."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter import cli

from tests.support.workers import ROOT

from .sources import PACKAGE, TREES, name_of

PYPROJECT = ROOT / "pyproject.toml"

# Imports that modules must not have, by the contract that forbids them.
BREACHES = {
    "Higher layers import lower ones, neighbours leave each other alone": [
        ("core/states.py", "from ..project import conf"),
        ("core/states.py", "if TYPE_CHECKING:\n    from ..project import conf"),
        ("models/workers.py", "def late():\n    from ..project import conf"),
        ("inspector/stats.py", "from ..worker.upkeep import reaper"),
        ("restore/engine.py", "from .. import extensions"),
        ("worker/upkeep/reaper.py", "from ...pull import taking"),
    ],
    "The parts of a worker build on each other in one direction": [
        ("worker/shared/guard.py", "from ..run import executor"),
        ("worker/upkeep/reaper.py", "from ..claim import consumer"),
    ],
    "No modules import each other in a circle": [("core/durations.py", "from . import limits")],
    "The queue never imports the console": [
        ("record/transitions.py", "from ..console import audit"),
        ("worker/upkeep/reaper.py", "from ...console.operations import operator"),
    ],
    "The queue never imports an integration": [("worker/processes/process.py", "from ...contrib import prometheus")],
    "Neither the queue nor the console imports the testing module": [
        ("broker/publisher.py", "from ..testing import helper")
    ],
    "The queue never imports recurring messages": [
        ("worker/processes/process.py", "from ...recurring import services")
    ],
    "Only the broker speaks Redis": [
        ("api/scheduling.py", "import redis"),
        ("console/admin/health_page.py", "import redis"),
        ("management/commands/delayq_stats.py", "from django_redis import get_redis_connection"),
    ],
    "The worker reaches no search and no statistics": [("worker/upkeep/reaper.py", "from ...inspector import stats")],
    "The record reaches no Redis, by no detour either": [("record/transitions.py", "from ..broker import publisher")],
    "The Redis broker reaches no models": [("broker/redis.py", "from .. import models")],
    "Nobody outside its package imports the modules of the broker": [
        ("worker/upkeep/loader.py", "from ...broker.redis import RedisBroker")
    ],
    "The mover knows no models": [("worker/upkeep/mover.py", "from ...record import transitions")],
}

# A dotted path inside of the package.
PATH = re.compile(r"django_delayq(\.[a-z_]+)+(\.\w+)?")
LINT = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the code in a folder, in a process of its own: the linter switches off the loggers that there are."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_code_keeps_the_contracts() -> None:
    checked = lint(ROOT)
    assert checked.returncode == cli.EXIT_STATUS_SUCCESS, checked.stdout + checked.stderr


def test_each_forbidden_import_is_found_in_the_contract_that_forbids_it(tmp_path: Path) -> None:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == BREACHES.keys()
    shutil.copy(PYPROJECT, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "django_delayq", ignore=_all_but_code)
    lines = []
    for contract, module, line in [(contract, *breach) for contract, some in BREACHES.items() for breach in some]:
        file = tmp_path / "django_delayq" / module
        file.write_text(f"{file.read_text()}\n{line}\n")
        number = len(file.read_text().splitlines())
        # A circle has no line numbers.
        lines.append((contract, rf"\.{file.stem} -> \S+ \((.*\bl\.{number}\b|1 import)"))
    checked = lint(tmp_path)
    assert checked.returncode == cli.EXIT_STATUS_ERROR
    for contract, found in lines:
        told = checked.stdout.partition(f"\n{contract}\n{'-' * len(contract)}\n")[2].partition("\n---")[0]
        assert re.search(found, told), f"{contract}: {found} is not in\n{told}"


def test_only_one_module_moves_the_states_of_messages() -> None:
    movers = {name_of(path) for path, tree in TREES.items() if _moves(tree)}
    # The second one moves the states of operations, and a migration makes functions of the database that move messages.
    assert {name for name in movers if not name.startswith(("record/sql/", "migrations/"))} == {
        "record/transitions.py",
        "console/operations/lifecycle.py",
    }


@pytest.mark.parametrize(
    "code",
    [
        "from .sql.moves import Decision, move",
        "from .sql import moves\nmoves.move(using, where, decide)",
        "from ..record.sql.postgresql import PostgreSQL",
        "statements(using).fail(failures, wait=False)",
        "own = limit_statements(using)\nown.promote(promoted, actor)",
        "sql.statements(using).fail(failures)",
        "from .sql import statements as own\nown(using).fail(failures)",
        "Message.objects.using(using).filter(pk=pk).update(state=State.DEAD)",
        "rows.update(state=State.DEAD)",
        "rows.update(**{'state': State.DEAD})",
        "cursor.execute(f'UPDATE delayq_message SET {values}')",
    ],
)
def test_another_module_that_moves_a_state_is_noticed(code: str) -> None:
    assert _moves(ast.parse(code))


# The verbs of statements that move a state.
MOVES = {"insert", "insert_many", "claim", "succeed", "fail", "limit", "promote"}
STATEMENTS = {"statements", "limit_statements"}
# The modules that nobody but the statements' own package may use.
OF_STATEMENTS = {"postgresql", "portable", "postgresql_limited"}


def _moves(tree: ast.AST) -> bool:
    """Tell whether code outside of the statements' own package moves states."""
    nodes = list(ast.walk(tree))
    own = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_statements(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return any(_is_move(node, own) for node in nodes)


def _is_statements(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STATEMENTS


def _is_move(node: ast.AST, own: set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").rpartition(".")[2]
        names = {name.name for name in node.names}
        of_sql = OF_STATEMENTS | {"moves"} if module == "sql" else {"move"} if module == "moves" else set()
        # By another name the calls of them would not be found.
        renamed = {name.name for name in node.names if name.asname} & STATEMENTS
        return module in OF_STATEMENTS or bool(names & of_sql or renamed)
    if isinstance(node, ast.Constant):
        return "UPDATE delayq_message" in str(node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "update":
        given = {keyword.arg for keyword in node.keywords}
        unpacked = [key for one in node.keywords if isinstance(one.value, ast.Dict) for key in one.value.keys]
        return "state" in given or any(isinstance(key, ast.Constant) and key.value == "state" for key in unpacked)
    whose = node.func.value
    return node.func.attr in MOVES and (_is_statements(whose) or (isinstance(whose, ast.Name) and whose.id in own))


def test_no_string_slips_past_the_contracts() -> None:
    """Only paths that the project's settings give are imported by a string, and no other module is named by one."""
    importing = {"import_string", "import_module", "__import__"}
    assert {name_of(path) for path, tree in TREES.items() if importing & _names(tree)} == {
        # A pickled task names its function, as each pickle does.
        "contrib/tasks/task.py",
        "core/lazy.py",
        "middleware.py",
        "project/registry.py",
    }
    for path, tree in TREES.items():
        own = ".".join(["django_delayq", *path.relative_to(PACKAGE).with_suffix("").parts])
        # An app names its own package, and a receiver of Django's signals its own module.
        others = {text for text in _strings(tree) if PATH.fullmatch(text) and not own.startswith(text)}
        assert {text for text in others if _is_module(text)} == set()


def test_what_is_loaded_at_first_use_slips_past_no_contract() -> None:
    loading = {name_of(path): tree for path, tree in TREES.items() if "at_first_use" in _names(tree)}
    assert loading.keys() == LOADING
    # A package has names of its own.
    assert {name for name, tree in loading.items() if _slipping(tree) - {name.partition("/")[0]}} == set()


@pytest.mark.parametrize("target", ["..console.audit", "console.audit"])
def test_a_slip_at_first_use_is_noticed(target: str) -> None:
    assert _slipping(ast.parse(f'load = at_first_use(__name__, {{"X": "{target}"}})')) == {target}


# The modules that have others loaded at first use, and the packages that none of these may reach by that.
LOADING = {
    *("__init__.py", "extensions.py", "pull/__init__.py", "recurring/__init__.py", "testing/__init__.py"),
    "console/admin/site.py",
}
APART = {"console", "contrib", "pull", "recurring", "testing"}


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _slipping(tree: ast.AST) -> set[str]:
    names = {text for text in _strings(tree) if re.fullmatch(r"[\w.]+", text)}
    return {name for name in names if name.startswith("..") or name.partition(".")[0] in APART}


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir() or path.parent.with_suffix(".py").exists()


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name, "__init__.py").exists())]
