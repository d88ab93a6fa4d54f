"""The seeded bugs of ``python -m tests.mutation`` follow the code that they break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutation.__main__ import MUTANTS, ROOT, Mutant, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_of_the_code_as_it_is(mutant: Mutant, tmp_path: Path) -> None:
    names = {name for name, _old, _new in mutant.edits}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    apply(mutant, tmp_path)
    assert all((tmp_path / name).read_text() != (ROOT / name).read_text() for name in names)
