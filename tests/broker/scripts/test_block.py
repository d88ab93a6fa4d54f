"""block.lua and what the other scripts do with blocked ids."""

from __future__ import annotations

from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pytest

from .bench import BAND, NOW, Bench, Delayed, Ready


def blocked(bench: Bench) -> dict[str, dict[int, float]]:
    """Return the blocked ids, by name, with their scores; what counts and names them must agree."""
    counts: Any = bench.client.hgetall(bench.keys.blocked_counts)
    names: Any = bench.client.hgetall(bench.keys.blocked)
    found: dict[str, dict[int, float]] = {}
    for field, number in counts.items():
        queue, _, name = field.decode().partition(":")
        assert queue == "q"
        members: Any = bench.client.zrange(f"{bench.keys.blocked}:{name}", 0, -1, withscores=True)
        found[name] = {int(member): score for member, score in members}
        assert len(found[name]) == int(number)
    assert {int(pk): name.decode() for pk, name in names.items()} == {pk: n for n, ids in found.items() for pk in ids}
    return found


def block(bench: Bench, *entries: tuple[int, int, str], rank: int = 100) -> None:
    rest: list[Any] = []
    for name, some in groupby(entries, itemgetter(2)):
        scores = [(rank * BAND + due, pk) for pk, due, _ in some]
        rest += [name, len(scores), *chain.from_iterable(scores)]
    bench.call("block", rest=rest)


def unblocked(bench: Bench, limit: int, *names: tuple[str, int]) -> list[int]:
    return bench.take(limit, *names)[3]


def test_a_blocked_id_is_taken_only_under_its_name(bench: Bench) -> None:
    terms = {"now": NOW, "limit": 10, "batch": 10, "within": 0, "both_ends": 0}
    # The last number tells whether any id is blocked.
    assert bench.call("take", **terms) == [0, 0, "", "", 0]
    block(bench, (1, NOW - 3, "a"), (2, NOW - 2, "b b"), (3, NOW - 1, "a"))
    assert bench.call("take", **terms) == [0, 0, "", "", 1]
    assert unblocked(bench, 10, ("c", 5)) == []
    assert unblocked(bench, 10, ("a", 1)) == [1]
    assert unblocked(bench, 10, ("a", 5), ("b b", 5)) == [2, 3]
    assert blocked(bench) == {}


def test_what_was_blocked_is_taken_in_its_old_order_among_the_others(bench: Bench) -> None:
    bench.set({1: Ready(NOW - 9), 2: Ready(NOW - 1), 3: Delayed(NOW)})
    block(bench, (4, NOW - 5, "a"))
    block(bench, (5, NOW - 5, "a"), rank=99)
    assert unblocked(bench, 10, ("a", 2)) == [5, 1, 4, 2, 3]


def test_what_was_unblocked_and_not_taken_is_ready_for_all(bench: Bench) -> None:
    bench.set({1: Ready(NOW - 9)})
    block(bench, (4, NOW - 5, "a"), (5, NOW - 4, "a"))
    assert unblocked(bench, 1, ("a", 1)) == [1]
    assert bench.places() == {4: Ready(NOW - 5)}
    assert blocked(bench) == {"a": {5: 100 * BAND + NOW - 4}}


def test_an_id_is_blocked_under_its_last_name_only(bench: Bench) -> None:
    block(bench, (4, NOW, "a"), (5, NOW, "a"))
    block(bench, (4, NOW - 1, "b"))
    assert blocked(bench) == {"a": {5: 100 * BAND + NOW}, "b": {4: 100 * BAND + NOW - 1}}


def test_a_put_that_changes_a_message_unblocks_it(bench: Bench) -> None:
    bench.set({}, horizon=NOW + 100)
    block(bench, (4, NOW, "a"), (5, NOW, "a"), (6, NOW, "a"))
    bench.put((4, NOW + 50, 100), (5, NOW - 50, 100), (6, NOW + 500, 100))
    assert blocked(bench) == {}
    assert bench.places() == {4: Delayed(NOW + 50), 5: Ready(NOW - 50)}


def test_a_fill_leaves_it_where_it_is(bench: Bench) -> None:
    bench.set({}, horizon=NOW + 100)
    block(bench, (4, NOW, "a"))
    assert bench.put((4, NOW, 100), (5, NOW, 100), mode="fill") == ["ok", 1, 1, 0]
    assert blocked(bench) == {"a": {4: 100 * BAND + NOW}}
    assert bench.places() == {5: Ready(NOW)}


def test_it_is_not_missing_and_can_be_removed(bench: Bench) -> None:
    block(bench, (4, NOW, "a"), (5, NOW, "a"))
    assert bench.call("missing", rest=[4, NOW, 100, 6, NOW, 100]) == ["6"]
    assert bench.call("remove", rest=[4, 6]) == 1
    assert blocked(bench) == {"a": {5: 100 * BAND + NOW}}


def test_only_ids_without_a_handler_wake_another_worker(bench: Bench) -> None:
    block(bench, (4, NOW, "t topic key"))
    assert bench.tokens() == 0
    block(bench, (5, NOW, "h topic"))
    assert bench.tokens() == 1


@pytest.mark.parametrize("lost", ["set", "count"])
def test_a_blocked_id_that_nobody_would_find_any_more_is_missing_and_can_be_filled(bench: Bench, lost: str) -> None:
    """Redis may evict any key."""
    bench.set({}, horizon=NOW + 100)
    block(bench, (4, NOW, "a"))
    bench.client.delete(f"{bench.keys.blocked}:a" if lost == "set" else bench.keys.blocked_counts)
    assert bench.call("missing", rest=[4, NOW, 100]) == ["4"]
    assert bench.put((4, NOW, 100), mode="fill") == ["ok", 1, 0, 0]
    assert blocked(bench) == {}
    assert bench.places() == {4: Ready(NOW)}
