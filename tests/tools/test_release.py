"""The checks of ``tox -e release``, without building anything."""

from __future__ import annotations

import configparser
import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import django_delayq
from tools import pythons, release
from tools.pythons import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_an_archive_with_other_files_than_git_knows_is_refused() -> None:
    release.compare("wheel", {"a.py"}, {"a.py"})
    with pytest.raises(SystemExit, match=r"missing: a\.lua\n  should not be there: b\.pyc"):
        release.compare("wheel", {"a.py", "b.pyc"}, {"a.py", "a.lua"})


def test_the_python_of_this_run_is_supported_and_found_outside_of_its_environment() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert version in pythons.supported()
    found = pythons.find(version)
    assert found is None or not (found.parents[1] / "pyvenv.cfg").exists()
    assert pythons.find("2.0") is None


def test_tox_knows_the_pythons_and_djangos_of_the_metadata() -> None:
    tox = (ROOT / "tox.ini").read_text("utf-8")
    oldest, newest = re.findall(r"^    py\{([\d, ]+)\}-django", tox, re.MULTILINE)
    assert [f"3.{number[1:]}" for number in re.findall(r"\d+", oldest)] == pythons.supported()
    assert set(re.findall(r"\d+", newest)) < set(re.findall(r"\d+", oldest))
    named = [text.removeprefix("Framework :: Django :: ") for text in PYPROJECT["project"]["classifiers"]]
    djangos = set(re.findall(r"^    django\d+: Django~=(\d+\.\d+)\.0$", tox, re.MULTILINE))
    assert sorted(djangos) == [name for name in named if re.fullmatch(r"\d+\.\d+", name)]


def test_the_version_stands_in_one_place_which_workers_log() -> None:
    assert "version" not in PYPROJECT["project"]
    assert ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"] == Path(django_delayq.__file__)


def test_what_remains_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n", "utf-8")
    (tmp_path / "CHANGELOG.rst").write_text("Unreleased\n==========\n", "utf-8")
    (tmp_path / "CONTRIBUTING.rst").write_text("(to be filled in)\n", "utf-8")
    tasks = "\n".join(release.remaining("1.2.3", ["3.14"]))
    assert all(
        text in tasks
        for text in (
            *("Python 3.14", "[project.urls]", "CHANGELOG.rst a section", "v1.2.3"),
            *("test_language", "Name the maintainers"),
        )
    )
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nSource = "…"\n', "utf-8")
    (tmp_path / "CHANGELOG.rst").write_text("1.2.3 (2026-01-02)\n==================\n", "utf-8")
    (tmp_path / "CONTRIBUTING.rst").write_text("", "utf-8")
    tasks = "\n".join(release.remaining("1.2.3", []))
    assert not any(text in tasks for text in ("Python", "[project.urls]", "CHANGELOG.rst a section", "maintainers"))


def test_the_lowest_versions_that_are_tested_are_those_that_the_metadata_allows() -> None:
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    allowed = {name: Version(version) for name, version in (_split(text.partition(",")[0], ">=") for text in asked)}
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    lines = tox["testenv:lowest"]["deps"].strip().splitlines()
    assert {name: Version(version) for name, version in (_split(text, "==") for text in lines)} == allowed


def _split(text: str, sign: str) -> tuple[str, str]:
    name, version = text.split(sign)
    return name.partition("[")[0], version
