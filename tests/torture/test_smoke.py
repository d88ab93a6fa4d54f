"""The smallest torture, as a test. It takes both cores for itself for a minute, so it runs only when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import ROOT

SEED = "1"


@pytest.mark.skipif("DELAYQ_TORTURE" not in os.environ, reason="on request: DELAYQ_TORTURE=1, or tox -e torture")
@pytest.mark.skipif(not os.environ.get("DATABASE_URL"), reason="the torture is one of PostgreSQL")
@pytest.mark.timeout(240)
def test_a_smoke_of_every_fault_loses_nothing_and_explains_every_duplicate(tmp_path: Path) -> None:
    folder = tmp_path / "torture"
    command = [sys.executable, "-m", "tests.torture", "smoke", "--seed", SEED, "--keep", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nits journals and logs: {folder}"
    assert "GOOD" in done.stdout
