"""take.lua: messages that are due become ready, and the best of the ready are popped."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from .bench import BAND, NOW, Bench, Delayed, Places, Ready


class Case(NamedTuple):
    promise: str
    before: Places
    limit: int
    taken: list[int]
    # How early something may be taken, in tenths.
    within: int = 0
    both_ends: bool = False


AHEAD = 50
# In the order of their due times.
FOUR: Places = {1: Ready(NOW - 4), 2: Ready(NOW - 3), 3: Ready(NOW - 2), 4: Ready(NOW - 1)}
MIXED: Places = {1: Ready(NOW - 1), 2: Ready(NOW - 3), 3: Ready(NOW - 2)}
RANKS: Places = {1: Ready(NOW - 9_000, 100), 2: Ready(NOW, 99), 3: Ready(NOW - 1, 101)}
SOON: Places = {1: Ready(NOW - 5, 200), 2: Delayed(NOW, 201), 3: Delayed(NOW + 20, 0), 4: Delayed(NOW + 10, 100)}
CASES = [
    Case("nothing there, nothing taken", {}, 5, []),
    Case("what is due is taken, whatever its rank", {1: Delayed(NOW, 200), 2: Delayed(NOW + 1, 0)}, 5, [1]),
    Case("limit 0 only promotes, and keeps the rank", {1: Delayed(NOW - 5, 17), 2: Delayed(NOW + 300)}, 0, []),
    Case("the better rank goes first, whenever it became ready", RANKS, 5, [2, 1, 3]),
    Case("no more than the limit is taken", RANKS, 2, [2, 1]),
    Case("within a rank the longest overdue goes first", MIXED, 5, [2, 3, 1]),
    Case("what has just fallen due can overtake by rank", {1: Ready(NOW - 1, 100), 2: Delayed(NOW, 0)}, 1, [2]),
    Case("the next due time is told", {1: Ready(NOW), 2: Delayed(NOW + 12, 200), 3: Delayed(NOW + 90)}, 1, [1]),
    Case("what falls due in a moment is taken early", {1: Delayed(NOW + 50, 200)}, 5, [1], AHEAD),
    Case("in another moment it is not", {1: Delayed(NOW + 51, 0)}, 5, [], AHEAD),
    Case("what is ready goes first, and the earliest fill the room", SOON, 3, [1, 2, 4], AHEAD),
    Case("nothing is taken early while more is ready", {**MIXED, 4: Delayed(NOW + 1)}, 1, [2], AHEAD),
    Case("limit 0 takes nothing early", {1: Delayed(NOW + 1)}, 0, [], AHEAD),
    Case(
        "of both ends, half are those of the best rank that fell due last, also just now",
        {**FOUR, 5: Delayed(NOW), 6: Ready(NOW, 101)},
        4,
        [1, 2, 4, 5],
        both_ends=True,
    ),
    Case(
        "of both ends, the first half of a few better ones goes on with the next rank",
        {1: Ready(NOW, 1), 2: Ready(NOW - 2), 3: Ready(NOW - 1), 4: Ready(NOW)},
        3,
        [2, 3, 1],
        both_ends=True,
    ),
    Case("both ends of what there is room for are in order", MIXED, 3, [2, 3, 1], both_ends=True),
    Case("what a wrong clock made ready is at no end", {**FOUR, 5: Ready(NOW + 9)}, 2, [1, 4], both_ends=True),
]


def promoted(places: Places) -> Places:
    """Return the places after all that is due became ready, each id as of its due time and with its rank."""
    return {
        number: Ready(place.due, place.rank) if isinstance(place, Delayed) and place.due <= NOW else place
        for number, place in places.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.promise)
def test_take(bench: Bench, case: Case) -> None:
    bench.set(case.before)
    moved, left, next_due, taken = bench.take(case.limit, within=case.within, both_ends=case.both_ends)
    assert taken == case.taken
    after = promoted(case.before)
    assert moved == sum(after[number] != place for number, place in case.before.items())
    for number in taken:
        del after[number]
    assert bench.places() == after
    assert left == sum(isinstance(place, Ready) for place in after.values())
    assert next_due == min([place.due - NOW for place in after.values() if isinstance(place, Delayed)], default=None)
    # Others are woken exactly when something is left.
    assert bench.tokens() == (1 if left else 0)


def test_each_taken_id_comes_with_its_rank_and_the_time_to_wait_for(bench: Bench) -> None:
    bench.set({1: Ready(NOW - 70, 5), 2: Delayed(NOW - 90, 200), 3: Delayed(NOW + 30, 200)})
    answer = bench.call("take", now=NOW, limit=5, batch=10, within=30, both_ends=0)
    scores = {"1": 5 * BAND + NOW - 70, "2": 200 * BAND + NOW - 90, "3": 200 * BAND + NOW + 30}
    assert answer == [1, 0, "", "", 0, *(text for id_, score in scores.items() for text in (id_, str(score)))]


def test_ids_that_are_ready_before_they_fall_due_wait_for_their_due_times(bench: Bench) -> None:
    bench.set({1: Ready(NOW + 900, 3), 2: Ready(NOW + 51, 200), 3: Ready(NOW + 50, 201), 4: Ready(NOW - 1, 255)})
    answer = bench.call("take", now=NOW, limit=2, batch=10, within=50, both_ends=0)
    assert answer[:3] == [2, 0, str(NOW + 51)]
    assert answer[5:] == ["3", str(201 * BAND + NOW + 50), "4", str(255 * BAND + NOW - 1)]
    assert bench.places() == {1: Delayed(NOW + 900, 3), 2: Delayed(NOW + 51, 200)}


def test_a_call_moves_no_more_than_one_batch_back_and_says_that_there_may_be_more(bench: Bench) -> None:
    early: dict[int, Delayed | Ready] = {number: Ready(NOW + number, 1) for number in range(1, 11)}
    bench.set(early | {11: Ready(NOW - 5, 2)})
    assert bench.take(3, batch=4) == (4, 7, 1, [])
    assert bench.take(3, batch=4) == (4, 3, 1, [])
    assert bench.take(3, batch=4) == (2, 0, 1, [11])


def test_a_call_promotes_no_more_than_one_batch(bench: Bench) -> None:
    bench.set({number: Delayed(NOW - number) for number in range(1, 11)})
    assert bench.take(0, batch=4) == (4, 4, -6, [])
    ready = {number for number, place in bench.places().items() if isinstance(place, Ready)}
    assert ready == {10, 9, 8, 7}
