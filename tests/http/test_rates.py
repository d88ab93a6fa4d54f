"""Limits of tokens: what counts, for whom, and what a call above them is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq.broker import publisher
from django_delayq.http import rates, tokens
from django_delayq.http.models import Token
from tests import settings as test_settings
from tests.http.conftest import Wire
from tests.http.servers import PROJECT, Server
from tests.support.commands import run
from tests.support.rows import columns
from tests.support.workers import eventually

NONE = (404, {"msg": "no job available"})
LONG = 3600
needs_redis = pytest.mark.skipif(not test_settings.HAS_REDIS, reason="needs the packages of Redis")


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "process"])
def where(request: pytest.FixtureRequest, settings: Any) -> str:
    """Where calls are counted."""
    if request.param == "process":
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    else:
        request.getfixturevalue("redis_has_time")
    return str(request.param)


def limit(wire: Wire, reads: int | None, writes: int | None, interval: int = LONG) -> None:
    tokens.limit(Token.objects.get(digest=tokens.digest_of(wire.token)), reads, writes, interval)


def refused(wire: Wire, verb: str) -> tuple[int, Any]:
    return 429, {"msg": f"token({wire.token}) {verb} reach the limit rate, please retry later"}


def counts(token: Token) -> bool:
    """Count a read, and return whether the limit allowed it."""
    try:
        return rates.count(token, rates.CONSUME, "t") is not None
    except rates.RateLimited:
        return False


def publish(wire: Wire, path: str = "/api/ns1/q1", body: bytes = b"x") -> int:
    return wire("PUT", path, body)[0]


def test_the_recorded_throttle_is_the_same(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=1)
    assert publish(wire) == 201
    assert wire("PUT", "/api/ns1/q1", b"x") == refused(wire, "produce")
    assert 1 <= int(wire.last["Retry-After"]) <= LONG
    assert len(wire.last["X-Request-Id"]) == 26
    assert wire("GET", "/api/ns1/q1")[0] == 200
    assert wire("GET", "/api/ns1/q1") == refused(wire, "consume")


def test_an_answer_without_a_job_and_a_refused_publish_count_no_longer(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=1)
    for _time in range(3):
        assert wire("GET", "/api/ns1/q1") == NONE
        assert wire("GET", "/api/ns1/q1?count=0")[0] == 400
        assert publish(wire, "/api/ns1/q1?tries=0") == 400
    assert publish(wire) == 201
    assert publish(wire) == 429
    assert wire("GET", "/api/ns1/q1")[0] == 200
    assert wire("GET", "/api/ns1/q1")[0] == 429


def test_a_bulk_counts_once_and_what_neither_takes_nor_publishes_does_not(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=2)
    assert publish(wire, "/api/ns1/q1/bulk", b"[1, 2, 3]") == 201
    job = wire("PUT", "/api/ns1/q1", b"x")[1]["job_id"]
    assert publish(wire) == 429
    for _time in range(2):
        assert wire("GET", "/api/ns1/q1/peek")[0] == 200
        assert wire("GET", f"/api/ns1/q1/job/{job}")[0] == 200
        assert wire("GET", "/api/ns1/q1/deadletter")[0] == 200
        assert wire("PUT", "/api/ns1/q1/deadletter")[0] == 200
        status, content = wire("PUT", f"/api/ns1/q1/job/{job}", b"y")
        assert status == 201
        job = content["job_id"]
    assert wire("GET", "/api/ns1/q1?count=9")[0] == 200
    assert wire("GET", "/api/ns1/q1")[0] == 429
    assert wire("DELETE", f"/api/ns1/q1/job/{job}")[0] == 204


def test_a_token_is_checked_before_it_is_counted(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=1)
    assert wire("PUT", "/api/ns1/q1", b"x", X_Token="unknown")[0] == 401
    Token.objects.update(rights="consume")
    assert publish(wire) == 403
    Token.objects.update(rights="publish")
    assert eventually(lambda: publish(wire) == 201)


def test_each_interval_begins_anew(wire: Wire, where: str) -> None:
    limit(wire, reads=None, writes=2, interval=1)
    assert eventually(lambda: publish(wire) == 429)
    assert wire.last["Retry-After"] == "1"
    assert eventually(lambda: publish(wire) == 201)


def test_a_change_holds(wire: Wire, where: str) -> None:
    limit(wire, reads=None, writes=1)
    assert [publish(wire), publish(wire)] == [201, 429]
    limit(wire, reads=None, writes=2)
    assert [publish(wire), publish(wire)] == [201, 429]
    limit(wire, reads=None, writes=1)
    assert publish(wire) == 429
    # The interval that has begun becomes shorter too.
    limit(wire, reads=None, writes=1, interval=1)
    assert publish(wire) == 429
    assert wire.last["Retry-After"] == "1"
    assert eventually(lambda: publish(wire) == 201)
    limit(wire, reads=None, writes=None)
    assert [publish(wire) for _time in range(5)] == [201] * 5


def test_tokens_and_verbs_count_apart(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=1)
    assert [publish(wire), publish(wire)] == [201, 429]
    assert wire("GET", "/api/ns1/q1")[0] == 200
    other, text = tokens.make("ns1")
    tokens.limit(other, 1, 1, LONG)
    assert wire("PUT", "/api/ns1/q1", b"x", X_Token=text)[0] == 201


def test_what_is_taken_back_late_does_not_count_in_another_interval(wire: Wire, where: str) -> None:
    limit(wire, reads=1, writes=None, interval=1)
    token = Token.objects.get()
    early = rates.count(token, rates.CONSUME, "t")
    assert early is not None

    def counted_anew() -> rates.Counted | None:
        try:
            return rates.count(token, rates.CONSUME, "t")
        except rates.RateLimited:
            return None

    limit(wire, reads=1, writes=None, interval=LONG)
    late = eventually(counted_anew)
    early.take_back()
    assert late is not None
    assert late.window != early.window
    assert counted_anew() is None


def test_a_poll_whose_client_is_gone_is_taken_back_once(wire: Wire) -> None:
    limit(wire, reads=1, writes=None)
    with Server(token=wire.token) as server:
        for _time in range(5):
            server.poll("ttr=60", queue="q2").close()
            eventually(lambda: server.ask("GET", "/api/ns1/q2") == NONE)
        for _number in range(2):
            assert server.ask("PUT", "/api/ns1/q1", b"x")[0] == 201
        eventually(lambda: server.ask("GET", "/api/ns1/q1")[0] == 200)
        assert server.ask("GET", "/api/ns1/q1")[0] == 429


def test_threads_count_exactly(wire: Wire, where: str) -> None:
    limit(wire, reads=7, writes=None)
    token = Token.objects.get()

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(counts, [token] * 60)) == 7


def test_those_who_know_of_a_change_and_those_who_do_not_yet_count_together(wire: Wire, where: str) -> None:
    limit(wire, reads=5, writes=None)
    early, late = Token.objects.get(), Token.objects.get()
    late.reads = 10

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(counts, [early, late] * 30)) == 10


@needs_redis
def test_two_processes_count_one_limit(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_TEST_REDIS_TIMEOUT", "10")
    limit(wire, reads=None, writes=20)
    made = (Server(token=wire.token, module=PROJECT) for _number in range(2))
    with next(made) as one, next(made) as two, ThreadPoolExecutor(4) as threads:
        servers = [one, two] * 20
        answers = list(threads.map(lambda server: server.ask("PUT", "/api/ns1/q1", b"x")[0], servers))
        assert sorted(answers) == [201] * 20 + [429] * 20
        run("delayq_token", "limit", "ns1", "--beginning", wire.token[:8], "--writes", "22", "--interval", str(LONG))
        for server in (one, two):
            eventually(lambda server=server: server.ask("PUT", "/api/ns1/q1", b"x")[0] == 201)  # type: ignore[misc]
        assert [server.ask("PUT", "/api/ns1/q1", b"x")[0] for server in (one, two)] == [429, 429]


def test_without_redis_two_processes_count_for_themselves(wire: Wire, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    limit(wire, reads=None, writes=1)
    with Server(token=wire.token) as one, Server(token=wire.token) as two:
        asked = [server.ask("PUT", "/api/ns1/q1", b"x")[0] for server in (one, one, two, two)]
    assert asked == [201, 429, 201, 429]


@needs_redis
def test_while_redis_is_frozen_the_process_counts(wire: Wire, redis_server: Any, redis_client: Any) -> None:
    limit(wire, reads=None, writes=2)
    redis_server.freeze()
    try:
        assert [publish(wire), publish(wire), publish(wire)] == [201, 201, 429]
    finally:
        redis_server.thaw()
    # Redis has counted what it was asked, too.
    redis_client.flushall()
    assert eventually(lambda: publish(wire) == 201)


def test_a_token_without_a_limit_costs_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert wire("GET", "/api/ns1/q1") == NONE
        return len(captured)

    # The first request of a process reads more.
    statements()
    asked: list[Any] = []
    monkeypatch.setattr(publisher.Publisher, "count_call", lambda *call: asked.append(call))
    limit(wire, reads=None, writes=None)
    without = statements()
    assert asked == []
    limit(wire, reads=5, writes=5)
    assert statements() == without
    assert asked


def test_limits_by_the_command(wire: Wire, settings: Any) -> None:
    args = ("--beginning", wire.token[:8])
    assert run("delayq_token", "limit", "ns1", *args, "--reads", "5", "--interval", "10").code == 0
    assert (
        f"{wire.token[:8]}… of ns1: publish,consume,manage, at most 5 reads in 10 s" in run("delayq_token", "list").out
    )
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert "counted in each process by itself: there is no Redis" in run("delayq_token", "list").out
    for number in ("0", str(2**31)):
        assert run("delayq_token", "limit", "ns1", *args, "--reads", number).code == 1
    assert run("delayq_token", "limit", "ns1").code == 2
    assert run("delayq_token", "limit", "ns1", *args).code == 0
    assert "at most" not in run("delayq_token", "list").out
    text = run("delayq_token", "add", "ns1", "--writes", "1", "--interval", str(LONG)).out.strip()
    assert [wire("PUT", "/api/ns1/q1", b"x", X_Token=text)[0] for _time in range(2)] == [201, 429]


def test_the_columns_come_and_go_and_an_old_process_may_write_beside_them(wire: Wire) -> None:
    newest = columns("delayq_token")
    call_command("migrate", "delayq_http", "0001", verbosity=0)
    try:
        assert newest - columns("delayq_token") == {"reads", "writes", "interval", "used_at"}
        with CaptureQueriesContext(connection) as captured:
            call_command("migrate", "delayq_http", "0002", verbosity=0)
    finally:
        call_command("migrate", "delayq_http", verbosity=0)
    changes = [query["sql"] for query in captured if 'ALTER TABLE "delayq_token"' in query["sql"]]
    assert len(changes) == 3
    assert all("ADD COLUMN" in sql and sql.rstrip(";").endswith("NULL") for sql in changes)
    assert publish(wire) == 201
