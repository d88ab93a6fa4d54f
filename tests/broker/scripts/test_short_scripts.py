"""missing.lua, remove.lua, notify.lua, clear.lua, duty.lua."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.support.in_redis import content

from .bench import NOW, Bench, Delayed, Places, Ready

META: dict[Any, Any] = {"horizon": "7", "loaded": "6", "identity": "i", "loader_until": "9"}


def test_missing_names_messages_without_a_place_or_with_one_later_than_due_and_changes_nothing(bench: Bench) -> None:
    before: Places = {1: Delayed(NOW), 2: Ready(NOW), 3: Delayed(NOW + 9), 4: Delayed(NOW - 9), 5: Delayed(NOW, 100)}
    bench.set(before)
    entries = [(1, NOW, 100), (2, NOW - 5, 100), (3, NOW, 100), (4, NOW, 100), (5, NOW, 99), (6, NOW, 100)]
    assert bench.call("missing", rest=[number for entry in entries for number in entry]) == ["3", "5", "6"]
    assert bench.places() == before


def test_remove_forgets_ids_wherever_they_are_and_no_others(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW), 3: Delayed(NOW), 4: Ready(NOW)})
    assert bench.call("remove", rest=[1, 2, 99]) == 2
    assert bench.places() == {3: Delayed(NOW), 4: Ready(NOW)}


def test_many_notifications_leave_one_token(bench: Bench) -> None:
    for _ in range(5):
        assert bench.call("notify") == "ok"
    assert bench.tokens() == 1
    bench.client.lpop(bench.keys.wake)
    bench.call("notify")
    assert bench.tokens() == 1


def clear(bench: Bench, *queues: str, seen: int = NOW, now: int = NOW, identity: str = "i") -> Any:
    return bench.call("clear", now=now, seen=seen, identity=identity, rest=queues)


def test_clear_deletes_the_keys_of_the_queues_by_name_and_no_others(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)})
    bench.call("notify")
    bench.client.hset(bench.keys.meta, mapping=META)
    bench.client.zadd(bench.keys.queues, {"indexed": 0})
    for name in ("given", "indexed", "neither"):
        bench.client.set(f"{{bench}}:{name}:delayed", "somebody's")
    bench.client.set("others", "data")
    for queue in ("q", "elsewhere"):
        bench.client.hset(bench.keys.blocked_counts, f"{queue}:topic t", 1)
        bench.client.zadd(f"{{bench}}:{queue}:aside:topic t", {"3": 0})
    assert clear(bench, "q", "given") == "ok"
    assert {key.decode() for key in bench.client.scan_iter()} == {bench.keys.meta, "others", "{bench}:neither:delayed"}
    assert bench.meta() == {"cleared": str(NOW)}


@pytest.mark.parametrize(
    "name", ["meta", "queues", "wake_all", "blocked_counts", "delayed", "ready", "wake", "blocked"]
)
def test_clear_deletes_keys_of_any_type(bench: Bench, name: str) -> None:
    bench.client.set(getattr(bench.keys, name), "somebody's")
    assert clear(bench, "q") == "ok"
    assert {key.decode() for key in bench.client.scan_iter()} == {bench.keys.meta}


@pytest.mark.parametrize("rubbish", ["abc", "nan", "inf", "9" * 30, ""])
def test_clear_ignores_a_time_that_is_not_ours(bench: Bench, rubbish: str) -> None:
    bench.client.hset(bench.keys.meta, "cleared", rubbish)
    assert clear(bench, "q") == "ok"
    assert bench.meta() == {"cleared": str(NOW)}


def test_a_duty_of_another_type_is_taken(bench: Bench) -> None:
    bench.client.lpush(bench.keys.duty, "somebody's")
    assert bench.call("duty", worker="w", lease=1000) == 1
    assert bench.client.get(bench.keys.duty) == b"w"


@pytest.mark.parametrize("name", ["put", "remove", "take", "clear", "request_load"])
def test_the_queue_of_another_database_is_left_as_it_is(bench: Bench, name: str) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)}, horizon=NOW + 1000)
    bench.client.hset(bench.keys.meta, mapping={"identity": "theirs", "tick": 5})
    values: dict[str, dict[str, Any]] = {
        "put": {"now": NOW, "mode": "set", "rest": [3, NOW, 100]},
        "remove": {"rest": [1, 2]},
        "take": {"now": NOW, "limit": 5, "batch": 5, "within": 0, "both_ends": 0},
        "request_load": {},
        "clear": {"now": NOW, "seen": NOW, "rest": ["q"]},
    }
    before = content(bench.client)
    with pytest.raises(redis.ResponseError, match="FOREIGN "):
        bench.call(name, identity="ours", **values[name])
    assert content(bench.client) == before
    bench.call(name, identity="theirs", **values[name])
    assert content(bench.client) != before
