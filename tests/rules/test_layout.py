"""Each folder of the tests mirrors a package, or is one of the others that CONTRIBUTING.rst names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tests.support
from tests.support.workers import ROOT

from .sources import PACKAGE

TESTS = ROOT / "tests"

_PAGE = (ROOT / "CONTRIBUTING.rst").read_text("utf-8")
_SECTION = _PAGE.partition("Where a test goes\n")[2].partition("\nHabits\n")[0]
OTHERS = set(re.findall(r"^``(\w+)``  ", _SECTION, re.MULTILINE))
assert len(OTHERS) > 5
SUBJECTS = {"commands": PACKAGE / "management/commands", "testproject": ROOT / "testproject", "tools": ROOT / "tools"}


def folders_of(place: Path) -> list[str]:
    return sorted({path.relative_to(place).parts[0] for path in place.glob("*/**/*.py")})


@pytest.mark.parametrize("name", [name for name in folders_of(TESTS) if name not in OTHERS])
def test_a_folder_mirrors_a_package(name: str) -> None:
    assert (SUBJECTS.get(name, PACKAGE / name) / "__init__.py").exists()


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_folder_that_mirrors_no_package_is_in_the_list_and_exists(name: str) -> None:
    assert (TESTS / name).is_dir()
    assert not (PACKAGE / name).exists()


@pytest.mark.parametrize("file", sorted(TESTS.glob("test_*.py")), ids=lambda file: file.stem)
def test_a_test_at_the_top_has_its_module_at_the_top_of_the_package(file: Path) -> None:
    assert (PACKAGE / f"{file.stem.removeprefix('test_')}.py").exists()


def test_helpers_of_several_tests_are_not_in_one_of_them() -> None:
    """They stand in ``support``, or beside the tests of their folder."""
    imported = re.compile(r"^from [\w.]*\.(test_\w+) import", re.MULTILINE)
    found = {path: imported.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {path.name: names for path, names in found.items() if names} == {}


def test_the_index_of_the_helpers_names_each_module() -> None:
    index = set(re.findall(r"``(\w+)``", tests.support.__doc__ or ""))
    places = [*(TESTS / "support").glob("*.py"), *(place.parent for place in (TESTS / "support").glob("*/__init__.py"))]
    assert {place.stem for place in places} - {"__init__"} == index - {"eventually", "run_delayq"}
