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
from typing import NamedTuple

import pytest
from importlinter import cli

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"

LAYERS = "Higher layers import lower ones, neighbours leave each other alone"
WORKER_PARTS = "The parts of a worker build on each other in one direction"
CIRCLE = "No modules import each other in a circle"
CONSOLE = "The queue never imports the console"
CONTRIB = "The queue never imports an integration"
TESTING = "Neither the queue nor the console imports the testing module"
RECURRING = "The queue never imports recurring messages"
REDIS = "Only the broker speaks Redis"
WORKER = "The worker reaches no search and no statistics"
RECORD = "The record reaches no Redis, by no detour either"
BROKER = "The Redis broker reaches no models"
MOVER = "The mover knows no models"
PROTOCOL = "Outside its package the broker is a protocol"


class Breach(NamedTuple):
    """An import that a module must not have, and the contract that forbids it."""

    contract: str
    module: str
    line: str


BREACHES = [
    Breach(LAYERS, "core/states.py", "from ..project import conf"),
    Breach(LAYERS, "core/states.py", "if TYPE_CHECKING:\n    from ..project import conf"),
    Breach(LAYERS, "models/workers.py", "def late():\n    from ..project import conf"),
    Breach(LAYERS, "inspector/stats.py", "from ..worker.upkeep import reaper"),
    Breach(LAYERS, "restore/engine.py", "from .. import extensions"),
    Breach(WORKER_PARTS, "worker/parts/delivery.py", "from ..run import executor"),
    Breach(WORKER_PARTS, "worker/upkeep/reaper.py", "from ..run import recorder"),
    Breach(CIRCLE, "core/durations.py", "from . import limits"),
    Breach(CONSOLE, "record/transitions.py", "from ..console import audit"),
    Breach(CONSOLE, "worker/upkeep/reaper.py", "from ...console.operations import operator"),
    Breach(CONTRIB, "worker/processes/process.py", "from ...contrib import prometheus"),
    Breach(TESTING, "broker/publisher.py", "from ..testing import helper"),
    Breach(RECURRING, "worker/processes/process.py", "from ...recurring import services"),
    Breach(REDIS, "api/scheduling.py", "import redis"),
    Breach(REDIS, "console/admin/health_page.py", "import redis"),
    Breach(REDIS, "management/commands/delayq_stats.py", "from django_redis import get_redis_connection"),
    Breach(WORKER, "worker/upkeep/reaper.py", "from ...inspector import stats"),
    Breach(RECORD, "record/transitions.py", "from ..broker import publisher"),
    Breach(BROKER, "broker/redis.py", "from .. import models"),
    Breach(PROTOCOL, "worker/upkeep/loader.py", "from ...broker.redis import RedisBroker"),
    Breach(MOVER, "worker/upkeep/mover.py", "from ...record import transitions"),
]

# A dotted path inside of the package.
PATH = re.compile(r"django_delayq(\.[a-z_]+)+(\.\w+)?")
LINT = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(no_cache=True))"


def test_the_code_keeps_the_contracts() -> None:
    # In a process of its own: the linter switches off the loggers that there are.
    lint = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert lint.returncode == cli.EXIT_STATUS_SUCCESS, lint.stdout + lint.stderr


def test_each_contract_is_broken_once() -> None:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == {breach.contract for breach in BREACHES}


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: f"{breach.module}: {breach.line}")
def test_a_forbidden_import_breaks_its_contract(breach: Breach, tmp_path: Path) -> None:
    shutil.copy(PYPROJECT, tmp_path)
    shutil.copytree(ROOT / "django_delayq", tmp_path / "django_delayq", ignore=_all_but_code)
    module = tmp_path / "django_delayq" / breach.module
    module.write_text(f"{module.read_text()}\n{breach.line}\n")
    lint = subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{breach.contract} BROKEN" in lint.stdout, lint.stdout + lint.stderr
    assert lint.returncode == cli.EXIT_STATUS_ERROR


def test_no_string_slips_past_the_contracts() -> None:
    """Only paths that the project's settings give are imported by a string, and no other module is named by one."""
    importers, named = set(), set()
    for path in sorted((ROOT / "django_delayq").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id in ("import_string", "import_module", "__import__"):
                importers.add(module)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value):
                named.add((module, node.value))
    assert importers == {"django_delayq.core.lazy", "django_delayq.middleware", "django_delayq.project.registry"}
    # An app names its own package, and a receiver of Django's signals its own module.
    assert {(module, name) for module, name in named if _is_module(name) and not module.startswith(name)} == set()


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir() or path.parent.with_suffix(".py").exists()


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name, "__init__.py").exists())]
