"""The arithmetic, tables and verdicts of the benchmarks, without any measurement."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.peers import adapter_process
from benchmarks.report import GOALS, OURS, Results
from benchmarks.systems import BY_NAME, SYSTEMS
from benchmarks.workloads import WORKLOADS


def rates(workload: str = "drain", **medians: float) -> Results:
    results = Results()
    for system, rate in medians.items():
        for round_rate in (rate, rate * 0.9, rate * 1.1):
            results.add(workload, system.replace("_", "-"), {"rate": round_rate})
    return results


# --- tables -----------------------------------------------------------------------------------------------------------


def test_ours_stands_beside_the_best_peer_of_each_kind() -> None:
    results = rates(delayq=3000, celery=9000, huey=1000, django_q2=1500, procrastinate=2000, postgres=50_000)
    (row,) = report.beside_the_best(results)[1:]
    assert row[0] == "drain, one process, messages/s"
    assert row[1] == "3,000 (2,700–3,300)"
    assert row[2:4] == ["Procrastinate 3.10: 2,000 (1,800–2,200)", "1.50"]
    assert row[4].startswith("Celery 5.7 (Redis): 9,000")
    assert row[5] == "0.333"


def test_a_ratio_is_that_of_the_rounds_side_by_side() -> None:
    results = Results()
    for ours, theirs in ((300.0, 100.0), (100.0, 100.0), (400.0, 200.0)):
        results.add("drain", OURS, {"rate": ours})
        results.add("drain", "graphile", {"rate": theirs})
    (row,) = report.goals(results)[1:]
    assert row == ["drain, one process: rate", "≥ 1 × Graphile Worker 0.17 (Node.js)", "2.00 (1.00–3.00)", "met"]


def test_a_goal_may_compare_two_workloads_or_add_two_measures() -> None:
    results = rates("drain", delayq=30_000)
    results.add("lines", OURS, {"rate": 15_000})
    results.add("drain", OURS, {"client": 20.0, "postgres": 20.0, "redis": 5.0})
    rows = {row[0]: row[1:] for row in report.goals(results)[1:]}
    assert rows == {
        "drain, one process: client + postgres + redis": ["≤ 46", "45.0", "met"],
        "drain, a line in the log for each message: rate": ["≥ 0.75 × drain, one process", "0.500", "not met"],
    }


def test_every_goal_names_what_is_measured() -> None:
    measures = {workload.name: workload.measures for workload in WORKLOADS}
    for goal in GOALS:
        assert set(goal.measure.split(" + ")) <= measures[goal.workload].keys()
        assert goal.system in {"", *BY_NAME}
        assert goal.beside in {"", *measures}


def test_every_system_has_its_figures_and_costs() -> None:
    results = rates(delayq=2000, huey=1000)
    results.add("late-1000", OURS, {"p50": 0.5, "p99": 2.0, "client": 300.0, "postgres": 400.0, "redis": 90.0})
    results.fail("late-1000", "rq", "it drains 400 messages/s")
    assert report.all_systems(results) == [
        ["", "drain, one process", "lateness at 1000 messages/s"],
        ["django-delayq", "2,000", "0.500 / 2.00"],
        ["Huey 3.5 (Redis)", "1,000", "–"],
    ]
    assert report.costs(results)[1:] == [["lateness at 1000 messages/s", "django-delayq", "300", "400", "90.0"]]
    assert report.failures(results) == "RQ 3.0 took no part in late-1000: it drains 400 messages/s"


def test_what_is_by_far_behind_is_said() -> None:
    results = rates(delayq=1000, graphile=3000, celery=1100)
    found = report.ahead(results)
    assert "Graphile Worker 0.17 (Node.js) by far, in *drain, one process* (3,000 beside 1,000)" in found
    assert "Celery 5.7 (Redis) in *drain, one process* (1,100 beside 1,000)" in found


def test_a_command_replaces_its_part_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "performance.rst"
    shutil.copy(tables.PAGE, page)
    monkeypatch.setattr(tables, "PAGE", page)
    for name in ("ahead", "figures", "growth of rows", "growth of names"):
        tables.write_docs(name, f"new {name}")
        assert f".. {name}: begin\n\nnew {name}\n\n.. {name}: end" in page.read_text()
    with pytest.raises(ValueError, match="other: begin"):
        tables.write_docs("other", "")


# --- systems ----------------------------------------------------------------------------------------------------------


def test_peers_are_pinned_and_have_an_adapter() -> None:
    folder = Path(adapter_process.__file__).parent
    for system in SYSTEMS:
        if system.kind == "peer":
            assert (folder / f"{system.adapter}.{'mjs' if system.is_node else 'py'}").exists()
            assert all(("@" if system.is_node else "==") in package for package in system.packages)
        else:
            assert not system.packages
