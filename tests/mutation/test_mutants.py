"""Every seeded bug of ``python -m tests.mutation`` still applies to the code that it breaks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutation.__main__ import HARNESSES, MUTANTS, ROOT, Edit, Mutant, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_of_the_code_as_it_is(mutant: Mutant, tmp_path: Path) -> None:
    names = {edit.file for edit in mutant.edits}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    apply(mutant, tmp_path)
    for name in names:
        text = (tmp_path / name).read_text()
        assert text != (ROOT / name).read_text()
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.mark.parametrize("path", [path for paths in HARNESSES.values() for path in paths])
def test_the_tests_that_a_harness_runs_exist(path: str) -> None:
    assert (ROOT / path).exists()


CODE = """
def run(self):
    if self.ready(
        now
    ):
        return 1
    return 2
"""


def test_an_edit_finds_its_place_whatever_the_line_breaks_and_keeps_the_indentation() -> None:
    edit = Edit("a.py", "if self.ready( now ): return 1", "if not self.ready(now):\n    return 1")
    assert edit.of(CODE) == "\ndef run(self):\n    if not self.ready(now):\n        return 1\n    return 2\n"


@pytest.mark.parametrize("old", ["return", "return 3"])
def test_an_edit_whose_place_is_not_the_only_one_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match="places like"):
        Edit("a.py", old, "pass").of(CODE)
