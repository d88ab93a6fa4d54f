"""What ``run_delayq`` refuses before it starts a worker process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.mark.parametrize("arguments", [["--once"], ["--processes", "1"]], ids=["once", "worker"])
@pytest.mark.parametrize("checks", [[], ["--skip-checks"]], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("delayq", "words"),
    [({"LEASE": -1}, "DELAYQ['LEASE'] is impossible."), ({"MIDDLEWARE": ["nowhere.Tenants"]}, "names nowhere.Tenants")],
    ids=["value", "middleware"],
)
def test_a_wrong_setting_ends_it_with_exit_code_78(
    arguments: list[str], checks: list[str], delayq: dict[str, Any], words: str
) -> None:
    with Worker(*arguments, *checks, delayq=delayq) as worker:
        assert worker.wait() == 78
    assert worker.count(words.replace("[", r"\[").replace("]", r"\]")) == 1
    assert worker.count("Traceback") == 0
