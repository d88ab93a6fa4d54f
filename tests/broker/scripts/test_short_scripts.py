"""missing.lua, remove.lua, notify.lua, tick.lua."""

from __future__ import annotations

from typing import Any

import pytest

from .bench import NOW, Bench, Delayed, Places, Ready

META: dict[Any, Any] = {
    "horizon": "7",
    "loaded": "6",
    "run_id": "r",
    "replid": "p",
    "identity": "i",
    "loader_until": "9",
}


def test_missing_names_messages_without_a_place_or_with_one_later_than_due_and_changes_nothing(bench: Bench) -> None:
    before: Places = {1: Delayed(NOW), 2: Ready(NOW), 3: Delayed(NOW + 9), 4: Delayed(NOW - 9), 5: Delayed(NOW, 100)}
    bench.set(before)
    entries = [(1, NOW, 100), (2, NOW - 5, 100), (3, NOW, 100), (4, NOW, 100), (5, NOW, 99), (6, NOW, 100)]
    assert bench.call("missing", rest=[number for entry in entries for number in entry]) == ["3", "5", "6"]
    assert bench.places() == before


def test_missing_is_what_a_fill_would_put(bench: Bench) -> None:
    bench.set({1: Delayed(NOW + 5), 2: Ready(NOW), 3: Delayed(NOW + 9)}, horizon=NOW + 100)
    entries = [(number, NOW + 5, 100) for number in (1, 2, 3, 4)]
    missing = bench.call("missing", rest=[number for entry in entries for number in entry])
    assert bench.put(*entries, mode="fill") == ["ok", len(missing), 2, 0]


def test_remove_forgets_ids_wherever_they_are_and_no_others(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW), 3: Delayed(NOW), 4: Ready(NOW)})
    assert bench.call("remove", rest=[1, 2, 99]) == 2
    assert bench.places() == {3: Delayed(NOW), 4: Ready(NOW)}


def test_remove_sent_twice_is_remove_sent_once(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)})
    assert bench.call("remove", rest=[1]) == 1
    assert bench.call("remove", rest=[1]) == 0
    assert bench.places() == {2: Ready(NOW)}


def test_remove_takes_a_thousand_ids(bench: Bench) -> None:
    bench.set({number: Delayed(NOW) for number in range(1, 1001)})
    assert bench.call("remove", rest=list(range(1, 1001))) == 1000
    assert bench.places() == {}


def test_many_notifications_leave_one_token(bench: Bench) -> None:
    for _ in range(5):
        assert bench.call("notify") == "ok"
    assert bench.tokens() == 1
    bench.client.lpop(bench.keys.wake)
    bench.call("notify")
    assert bench.tokens() == 1


def test_tick_of_an_empty_redis_finds_nothing_but_itself(bench: Bench) -> None:
    assert bench.call("tick") == [1, "", "", "", "", "", ""]
    assert bench.meta() == {"tick": "1"}


def test_tick_returns_the_meta_and_grows(bench: Bench) -> None:
    bench.client.hset(bench.keys.meta, mapping={**META, "tick": "41"})
    assert bench.call("tick") == [42, "7", "6", "r", "p", "i", "9"]
    assert bench.call("tick") == [43, "7", "6", "r", "p", "i", "9"]
    assert bench.meta() == {**META, "tick": "43"}


@pytest.mark.parametrize("name", ["delayed", "ready"])
def test_mend_deletes_keys_of_another_type_and_has_redis_loaded_again(bench: Bench, name: str) -> None:
    bench.client.hset(bench.keys.meta, mapping=META)
    for key in (getattr(bench.keys, name), bench.keys.wake):
        bench.client.set(key, "somebody's")
    assert bench.call("mend") == 1
    assert bench.client.exists(bench.keys.delayed, bench.keys.ready, bench.keys.wake) == 0
    assert bench.meta() == {name: value for name, value in META.items() if name != "loaded"}
    assert bench.call("mend") == 0


