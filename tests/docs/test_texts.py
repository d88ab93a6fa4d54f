"""The README and the reference name every public thing, and no thing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from django_delayq import checks
from django_delayq.contrib.tasks import backend
from django_delayq.core import states
from django_delayq.core.verdicts import Verdict
from django_delayq.project import conf
from django_delayq.testing import setting

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.rst").read_text()
COMMANDS = sorted(path.stem for path in (ROOT / "django_delayq/management/commands").glob("[!_]*.py"))


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.rst").read_text()


def test_the_readme_has_the_diagram_of_the_states() -> None:
    diagram = states.__doc__.partition("::\n\n")[2].rstrip() if states.__doc__ else ""

    assert "claim" in diagram
    assert diagram in README


def test_every_check_is_described() -> None:
    sources = "".join(Path(module.__file__ or "").read_text() for module in (checks, conf, setting, backend))
    raised = set(re.findall(r"\b([EW]\d{3})\b", sources))

    assert {f"delayq.{number}" for number in raised} == set(re.findall(r"``(delayq\.\w+)``", page("reference/checks")))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_described(command: str) -> None:
    assert f"``{command}``" in README
    assert f"``{command}``" in page("reference/commands")


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_described(verdict: Verdict) -> None:
    assert f"``{verdict.name}``" in README
