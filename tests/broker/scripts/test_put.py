"""put.lua: for each case the places before, the call, the places after and the answer."""

from __future__ import annotations

from itertools import permutations
from typing import Any, Literal, NamedTuple

import pytest

from .bench import NOW, Bench, Delayed, Place, Places, Ready

HORIZON = NOW + 10_000
LATER = NOW + 5_000
EARLIER = NOW + 2_000
A_LATER: Places = {2: Delayed(LATER)}
AN_EARLIER: Places = {2: Delayed(EARLIER)}
BEYOND = HORIZON + 1
AGO = NOW - 50


class Case(NamedTuple):
    """What a put of one id does: its place before, the due time and rank of the put, and its place after."""

    promise: str
    mode: Literal["set", "fill"]
    before: Place | None
    put: tuple[int, int]
    after: Place | None
    counts_as: Literal["put", "present", "beyond"]
    notifies: bool
    others: Places = {}

    def run(self, bench: Bench) -> Any:
        return bench.put((1, *self.put), mode=self.mode)

    def places(self, place: Place | None) -> Places:
        return self.others if place is None else {**self.others, 1: place}


BEST, WORST = 0, 200
CASES = [
    # A new message.
    Case("due goes to ready", "set", None, (NOW, 100), Ready(NOW), "put", True),
    Case("long due goes to ready as of its due time", "set", None, (5, 100), Ready(5), "put", True),
    Case("one ms ahead waits", "set", None, (NOW + 1, 100), Delayed(NOW + 1), "put", True),
    Case("at the horizon waits", "set", None, (HORIZON, 100), Delayed(HORIZON), "put", True),
    Case("beyond the horizon goes nowhere", "set", None, (BEYOND, 100), None, "beyond", False),
    Case("fill adds what is due", "fill", None, (NOW, 100), Ready(NOW), "put", True),
    Case("fill adds what waits", "fill", None, (LATER, 100), Delayed(LATER), "put", True),
    Case("fill leaves out what is beyond", "fill", None, (BEYOND, 100), None, "beyond", False),
    Case("the best rank is kept", "set", None, (LATER, BEST), Delayed(LATER, BEST), "put", True),
    Case("the worst rank is kept", "set", None, (NOW, WORST), Ready(NOW, WORST), "put", True),
    # One that is delayed already.
    Case("set moves it later", "set", Delayed(EARLIER), (LATER, 100), Delayed(LATER), "put", False),
    Case("set moves it earlier", "set", Delayed(LATER), (EARLIER, 100), Delayed(EARLIER), "put", True),
    Case("set makes it ready", "set", Delayed(LATER), (NOW, 7), Ready(NOW, 7), "present", True),
    Case("set takes it out beyond the horizon", "set", Delayed(LATER), (BEYOND, 100), None, "beyond", False),
    Case("set gives it a better rank", "set", Delayed(LATER, 100), (LATER, 50), Delayed(LATER, 50), "put", True),
    Case("fill never makes it later", "fill", Delayed(EARLIER), (LATER, 100), Delayed(EARLIER), "present", False),
    Case("fill may make it earlier", "fill", Delayed(LATER), (EARLIER, 100), Delayed(EARLIER), "put", True),
    Case("fill never takes it out", "fill", Delayed(LATER), (BEYOND, 100), Delayed(LATER), "beyond", False),
    # One that is ready already.
    Case("set takes it back to wait", "set", Ready(AGO), (LATER, 100), Delayed(LATER), "put", True),
    Case("set takes it out of ready", "set", Ready(AGO), (BEYOND, 100), None, "beyond", False),
    Case("set leaves it its turn among the ready", "set", Ready(AGO), (AGO, 100), Ready(AGO), "present", False),
    Case("set gives the ready another rank", "set", Ready(AGO), (NOW - 60, 20), Ready(NOW - 60, 20), "present", False),
    Case("set has it ready since it is due", "set", Ready(AGO), (NOW - 10, 100), Ready(NOW - 10), "present", False),
    Case("fill leaves the ready alone", "fill", Ready(AGO), (NOW, 20), Ready(AGO), "present", False),
    Case("fill does not take the ready back to wait", "fill", Ready(AGO), (LATER, 100), Ready(AGO), "present", False),
    Case("fill does not take the ready out", "fill", Ready(AGO), (BEYOND, 100), Ready(AGO), "present", False),
    # Others around it.
    Case("one behind the earliest is silent", "set", None, (LATER, 100), Delayed(LATER), "put", False, AN_EARLIER),
    Case("a new earliest wakes somebody", "set", None, (EARLIER, 100), Delayed(EARLIER), "put", True, A_LATER),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.promise)
def test_put(bench: Bench, case: Case) -> None:
    bench.set(case.places(case.before), horizon=HORIZON)
    assert case.run(bench) == ["ok", *(int(case.counts_as == count) for count in ("put", "present", "beyond"))]
    assert bench.places() == case.places(case.after)
    assert bench.tokens() == case.notifies
    # A put may be sent twice.
    case.run(bench)
    assert bench.places() == case.places(case.after)
    assert bench.tokens() <= 1


@pytest.mark.parametrize("mode", ["set", "fill"])
def test_without_a_horizon_nothing_is_put(bench: Bench, mode: str) -> None:
    assert bench.put((1, NOW, 100), mode=mode) == ["lost", 0, 0, 0]
    assert bench.places() == {}
    assert not bench.client.keys()


def test_a_put_of_many_notifies_once(bench: Bench) -> None:
    bench.set({}, horizon=HORIZON)
    entries = [(number, NOW + number, number % 201) for number in range(1, 1001)]
    assert bench.put(*entries) == ["ok", 1000, 0, 0]
    assert bench.places() == {number: Delayed(due, rank) for number, due, rank in entries}
    assert bench.tokens() == 1


@pytest.mark.parametrize("mode", ["set", "fill"])
@pytest.mark.parametrize("before", [{}, {1: Ready(NOW - 1)}, {1: Delayed(EARLIER)}], ids=["new", "ready", "delayed"])
@pytest.mark.parametrize(
    "dues",
    list(permutations([NOW, EARLIER, LATER, BEYOND], 3)),
    ids=lambda dues: "-".join(str(due - NOW) for due in dues),
)
def test_an_id_that_comes_several_times_in_a_put_ends_as_after_several_puts(
    bench: Bench, dues: tuple[int, ...], before: Places, mode: str
) -> None:
    entries = [(1, due, 100) for due in dues]
    bench.set(before, horizon=HORIZON)
    counts = [bench.put(entry, mode=mode)[1:] for entry in entries]
    after = bench.places()
    bench.client.delete(bench.keys.delayed, bench.keys.ready)
    bench.set(before)
    assert bench.put(*entries, mode=mode) == ["ok", *map(sum, zip(*counts, strict=True))]
    assert bench.places() == after


def test_a_due_time_in_a_hundred_years_keeps_its_ms_and_rank(bench: Bench) -> None:
    far = NOW + 36_525 * 86_400_000
    bench.set({}, horizon=far)
    bench.put((2**63 - 1, far, 199), (1, far - 1, 200))
    assert bench.places() == {1: Delayed(far - 1, 200), 2**63 - 1: Delayed(far, 199)}
