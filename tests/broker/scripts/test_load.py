"""load.lua and loaded.lua: one loader at a time, and each begins where the last one ended."""

from __future__ import annotations

from typing import Any, NamedTuple

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


def loaded(bench: Bench, upto: int, *, worker: str = "a", lease: int | str = "", now: int = NOW) -> Any:
    return bench.call("loaded", now=now, worker=worker, upto=upto, lease=lease)


@pytest.mark.parametrize("now", [NOW, 34_955_747_654_321])
def test_an_empty_redis_is_loaded_from_the_beginning(bench: Bench, now: int) -> None:
    horizon = str(now + AHEAD)
    # Sent again it says the same.
    for _ in range(2):
        assert load(bench, now=now) == ["ok", "", horizon]
        lead = {"horizon": horizon, "loader": "a", "loader_until": str(now + LEASE)}
        assert bench.meta() == {**OWNED, **lead, "tick": str(now)}
    # The horizon is set before anything is loaded.
    assert bench.put((1, now + AHEAD, 100), now=now)[0] == "ok"


class Case(NamedTuple):
    """The answer to a load, after another one has come so far and keeps its lease ("": it has finished)."""

    promise: str
    upto: int
    lease: int | str
    terms: dict[str, Any]
    answer: list[str]
    # When it has come so far.
    at: int = NOW


ALL = NOW + AHEAD
FROM_THE_BEGINNING = ["ok", "", HORIZON]
BUSY = ["busy", "", ""]
CASES = [
    Case("it begins where a finished one ended", ALL, "", {"now": NOW + 1000}, ["ok", HORIZON, str(ALL + 1000)]),
    Case("its horizon does not go back with the clock", ALL, "", {"now": NOW - 60_000}, ["ok", HORIZON, HORIZON]),
    # Producers with the nearer HORIZON did not put what is due beyond it.
    Case("a horizon of another setting is brought nearer", ALL, "", {"ahead": 1000}, ["ok", "", str(NOW + 1000)]),
    Case("what claims to be loaded beyond the horizon is not", ALL + 1, "", {}, FROM_THE_BEGINNING),
    Case("another run of Redis", ALL, "", {"run_id": "run2"}, FROM_THE_BEGINNING),
    Case("another history of Redis", ALL, "", {"replid": "repl2"}, FROM_THE_BEGINNING),
    Case("a Redis that has lost something", ALL, "", {"lost": "1"}, FROM_THE_BEGINNING),
    Case("a second loader waits", NOW + 5, LEASE, {"worker": "b", "now": NOW + LEASE - 1}, BUSY),
    Case("progress extends the lease", NOW + 5, LEASE, {"worker": "b", "now": NOW + LEASE}, BUSY, NOW + LEASE - 1),
    Case(
        "one that was silent for its lease is replaced, and its work goes on",
        NOW + 5,
        LEASE,
        {"worker": "b", "now": NOW + LEASE},
        ["ok", str(NOW + 5), str(ALL + LEASE)],
    ),
    Case("a loader that claims years is replaced", NOW + 5, 10**12, {"worker": "b"}, ["ok", str(NOW + 5), HORIZON]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.promise)
def test_a_load_after_another(bench: Bench, case: Case) -> None:
    load(bench)
    assert loaded(bench, case.upto, lease=case.lease, now=case.at) == "ok"
    before = bench.meta()
    assert ("loader" in before) == (case.lease != "")
    assert load(bench, **case.terms) == case.answer
    assert (bench.meta() == before) == (case.answer == BUSY)


def test_a_tick_leaps_with_a_load_from_the_beginning_only_and_never_goes_back(bench: Bench) -> None:
    bench.client.hset(bench.keys.meta, "tick", 5)
    load(bench)
    bench.client.hincrby(bench.keys.meta, "tick", 1)
    loaded(bench, ALL)
    load(bench, now=NOW + 1000)
    assert bench.meta()["tick"] == str(NOW + 1)
    load(bench, now=NOW - 1000, lost="1")
    assert bench.meta()["tick"] == str(NOW + 1)


def test_a_load_that_is_requested_begins_at_the_beginning_also_after_one_that_is_under_way(bench: Bench) -> None:
    load(bench)
    bench.call("request_load")
    loaded(bench, ALL)
    assert load(bench) == FROM_THE_BEGINNING
    loaded(bench, ALL)
    assert bench.call("request_load") == "ok"
    assert load(bench) == FROM_THE_BEGINNING
    loaded(bench, ALL)
    assert load(bench) == ["ok", HORIZON, HORIZON]


def test_nobody_needs_to_ask_an_empty_redis_for_a_load(bench: Bench) -> None:
    bench.call("request_load")
    assert bench.meta() == {}


@pytest.mark.parametrize("lease", [LEASE, ""])
def test_a_loader_whose_work_was_taken_over_or_emptied_gets_lost(bench: Bench, lease: int | str) -> None:
    load(bench)
    load(bench, worker="b", now=NOW + LEASE)
    before = bench.meta()
    assert loaded(bench, NOW + 5, lease=lease) == "lost"
    assert bench.meta() == before
    bench.client.flushall()
    assert loaded(bench, NOW + 5, worker="b", lease=lease) == "lost"
    assert bench.meta() == {}


def test_the_redis_of_another_database_is_refused_and_left_as_it_is(bench: Bench) -> None:
    load(bench)
    before = bench.meta()
    with pytest.raises(redis.ResponseError, match="FOREIGN "):
        load(bench, identity="theirs", lost="1", worker="b", now=NOW + 60_000)
    assert bench.meta() == before
