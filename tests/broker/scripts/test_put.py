"""put.lua: for each case the places before, the call, the places after and the answer."""

from __future__ import annotations

from itertools import permutations
from typing import Literal, NamedTuple

import pytest

from .bench import NOW, Bench, Delayed, Places, Ready

HORIZON = NOW + 10_000
LATER = NOW + 5_000
EARLIER = NOW + 2_000
BEYOND = HORIZON + 1


class Case(NamedTuple):
    promise: str
    mode: Literal["set", "fill"]
    before: Places
    entry: tuple[int, int, int]
    after: Places
    # put, present, beyond
    answer: tuple[int, int, int]
    notifies: bool


BEST, WORST = 0, 200
CASES = [
    # A new message.
    Case("due goes to ready", "set", {}, (1, NOW, 100), {1: Ready(NOW)}, (1, 0, 0), True),
    Case("long due goes to ready as of its due time", "set", {}, (1, 5, 100), {1: Ready(5)}, (1, 0, 0), True),
    Case("one ms ahead waits", "set", {}, (1, NOW + 1, 100), {1: Delayed(NOW + 1)}, (1, 0, 0), True),
    Case("at the horizon waits", "set", {}, (1, HORIZON, 100), {1: Delayed(HORIZON)}, (1, 0, 0), True),
    Case("beyond the horizon goes nowhere", "set", {}, (1, BEYOND, 100), {}, (0, 0, 1), False),
    Case("fill adds what is due", "fill", {}, (1, NOW, 100), {1: Ready(NOW)}, (1, 0, 0), True),
    Case("fill adds what waits", "fill", {}, (1, LATER, 100), {1: Delayed(LATER)}, (1, 0, 0), True),
    Case("fill leaves out what is beyond", "fill", {}, (1, BEYOND, 100), {}, (0, 0, 1), False),
    Case("the best rank is kept", "set", {}, (1, LATER, BEST), {1: Delayed(LATER, BEST)}, (1, 0, 0), True),
    Case("the worst rank is kept", "set", {}, (1, NOW, WORST), {1: Ready(NOW, WORST)}, (1, 0, 0), True),
    # One that is delayed already.
    Case(
        "set moves it later",
        "set",
        {1: Delayed(EARLIER)},
        (1, LATER, 100),
        {1: Delayed(LATER)},
        (1, 0, 0),
        False,
    ),
    Case(
        "set moves it earlier",
        "set",
        {1: Delayed(LATER)},
        (1, EARLIER, 100),
        {1: Delayed(EARLIER)},
        (1, 0, 0),
        True,
    ),
    Case(
        "set makes it ready",
        "set",
        {1: Delayed(LATER)},
        (1, NOW, 7),
        {1: Ready(NOW, 7)},
        (0, 1, 0),
        True,
    ),
    Case("set takes it out beyond the horizon", "set", {1: Delayed(LATER)}, (1, BEYOND, 100), {}, (0, 0, 1), False),
    Case(
        "set gives it a better rank",
        "set",
        {1: Delayed(LATER, 100)},
        (1, LATER, 50),
        {1: Delayed(LATER, 50)},
        (1, 0, 0),
        True,
    ),
    Case(
        "fill never makes it later",
        "fill",
        {1: Delayed(EARLIER)},
        (1, LATER, 100),
        {1: Delayed(EARLIER)},
        (0, 1, 0),
        False,
    ),
    Case(
        "fill may make it earlier",
        "fill",
        {1: Delayed(LATER)},
        (1, EARLIER, 100),
        {1: Delayed(EARLIER)},
        (1, 0, 0),
        True,
    ),
    Case(
        "fill never takes it out",
        "fill",
        {1: Delayed(LATER)},
        (1, BEYOND, 100),
        {1: Delayed(LATER)},
        (0, 0, 1),
        False,
    ),
    # One that is ready already.
    Case(
        "set takes it back to wait",
        "set",
        {1: Ready(NOW - 50)},
        (1, LATER, 100),
        {1: Delayed(LATER)},
        (1, 0, 0),
        True,
    ),
    Case("set takes it out of ready", "set", {1: Ready(NOW - 50)}, (1, BEYOND, 100), {}, (0, 0, 1), False),
    Case(
        "set leaves it its turn among the ready",
        "set",
        {1: Ready(NOW - 50)},
        (1, NOW - 50, 100),
        {1: Ready(NOW - 50)},
        (0, 1, 0),
        False,
    ),
    Case(
        "set gives the ready another rank",
        "set",
        {1: Ready(NOW - 50, 100)},
        (1, NOW - 60, 20),
        {1: Ready(NOW - 60, 20)},
        (0, 1, 0),
        False,
    ),
    Case(
        "set never leaves it ready since before it was due",
        "set",
        {1: Ready(NOW - 50)},
        (1, NOW - 10, 100),
        {1: Ready(NOW - 10)},
        (0, 1, 0),
        False,
    ),
    Case(
        "fill leaves the ready alone",
        "fill",
        {1: Ready(NOW - 50)},
        (1, NOW, 20),
        {1: Ready(NOW - 50)},
        (0, 1, 0),
        False,
    ),
    Case(
        "fill does not take the ready back to wait",
        "fill",
        {1: Ready(NOW - 50)},
        (1, LATER, 100),
        {1: Ready(NOW - 50)},
        (0, 1, 0),
        False,
    ),
    Case(
        "fill does not take the ready out",
        "fill",
        {1: Ready(NOW - 50)},
        (1, BEYOND, 100),
        {1: Ready(NOW - 50)},
        (0, 1, 0),
        False,
    ),
    # Others around it.
    Case(
        "one behind the earliest wakes nobody",
        "set",
        {2: Delayed(EARLIER)},
        (1, LATER, 100),
        {2: Delayed(EARLIER), 1: Delayed(LATER)},
        (1, 0, 0),
        False,
    ),
    Case(
        "a new earliest wakes somebody",
        "set",
        {2: Delayed(LATER)},
        (1, EARLIER, 100),
        {2: Delayed(LATER), 1: Delayed(EARLIER)},
        (1, 0, 0),
        True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.promise)
def test_put(bench: Bench, case: Case) -> None:
    bench.set(case.before, horizon=HORIZON)
    assert bench.put(case.entry, mode=case.mode) == ["ok", *case.answer]
    assert bench.places() == case.after
    assert bench.tokens() == case.notifies


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.promise)
def test_a_put_sent_twice_is_a_put_sent_once(bench: Bench, case: Case) -> None:
    bench.set(case.before, horizon=HORIZON)
    bench.put(case.entry, mode=case.mode)
    bench.put(case.entry, mode=case.mode)
    assert bench.places() == case.after
    assert bench.tokens() <= 1


