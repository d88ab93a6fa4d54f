"""The most important cases of the matrix, or all of them, with DELAYQ_MATRIX=all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .matrix import ACTIONS, Case, every_case, run

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql("a frozen transaction keeps SQLite's one writer's place"),
]

# Faults whose cases run together.
FAULTS = ({"kill", "power"}, {"stop"}, {"delay", "raise"}, {"reset", "lose"})
# The failpoints at which a fault happens to a program.
CHOSEN = {
    ("producer", "kill"): ["after_insert", "before_put"],
    ("worker", "kill"): ["after_take", "after_handler", "before_put"],
    ("worker", "power"): ["after_claim", "after_succeed", "before_record"],
    ("loader", "kill"): ["after_horizon"],
    ("restore", "kill"): ["mid_restore"],
    ("reaper", "kill"): ["after_reap"],
    ("producer", "stop"): ["before_put"],
    ("worker", "stop"): ["after_claim", "after_handler", "after_succeed", "before_record"],
    ("loader", "stop"): ["mid_load"],
    ("reaper", "stop"): ["after_reap"],
    ("producer", "delay"): ["after_put"],
    ("worker", "delay"): ["after_claim", "before_succeed", "after_record"],
    ("producer", "raise"): ["after_insert"],
    ("worker", "raise"): ["after_claim", "after_commit", "after_record"],
    ("reaper", "raise"): ["after_reap"],
    ("producer", "reset"): ["after_insert"],
    ("worker", "reset"): ["before_take", "after_succeed", "before_record"],
    ("restore", "reset"): ["mid_restore"],
    ("producer", "lose"): ["after_insert"],
    ("worker", "lose"): ["before_take", "after_take", "after_succeed", "before_record"],
}


def batches() -> list[list[Case]]:
    """Return the cases that run side by side."""
    if os.environ.get("DELAYQ_MATRIX") != "all":
        chosen = [Case(who, point, fault) for (who, fault), points in CHOSEN.items() for point in points]
        assert set(chosen) <= set(every_case())
        return [[case for case in chosen if case.action in faults] for faults in FAULTS]
    alike = [[case for case in every_case() if case.action == action] for action in ACTIONS]
    return [cases[start : start + 8] for cases in alike for start in range(0, len(cases), 8)]


@pytest.mark.parametrize("cases", batches(), ids=lambda cases: " ".join(dict.fromkeys(case.action for case in cases)))
def test_nothing_is_lost_and_no_duplicate_is_without_excuse(cases: list[Case], tmp_path: Path) -> None:
    """A process that is stopped freezes past its lease."""
    assert run(cases, tmp_path) == {case.queue: [] for case in cases}
