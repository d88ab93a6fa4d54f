"""The arithmetic, tables and verdicts of the benchmarks, without any measurement."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as command
from benchmarks import page, picture, report, targets, workloads
from benchmarks.measures import Measures, Results, Spread, figure, quantile, shown
from benchmarks.peers import adapter_process
from benchmarks.peers.adapter_process import Mark
from benchmarks.systems import BY_NAME, FEATURES, SYSTEMS
from benchmarks.targets import TARGETS, Target, evaluate
from benchmarks.workloads import WORKLOADS, takes_part

DOCS = Path(__file__).resolve().parents[2] / "docs" / "explanation"


def rates(workload: str = "drain", **medians: float) -> Results:
    results = Results()
    for system, rate in medians.items():
        for round_rate in (rate, rate * 0.9, rate * 1.1):
            results.add(workload, system.replace("_", "-"), {"rate": round_rate})
    return results


def a_run(results: Results) -> report.Run:
    return report.Run("2026-01-02", "2 cores", "small", 3, {"Redis": "7.0"}, results)


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(share: float, expected: float) -> None:
    assert quantile(list(range(1, 101)), share) == expected
    assert quantile([7.0], share) == 7.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (17_432, "17,400"),
        (999.6, "1,000"),
        (99.96, "100"),
        (4.123, "4.12"),
        (9.9999, "10.0"),
        (0.03811, "0.0381"),
        (-135.4, "-135"),
    ],
)
def test_a_figure_has_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_spread_is_shown_only_where_there_is_one() -> None:
    assert shown(Spread(1000, 900, 1100)) == "1,000 (900–1,100)"
    assert shown(Spread(1000, 1000, 1000)) == "1,000"
    assert shown(None) == "–"


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_to_the_fastest_peer_of_the_group() -> None:
    results = rates(delayq=3000, celery=9000, huey=1000, django_q2=1500, procrastinate=2000, postgres=50_000)
    durable, on_redis, floor = evaluate(
        results,
        [
            Target("drain", "rate", 1.5, "durable"),
            Target("drain", "rate", 1.5, "redis"),
            Target("drain", "rate", 0.3, "postgres"),
        ],
    )
    assert (durable.found, durable.met, durable.beside) == (1.5, True, "procrastinate")
    assert (on_redis.met, on_redis.beside) == (False, "celery")
    assert (floor.found, floor.met) == (0.06, False)


def test_a_ratio_has_the_spread_of_the_rounds_side_by_side() -> None:
    results = Results()
    for ours, theirs in ((300.0, 100.0), (100.0, 100.0), (400.0, 200.0)):
        results.add("drain", "delayq", {"rate": ours})
        results.add("drain", "postgres", {"rate": theirs})
    (verdict,) = evaluate(results, [Target("drain", "rate", 0.3, "postgres")])
    assert (verdict.found, verdict.rounds) == (3.0, (3.0, 1.0, 2.0))
    assert verdict.measured == "3.00 × (1.00–3.00)"


def test_a_target_may_be_on_the_sum_of_two_measures() -> None:
    results = Results()
    for client, servers in ((20.0, 35.0), (30.0, 15.0), (24.0, 25.0)):
        results.add("drain", "delayq", {"client": client, "servers": servers})
    target = Target("drain", "client + servers", 50, at_most=True)
    (verdict,) = evaluate(results, [target])
    assert (verdict.found, verdict.rounds, verdict.met) == (49.0, (55.0, 45.0, 49.0), True)
    results.add("late-1000", "delayq", {"client": 20.0})
    (verdict,) = evaluate(results, [Target("late-1000", "client + servers", 50, at_most=True)])
    assert verdict.met is None


@pytest.mark.parametrize("results", [Results(), rates(delayq=1000), rates(django_q2=1000)])
def test_without_both_sides_there_is_no_verdict(results: Results) -> None:
    (verdict,) = evaluate(results, [Target("drain", "rate", 1.5, "durable")])
    assert verdict.met is None
    assert (verdict.word, verdict.measured) == ("not measured", "–")


def test_every_target_names_what_is_measured() -> None:
    measures = {workload.name: workload.measures for workload in WORKLOADS}
    for target in TARGETS:
        assert set(target.measure.split(" + ")) <= measures[target.workload].keys()
        assert target.against in {"", *targets.GROUPS, *BY_NAME}
        assert target.text


# --- systems ----------------------------------------------------------------------------------------------------------


def test_peers_are_pinned_and_have_an_adapter() -> None:
    folder = Path(adapter_process.__file__).parent
    for system in SYSTEMS:
        assert system.has <= FEATURES.keys()
        if system.kind == "peer":
            assert (folder / f"{system.adapter}.{'mjs' if system.is_node else 'py'}").exists()
            assert all(("@" if system.is_node else "==") in package for package in system.packages)
            assert not system.lives_with or system.packages == BY_NAME[system.lives_with].packages
        else:
            assert not system.packages


def test_a_peer_without_its_environment_is_not_installed(tmp_path: Path) -> None:
    assert not BY_NAME["celery"].installed(tmp_path)
    assert BY_NAME["delayq"].installed(tmp_path)


def test_a_peer_in_node_needs_node_and_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "node"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tuned = BY_NAME["graphile-tuned"]
    assert not tuned.installed(tmp_path)
    (tmp_path / "graphile" / "node_modules").mkdir(parents=True)
    assert tuned.installed(tmp_path)
    program.unlink()
    assert not tuned.installed(tmp_path)


def test_ours_takes_part_in_everything() -> None:
    assert all(takes_part(workload, BY_NAME["delayq"]) for workload in WORKLOADS)
    assert not takes_part(WORKLOADS[0], BY_NAME["apscheduler"])
    restore = next(workload for workload in WORKLOADS if workload.name == "restore")
    assert not any(takes_part(restore, system) for system in SYSTEMS if system.kind != "ours")


def test_the_quick_run_names_systems_and_workloads_that_there_are() -> None:
    assert set(command.QUICK_SYSTEMS) <= BY_NAME.keys()
    assert set(command.QUICK_WORKLOADS) <= {workload.name for workload in WORKLOADS}


@pytest.mark.parametrize(("number", "due"), [(1, 0.0), (999_999, 1_800_000_000.123)])
def test_a_payload_has_200_bytes(number: int, due: float) -> None:
    assert len(json.dumps(adapter_process.payload(number, due))) == adapter_process.PAYLOAD_BYTES


def test_times_without_a_run_and_with_two_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "SCHEDULES", 2)
    marks = [Mark(n, due + 0.004, due, 1) for n in (0, 1) for due in (9.0, 10.0, 11.0, 12.0, 13.0, 14.0)]
    marks.remove(Mark(1, 12.004, 12.0, 1))
    marks.append(Mark(0, 12.9, 12.0, 2))
    found = workloads._occurrences(marks, 10.0, 12.0, 14.0)
    assert found == pytest.approx({"p50": 4, "p99": 4, "max": 4, "missing": 100 / 8, "doubled": 100 / 7})
    untold = [mark._replace(due=0.0) for mark in marks]
    assert workloads._occurrences(untold, 10.0, 12.0, 15.0) == pytest.approx({"missing": 0})
    assert workloads._occurrences(untold[2:], 10.0, 12.0, 15.0) == pytest.approx({"missing": 10})


def test_late_handlers_close_to_each_other_are_one_pause() -> None:
    late = [(10.0, 51.0), (10.1, 90.0), (10.55, 60.0), (11.2, 70.0), (11.3, 49.0), (12.0, 2.0)]
    marks = [Mark(n, at, at - ms / 1000, 1) for n, (at, ms) in enumerate(late)]
    assert workloads.pauses(marks) == 2
    assert workloads.pauses([]) == 0


def test_messages_that_are_sent_together_have_an_even_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[tuple[dict[str, object], float]]] = []
    calls = adapter_process.AdapterCalls(SimpleNamespace(send_together=sent.append))
    stream = calls.late(rate=2000, seconds=0.02, longest=0.08, together=30)
    assert {len(messages) for messages in sent} == {30}
    assert [payload["n"] for messages in sent for payload, _due in messages] == list(range(1, 30 * len(sent) + 1))
    assert stream["sent"] == 30 * len(sent) <= 2000 * 0.1


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_tables_name_the_systems_and_their_figures() -> None:
    results = rates(huey=1000, delayq=2000)
    results.fail("drain", "rq", "it did not start")
    text = report.to_terminal(a_run(results))
    assert text.index("django-delayq") < text.index("Huey")
    assert "2,000 (1,800–2,200)" in text
    assert "RQ 3.0 could not do drain: it did not start" in text
    rst = report.to_rst(a_run(results), {"performance.svg": "Bars"})
    assert "   * - Huey 3.5 (Redis)\n     - 1,000 (900–1,100)" in rst
    assert ".. image:: performance.svg" in rst
    assert "Could not: RQ 3.0." in rst


GROWN: Measures = {
    "ratio": 1.1,
    "drain at 10,000, µs": 55.0,
    "drain with none at 10,000, µs": 54.0,
    "p99 at 10,000, ms": 4.0,
    "drain at 100,000, µs": 60.0,
    "drain with none at 100,000, µs": 55.0,
    "p99 at 100,000, ms": 4.5,
}


def test_growth_has_a_table_with_a_row_for_each_level() -> None:
    results = Results()
    results.add("growth-history", "delayq", GROWN)
    workload = next(workload for workload in WORKLOADS if workload.name == "growth-history")
    assert report.growth_table(workload, results) == [
        ["messages finished", "drain, µs", "drain with none, µs", "p99, ms"],
        ["10,000", "55.0", "54.0", "4.00"],
        ["100,000", "60.0", "55.0", "4.50"],
    ]
    assert report.tables(workload, results)[0][1][:2] == ["django-delayq", "1.10"]


def test_another_run_adds_what_was_not_measured_and_says_when_it_was(tmp_path: Path) -> None:
    earlier = a_run(rates(delayq=1000, huey=500))
    earlier.results.add("growth-history", "delayq", GROWN)
    earlier.results.fail("late-1000", "rq", "it drains 400 messages/s")
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(report.to_json(earlier)))
    run = report.Run("2026-02-03", "4 cores", "full", 1, {"Redis": "7.2"}, rates(delayq=2000))
    report.merge(run, report.read(file))
    assert run.results.rounds["drain"].keys() == {"delayq"}
    assert run.results.rounds["growth-history"]["delayq"] == [GROWN]
    assert run.origins == dict.fromkeys(["growth-history", "late-1000"], earlier.line)
    rst = report.to_rst(run, {})
    assert rst.count("Measured 2026-02-03") == rst.count("Measured 2026-01-02") == 1
    written = report.to_json(run)
    assert len(written["targets"]) == len(TARGETS)
    file.write_text(json.dumps(written))
    assert report.read(file) == run


def test_the_results_replace_those_between_the_markers() -> None:
    page = f"Before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nAfter\n"
    assert report.between_markers(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="results: begin"):
        report.between_markers("no markers", "new")


def test_the_page_has_the_markers() -> None:
    text = (DOCS / "performance.rst").read_text()
    assert "new" in report.between_markers(text, "new")


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_pictures_show_what_the_page_says() -> None:
    """After a change of the tables: ``python -m benchmarks.page``."""
    said = page.results(page.PAGE.read_text())
    assert len(said.rounds) == len(WORKLOADS)
    assert page.PICTURE.read_text() == picture.draw(said)
    assert page.GROWTH.read_text() == picture.draw_growth(said)


def test_a_page_is_read_as_it_was_written() -> None:
    written = page.PAGE.read_text()
    said = page.results(written)
    tables = [report.as_rst(table) for workload in WORKLOADS for table in report.tables(workload, said)]
    places = [written.find(table) for table in tables]
    # In this order, since some workloads have the same title.
    assert -1 not in places
    assert places == sorted(places)


def test_a_page_may_say_that_a_system_is_early() -> None:
    results = rates("late-200", delayq=0)
    for p50, p99 in ((-81.6, 627.0), (-90.0, 600.0), (-70.0, -2.5)):
        results.add("late-200", "rq", {"p50": p50, "p99": p99})
    said = page.results(report.to_rst(a_run(results), {}))
    assert said.rounds["late-200"]["rq"] == [
        {"p50": -90.0, "p99": -2.5},
        {"p50": -81.6, "p99": 600.0},
        {"p50": -70.0, "p99": 627.0},
    ]


def test_the_picture_is_xml_with_a_bar_for_each_system() -> None:
    results = rates(huey=1000, delayq=20_000)
    results.add("late-200", "delayq", {"p50": 0.5, "p99": 4.0})
    results.add("late-200", "huey", {"p50": -135.0, "p99": 349.0})
    svg = ElementTree.fromstring(picture.draw(results))
    bars = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 4
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] > widths[1] > 0


def test_the_picture_of_growth_has_a_line_for_each_measure() -> None:
    results = Results()
    results.add("growth-history", "delayq", GROWN)
    results.add("growth-processes", "delayq", {f"drain at {n}, messages/s": n * 1e4 for n in (1, 2, 3, 4)})
    svg = ElementTree.fromstring(picture.draw_growth(results))
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2, 2, 4]
    heights = [float(point.split(",")[1]) for point in lines[-1].attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)


def test_a_picture_of_nothing_is_empty() -> None:
    assert "<polyline" not in picture.draw_growth(Results())
    assert "<rect" not in picture.draw(Results())