def test_a_put_sent_again_later_keeps_the_order_of_the_ready(bench: Bench) -> None:
    bench.set({}, horizon=HORIZON)
    for now in (NOW, NOW + 40):
        for mode in ("set", "fill"):
            bench.put((1, NOW - 5, 100), mode=mode, now=now)
    assert bench.places() == {1: Ready(NOW - 5)}


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


def test_a_put_counts_each_kind_of_entry(bench: Bench) -> None:
    bench.set({1: Ready(NOW), 2: Delayed(EARLIER)}, horizon=HORIZON)
    answer = bench.put((1, NOW, 100), (2, LATER, 100), (3, LATER, 100), (4, BEYOND, 100), mode="fill")
    assert answer == ["ok", 1, 2, 1]


def test_a_due_time_in_a_hundred_years_keeps_its_ms_and_rank(bench: Bench) -> None:
    far = NOW + 36_525 * 86_400_000
    bench.set({}, horizon=far)
    bench.put((2**63 - 1, far, 199), (1, far - 1, 200))
    assert bench.places() == {1: Delayed(far - 1, 200), 2**63 - 1: Delayed(far, 199)}


def test_an_empty_put_is_harmless(bench: Bench) -> None:
    bench.set({}, horizon=HORIZON)
    assert bench.put() == ["ok", 0, 0, 0]
