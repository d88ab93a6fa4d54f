"""stand_aside.lua and what the other scripts do with ids that stand aside."""

from __future__ import annotations

from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pytest

from .bench import BAND, NOW, Bench, Delayed, Ready


def aside(bench: Bench) -> dict[str, dict[int, float]]:
    """Return the ids that stand aside, by name, with their scores; what counts and names them must agree."""
    counts: Any = bench.client.hgetall(bench.keys.asides)
    names: Any = bench.client.hgetall(bench.keys.aside)
    found: dict[str, dict[int, float]] = {}
    for place, number in counts.items():
        queue, _, name = place.decode().partition(":")
        assert queue == "q"
        members: Any = bench.client.zrange(f"{bench.keys.aside}:{name}", 0, -1, withscores=True)
        found[name] = {int(member): score for member, score in members}
        assert len(found[name]) == int(number)
    assert {int(pk): name.decode() for pk, name in names.items()} == {pk: n for n, ids in found.items() for pk in ids}
    return found


def set_aside(bench: Bench, *entries: tuple[int, int, str], rank: int = 100) -> None:
    rest: list[Any] = []
    for name, some in groupby(entries, itemgetter(2)):
        places = [(rank * BAND + due, pk) for pk, due, _ in some]
        rest += [name, len(places), *chain.from_iterable(places)]
    bench.call("stand_aside", rest=rest)


def opened(bench: Bench, limit: int, *names: tuple[str, int]) -> list[int]:
    return bench.take(limit, *names)[3]


def test_what_stands_aside_is_taken_only_under_its_name(bench: Bench) -> None:
    terms = {"now": NOW, "limit": 10, "batch": 10, "within": 0, "both_ends": 0}
    # The last number tells whether anything stands aside.
    assert bench.call("take", **terms) == [0, 0, "", "", 0]
    set_aside(bench, (1, NOW - 3, "a"), (2, NOW - 2, "b b"), (3, NOW - 1, "a"))
    assert bench.call("take", **terms) == [0, 0, "", "", 1]
    assert opened(bench, 10, ("c", 5)) == []
    assert opened(bench, 10, ("a", 1)) == [1]
    assert opened(bench, 10, ("a", 5), ("b b", 5)) == [2, 3]
    assert aside(bench) == {}


def test_what_stood_aside_is_taken_in_its_old_order_among_the_others(bench: Bench) -> None:
    bench.set({1: Ready(NOW - 9), 2: Ready(NOW - 1), 3: Delayed(NOW)})
    set_aside(bench, (4, NOW - 5, "a"))
    set_aside(bench, (5, NOW - 5, "a"), rank=99)
    assert opened(bench, 10, ("a", 2)) == [5, 1, 4, 2, 3]


def test_what_was_opened_and_not_taken_is_ready_for_all(bench: Bench) -> None:
    bench.set({1: Ready(NOW - 9)})
    set_aside(bench, (4, NOW - 5, "a"), (5, NOW - 4, "a"))
    assert opened(bench, 1, ("a", 1)) == [1]
    assert bench.places() == {4: Ready(NOW - 5)}
    assert aside(bench) == {"a": {5: 100 * BAND + NOW - 4}}


def test_an_id_stands_aside_under_its_last_name_only(bench: Bench) -> None:
    set_aside(bench, (4, NOW, "a"), (5, NOW, "a"))
    set_aside(bench, (4, NOW - 1, "b"))
    assert aside(bench) == {"a": {5: 100 * BAND + NOW}, "b": {4: 100 * BAND + NOW - 1}}


def test_a_put_that_changes_a_message_takes_it_out(bench: Bench) -> None:
    bench.set({}, horizon=NOW + 100)
    set_aside(bench, (4, NOW, "a"), (5, NOW, "a"), (6, NOW, "a"))
    bench.put((4, NOW + 50, 100), (5, NOW - 50, 100), (6, NOW + 500, 100))
    assert aside(bench) == {}
    assert bench.places() == {4: Delayed(NOW + 50), 5: Ready(NOW - 50)}


def test_a_fill_leaves_it_where_it_is(bench: Bench) -> None:
    bench.set({}, horizon=NOW + 100)
    set_aside(bench, (4, NOW, "a"))
    assert bench.put((4, NOW, 100), (5, NOW, 100), mode="fill") == ["ok", 1, 1, 0]
    assert aside(bench) == {"a": {4: 100 * BAND + NOW}}
    assert bench.places() == {5: Ready(NOW)}


def test_it_is_not_missing_and_can_be_removed(bench: Bench) -> None:
    set_aside(bench, (4, NOW, "a"), (5, NOW, "a"))
    assert bench.call("missing", rest=[4, NOW, 100, 6, NOW, 100]) == ["6"]
    assert bench.call("remove", rest=[4, 6]) == 1
    assert aside(bench) == {"a": {5: 100 * BAND + NOW}}


def test_only_ids_without_a_handler_wake_another_worker(bench: Bench) -> None:
    set_aside(bench, (4, NOW, "t topic key"))
    assert bench.tokens() == 0
    set_aside(bench, (5, NOW, "h topic"))
    assert bench.tokens() == 1


@pytest.mark.parametrize("lost", ["set", "count"])
def test_an_id_that_nobody_would_find_aside_any_more_is_missing_and_can_be_filled(bench: Bench, lost: str) -> None:
    """Redis may evict any key."""
    bench.set({}, horizon=NOW + 100)
    set_aside(bench, (4, NOW, "a"))
    bench.client.delete(f"{bench.keys.aside}:a" if lost == "set" else bench.keys.asides)
    assert bench.call("missing", rest=[4, NOW, 100]) == ["4"]
    assert bench.put((4, NOW, 100), mode="fill") == ["ok", 1, 0, 0]
    assert aside(bench) == {}
    assert bench.places() == {4: Ready(NOW)}
