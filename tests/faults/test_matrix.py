"""The most important cases of the matrix; ``python -m tests.faults`` runs all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from .matrix import Case, every_case, run
from .oracle import Verdict

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql("a frozen transaction keeps SQLite's one writer's place"),
]

DEATHS = [
    Case("producer", "after_insert", "kill"),
    Case("producer", "before_put", "kill"),
    Case("worker", "after_take", "kill"),
    Case("worker", "after_claim", "power"),
    Case("worker", "after_handler", "kill"),
    Case("worker", "after_succeed", "power"),
    Case("worker", "before_record", "power"),
    Case("worker", "before_put", "kill"),
    Case("loader", "after_horizon", "kill"),
    Case("restore", "mid_restore", "kill"),
    Case("reaper", "after_reap", "kill"),
]
FROSTS = [
    Case("producer", "before_put", "stop"),
    Case("worker", "after_claim", "stop"),
    Case("worker", "after_handler", "stop"),
    Case("worker", "after_succeed", "stop"),
    Case("worker", "before_record", "stop"),
    Case("loader", "mid_load", "stop"),
    Case("reaper", "after_reap", "stop"),
]
DELAYS = [
    Case("producer", "after_put", "delay"),
    Case("worker", "after_claim", "delay"),
    Case("worker", "before_succeed", "delay"),
    Case("worker", "after_record", "delay"),
]
ERRORS = [
    Case("producer", "after_insert", "raise"),
    Case("worker", "after_claim", "raise"),
    Case("worker", "after_commit", "raise"),
    Case("worker", "after_record", "raise"),
    Case("reaper", "after_reap", "raise"),
]
RESETS = [
    Case("producer", "after_insert", "reset"),
    Case("worker", "before_take", "reset"),
    Case("worker", "after_succeed", "reset"),
    Case("worker", "before_record", "reset"),
    Case("restore", "mid_restore", "reset"),
]
LOSSES = [
    Case("producer", "after_insert", "lose"),
    Case("worker", "before_take", "lose"),
    Case("worker", "after_take", "lose"),
    Case("worker", "after_succeed", "lose"),
    Case("worker", "before_record", "lose"),
]


def prove(cases: Sequence[Case], folder: Path) -> dict[Case, Verdict]:
    assert set(cases) <= set(every_case())
    verdicts = run(cases, folder)
    assert {case.queue: verdict.wrong for case, verdict in verdicts.items()} == {case.queue: [] for case in cases}
    return verdicts


@pytest.mark.parametrize(
    "cases", [DEATHS, [*DELAYS, *ERRORS], [*RESETS, *LOSSES]], ids=["deaths", "delays-and-errors", "resets-and-losses"]
)
def test_nothing_is_lost_and_no_duplicate_is_without_excuse(cases: Sequence[Case], tmp_path: Path) -> None:
    prove(cases, tmp_path)


def test_a_process_frozen_past_the_lease_spoils_nothing(tmp_path: Path) -> None:
    prove(FROSTS, tmp_path)
