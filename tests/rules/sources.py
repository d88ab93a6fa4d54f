"""The files of the package, and a program run on its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import django_delayq
from tests.support.workers import PATIENCE, ROOT

PACKAGE = Path(django_delayq.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
# Migrations stand alone, and repeat what others have.
SOURCES = {path: tree for path, tree in TREES.items() if path.parent.name != "migrations"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


# The beginning of a program that uses the package as a project does.
SET_UP = """
import json, sys
from io import StringIO

import django

django.setup()

from django.core.management import call_command
from django_delayq import handler, schedule_message
from django_delayq.models import Message


def run(*words):
    out = StringIO()
    call_command(*words, stdout=out, no_color=True)
    return out.getvalue()


run("migrate", "--verbosity", "0")
"""


def report_of(program: str, environment: dict[str, str]) -> Any:
    """Run a program in a process of its own, and return what it prints as JSON at its end."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
