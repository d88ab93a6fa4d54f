"""The workflows of the code host: what each job does can be run on any machine by one environment of tox."""

from __future__ import annotations

import configparser
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tools import pythons
from tools.pythons import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")


def expanded(text: str) -> Iterator[str]:
    """``py{311, 312}-django52``, in full."""
    parts = [re.split(r", *", part) for part in re.split(r"[{}]", text)]
    return ("".join(words) for words in itertools.product(*parts))


def environments() -> set[str]:
    """All that ``tox -e`` may name."""
    named = {line for section in TOX for line in expanded(section.removeprefix("testenv:")) if section != "testenv"}
    listed = {name for line in TOX["tox"]["env_list"].split("\n") if line.strip() for name in expanded(line.strip())}
    return named | listed


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """Each job with its name, but for the one that publishes what another has built."""
    found = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text("utf-8"))
        found += [(f"{path.stem}:{name}", job) for name, job in workflow["jobs"].items()]
    return [(name, job) for name, job in found if name != "release:publish"]


def called_by(job: dict[str, Any]) -> list[str]:
    """The environments of tox that a job calls: those of its matrix, or one in its text."""
    calls = [
        found[1]
        for step in job["steps"]
        if (found := re.search(r"^(?:\w+=\S+(?: \S+\))? )?tox -e (\S+)", step.get("run", "")))
    ]
    assert len(calls) == 1
    if calls == ['"$ENV"']:
        return [row["env"] for row in job["strategy"]["matrix"]["include"]]
    return calls


@pytest.mark.parametrize(("name", "job"), jobs(), ids=[name for name, _job in jobs()])
def test_a_job_calls_one_environment_of_tox(name: str, job: dict[str, Any]) -> None:
    called = called_by(job)
    assert called
    assert set(called) <= environments()


def test_each_python_meets_each_django_that_it_can_have() -> None:
    called = {env for _name, job in jobs() for env in called_by(job)}
    assert {env for env in environments() if re.fullmatch(r"py\d+-django\d+", env)} <= called
    assert {"tests", "lint", "types", "docs", "tasks", "browser", "torture", "lowest", "bare", "release"} <= called


def test_the_package_is_tried_on_each_python_before_it_is_published() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    (versions,) = [
        step["with"]["python-version"]
        for step in workflow["jobs"]["build"]["steps"]
        if "python" in str(step.get("with"))
    ]
    assert versions.split() == pythons.supported()
    assert workflow["jobs"]["publish"]["needs"] == "build"


def test_each_action_is_pinned_by_a_digest_with_its_version_beside_it() -> None:
    lines = [line for path in WORKFLOWS for line in path.read_text("utf-8").splitlines() if "uses:" in line]
    assert len(lines) > 10
    assert [line for line in lines if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_no_job_but_the_publisher_has_more_than_the_right_to_read() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text("utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        rights = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
        assert rights in ({}, {"publish": {"id-token": "write"}})
