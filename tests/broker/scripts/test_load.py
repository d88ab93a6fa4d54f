"""load.lua and loaded.lua: one loader at a time, and each begins where the last one ended."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from .bench import NOW, Bench

AHEAD = 600_000
LEASE = 10_000
HORIZON = str(NOW + AHEAD)
TERMS: dict[str, Any] = {
    "now": NOW,
    "ahead": AHEAD,
    "worker": "a",
    "lease": LEASE,
    "identity": "ours",
    "run_id": "run1",
    "replid": "repl1",
    "lost": "",
}
OWNED = {"identity": "ours", "run_id": "run1", "replid": "repl1"}


def load(bench: Bench, **terms: Any) -> Any:
    return bench.call("load", **{**TERMS, **terms})


def loaded(bench: Bench, upto: int, *, worker: str = "a", lease: int | str = LEASE, now: int = NOW) -> Any:
    return bench.call("loaded", now=now, worker=worker, upto=upto, lease=lease)


def test_an_empty_redis_is_loaded_from_the_beginning(bench: Bench) -> None:
    assert load(bench) == ["ok", "", HORIZON]
    lead = {"horizon": HORIZON, "loader": "a", "loader_until": str(NOW + LEASE)}
    assert bench.meta() == {**OWNED, **lead, "tick": str(NOW)}


def test_the_horizon_is_advanced_before_anything_is_loaded(bench: Bench) -> None:
    load(bench)
    assert bench.put((1, NOW + AHEAD, 100))[0] == "ok"


def test_a_finished_load_is_where_the_next_one_begins(bench: Bench) -> None:
    load(bench)
    assert loaded(bench, NOW + AHEAD, lease="") == "ok"
    assert "loader" not in bench.meta()
    assert load(bench, now=NOW + 1000) == ["ok", HORIZON, str(NOW + 1000 + AHEAD)]


def test_a_tick_leaps_with_a_load_from_the_beginning_only_and_never_goes_back(bench: Bench) -> None:
    bench.client.hset(bench.keys.meta, "tick", 5)
    load(bench)
    bench.client.hincrby(bench.keys.meta, "tick", 1)
    loaded(bench, NOW + AHEAD, lease="")
    load(bench, now=NOW + 1000)
    assert bench.meta()["tick"] == str(NOW + 1)
    load(bench, now=NOW - 1000, lost="1")
    assert bench.meta()["tick"] == str(NOW + 1)


def test_an_interrupted_load_is_resumed_where_it_ended(bench: Bench) -> None:
    load(bench)
    assert loaded(bench, NOW + 5) == "ok"
    assert load(bench, worker="b", now=NOW + LEASE) == ["ok", str(NOW + 5), str(NOW + LEASE + AHEAD)]


def test_a_horizon_does_not_go_back_with_a_clock_that_was_set_back(bench: Bench) -> None:
    load(bench)
    loaded(bench, NOW + AHEAD, lease="")
    assert load(bench, now=NOW - 60_000) == ["ok", HORIZON, HORIZON]


def test_a_horizon_of_another_setting_is_brought_nearer_and_loaded_from_the_beginning(bench: Bench) -> None:
    """Producers with the nearer HORIZON did not put what is due beyond it."""
    load(bench)
    loaded(bench, NOW + AHEAD, lease="")
    assert load(bench, ahead=1000) == ["ok", "", str(NOW + 1000)]


def test_a_load_that_is_requested_begins_at_the_beginning(bench: Bench) -> None:
    load(bench)
    loaded(bench, NOW + AHEAD, lease="")
    assert bench.call("request_load") == "ok"
    assert load(bench) == ["ok", "", HORIZON]
    loaded(bench, NOW + AHEAD, lease="")
    assert load(bench) == ["ok", HORIZON, HORIZON]


def test_a_load_that_is_requested_during_another_follows_it(bench: Bench) -> None:
    load(bench)
    bench.call("request_load")
    loaded(bench, NOW + AHEAD, lease="")
    assert load(bench) == ["ok", "", HORIZON]


def test_nobody_needs_to_ask_an_empty_redis_for_a_load(bench: Bench) -> None:
    bench.call("request_load")
    assert bench.meta() == {}


def test_a_queue_that_claims_to_be_loaded_beyond_its_horizon_is_loaded_from_the_beginning(bench: Bench) -> None:
    load(bench)
    loaded(bench, NOW + AHEAD + 1, lease="")
    assert load(bench) == ["ok", "", HORIZON]


def test_a_loader_that_claims_years_is_replaced(bench: Bench) -> None:
    load(bench)
    bench.client.hset(bench.keys.meta, mapping={"loader": "ghost", "loader_until": NOW + 10**12})
    assert load(bench, worker="b") == ["ok", "", HORIZON]


def test_a_second_loader_gets_busy_while_one_loads(bench: Bench) -> None:
    load(bench)
    before = bench.meta()
    assert load(bench, worker="b", now=NOW + LEASE - 1) == ["busy", "", ""]
    assert bench.meta() == before


def test_a_loader_that_was_silent_for_its_lease_is_replaced_and_gets_lost(bench: Bench) -> None:
    load(bench)
    assert load(bench, worker="b", now=NOW + LEASE)[0] == "ok"
    before = bench.meta()
    assert loaded(bench, NOW + 5) == "lost"
    assert bench.meta() == before
    assert loaded(bench, NOW + 5, worker="b") == "ok"


def test_every_progress_of_a_loader_extends_its_lease(bench: Bench) -> None:
    load(bench)
    assert loaded(bench, NOW + 5, now=NOW + LEASE - 1) == "ok"
    assert load(bench, worker="b", now=NOW + LEASE)[0] == "busy"


def test_a_load_gets_lost_when_redis_was_emptied_meanwhile(bench: Bench) -> None:
    load(bench)
    bench.client.flushall()
    assert loaded(bench, NOW + 5) == "lost"
    assert loaded(bench, NOW + 5, lease="") == "lost"
    assert bench.meta() == {}


@pytest.mark.parametrize("change", [{"run_id": "run2"}, {"replid": "repl2"}, {"lost": "1"}], ids=repr)
def test_another_run_of_redis_is_loaded_from_the_beginning(bench: Bench, change: dict[str, str]) -> None:
    load(bench)
    loaded(bench, NOW + AHEAD, lease="")
    assert load(bench, **change)[:2] == ["ok", ""]
    assert "loaded" not in bench.meta()


def test_the_redis_of_another_database_is_refused_and_left_as_it_is(bench: Bench) -> None:
    load(bench)
    before = bench.meta()
    with pytest.raises(redis.ResponseError, match="FOREIGN "):
        load(bench, identity="theirs", lost="1", worker="b", now=NOW + 60_000)
    assert bench.meta() == before


def test_load_sent_twice_is_load_sent_once(bench: Bench) -> None:
    first = load(bench)
    once = bench.meta()
    assert load(bench) == first
    assert bench.meta() == once


@pytest.mark.parametrize("lease", [LEASE, ""])
def test_loaded_sent_twice_is_loaded_sent_once(bench: Bench, lease: int | str) -> None:
    load(bench)
    loaded(bench, NOW + 5, lease=lease)
    once = bench.meta()
    loaded(bench, NOW + 5, lease=lease)
    assert bench.meta() == once


def test_times_are_kept_to_the_tenth(bench: Bench) -> None:
    far = 34_955_747_654_321
    load(bench, now=far, ahead=1)
    assert bench.meta()["horizon"] == str(far + 1)
    assert bench.meta()["loader_until"] == str(far + LEASE)
