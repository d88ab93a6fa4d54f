"""The import contracts of pyproject.toml: the code keeps them, and every kind of breach is found."""

from __future__ import annotations

import os
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
    Breach(LAYERS, "core/states.py", "from . import conf"),
    Breach(LAYERS, "inspector/stats.py", "from ..worker import reaper"),
    Breach(CONSOLE, "record/transitions.py", "from .console import audit"),
    Breach(CONSOLE, "worker/upkeep/reaper.py", "from ..console.operations import operator"),
    Breach(CONTRIB, "worker/processes/process.py", "from ..contrib import prometheus"),
    Breach(TESTING, "broker/publisher.py", "from .testing import helper"),
    Breach(RECURRING, "worker/processes/process.py", "from ..recurring import extension"),
    Breach(REDIS, "broker/publisher.py", "import redis"),
    Breach(REDIS, "console/admin/health_page.py", "import redis"),
    Breach(REDIS, "management/commands/delayq_stats.py", "from django_redis import get_redis_connection"),
    Breach(WORKER, "worker/upkeep/reaper.py", "from ..inspector import stats"),
    Breach(RECORD, "record/transitions.py", "from . import publisher"),
    Breach(BROKER, "broker/redis.py", "from .. import models"),
    Breach(PROTOCOL, "worker/upkeep/loader.py", "from ..broker.redis import RedisBroker"),
    Breach(MOVER, "worker/upkeep/mover.py", "from .. import transitions"),
]

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


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name, "__init__.py").exists())]