def test_mend_keeps_a_healthy_queue_as_it_is(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)})
    bench.call("notify")
    bench.client.hset(bench.keys.meta, mapping=META)
    before = {key: bench.client.dump(key) for key in bench.client.scan_iter()}
    assert bench.call("mend") == 0
    assert {key: bench.client.dump(key) for key in bench.client.scan_iter()} == before


def test_tick_deletes_keys_of_another_type_and_has_redis_loaded_again(bench: Bench) -> None:
    bench.client.hset(bench.keys.meta, mapping=META)
    for key in (bench.keys.queues, bench.keys.wake_all):
        bench.client.set(key, "somebody's")
    assert bench.call("tick")[1:3] == ["7", ""]
    assert bench.client.exists(bench.keys.queues, bench.keys.wake_all) == 0
    bench.client.delete(bench.keys.meta)
    bench.client.set(bench.keys.meta, "somebody's")
    assert bench.call("tick") == [1, "", "", "", "", "", ""]


def test_tick_keeps_a_healthy_queue_as_it_is(bench: Bench) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)})
    bench.call("notify")
    bench.client.hset(bench.keys.meta, mapping=META)
    assert bench.call("tick")[1:] == ["7", "6", "r", "p", "i", "9"]
    assert bench.places() == {1: Delayed(NOW), 2: Ready(NOW)}
    assert bench.tokens() == 1


@pytest.mark.parametrize("rubbish", ["abc", "nan", 2**63 - 1])
def test_a_tick_that_cannot_be_counted_up_begins_anew(bench: Bench, rubbish: str | int) -> None:
    bench.client.hset(bench.keys.meta, mapping={**META, "tick": rubbish})
    assert bench.call("tick")[0] == 1


@pytest.mark.parametrize("name", ["put", "remove", "take", "tick"])
def test_the_queue_of_another_database_is_left_as_it_is(bench: Bench, name: str) -> None:
    bench.set({1: Delayed(NOW), 2: Ready(NOW)}, horizon=NOW + 1000)
    bench.client.hset(bench.keys.meta, mapping={"identity": "theirs", "tick": 5})
    values: dict[str, dict[str, Any]] = {
        "put": {"now": NOW, "mode": "set", "rest": [3, NOW, 100]},
        "remove": {"rest": [1, 2]},
        "take": {"now": NOW, "limit": 5, "batch": 5, "within": 0},
        "tick": {},
    }
    before = {key: bench.client.dump(key) for key in bench.client.scan_iter()}
    answer = bench.call(name, identity="ours", **values[name])
    assert "foreign" in answer or answer[5] == "theirs"
    assert {key: bench.client.dump(key) for key in bench.client.scan_iter()} == before
    answer = bench.call(name, identity="theirs", **values[name])
    assert answer != "foreign"
    assert {key: bench.client.dump(key) for key in bench.client.scan_iter()} != before


@pytest.mark.parametrize("ahead", [36_000_000, -300_000])
def test_every_script_goes_by_the_time_that_it_is_given(bench: Bench, ahead: int) -> None:
    """As the record's clock may be an hour ahead of that of the server."""
    seconds, _micros = bench.client.time()
    now = int(seconds) * 10_000 + ahead
    terms = {"worker": "a", "identity": "i", "run_id": "r", "replid": "p", "lost": ""}
    bench.call("load", now=now, ahead=1000, lease=10, **terms)
    assert (bench.meta()["horizon"], bench.meta()["loader_until"]) == (str(now + 1000), str(now + 10))
    bench.call("loaded", now=now, worker="a", upto=5, lease=20)
    assert bench.meta()["loader_until"] == str(now + 20)
    bench.put((1, now, 100), (2, now + 1, 100), now=now)
    assert bench.places() == {1: Ready(now), 2: Delayed(now + 1)}
    assert bench.take(5, now=now) == (0, 0, 1, [1])
    assert bench.take(5, now=now + 1) == (1, 0, None, [2])
