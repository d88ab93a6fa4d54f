"""The most important cases of the matrix; ``python -m tests.faults`` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .matrix import Case, every_case, run

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql("a frozen transaction keeps SQLite's one writer's place"),
]

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


@pytest.mark.parametrize("faults", ["kill power", "stop", "delay raise", "reset lose"])
def test_nothing_is_lost_and_no_duplicate_is_without_excuse(faults: str, tmp_path: Path) -> None:
    """A process that is stopped freezes past its lease."""
    cases = [Case(who, point, fault) for (who, fault), points in CHOSEN.items() for point in points if fault in faults]
    assert set(cases) <= set(every_case())
    wrong = {case.queue: verdict.wrong for case, verdict in run(cases, tmp_path).items()}
    assert wrong == {case.queue: [] for case in cases}
