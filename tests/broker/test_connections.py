"""Connections that are kept between calls: a closed one is replaced, no call is done twice, and no put is lost.

A put does not wait for its answer: the next one reads it, and raises the error in it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq.broker import connection
from django_delayq.broker.base import Entry
from django_delayq.broker.connection import KEEPALIVE, ScriptConnections
from django_delayq.broker.redis import RedisBroker
from django_delayq.broker.timed import socket_of
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.in_redis import held
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, eventually

from .bench import connections_made

QUEUE = "default"
Make = Callable[..., RedisBroker]


@pytest.fixture
def other(server: RedisServer) -> Iterator[redis.Redis]:
    """The client of somebody else, on a Redis without ids that accepts all."""
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.hset("{delayq}:meta", "horizon", 10**15)
        yield client
    server.thaw()


@pytest.fixture
def make(server: RedisServer, other: redis.Redis) -> Iterator[Make]:
    """Make brokers that share nothing, like those of several processes."""
    made: list[RedisBroker] = []

    def broker(url: str = server.url, timeout: float = PATIENCE) -> RedisBroker:
        made.append(RedisBroker(conf.parse({"REDIS": url})[0], "default", timeout=timeout))
        return made[-1]

    yield broker
    server.thaw()
    for each in made:
        each.close()


@pytest.fixture
def broker(make: Make) -> RedisBroker:
    return make()


@pytest.fixture
def client(server: RedisServer, other: redis.Redis) -> Iterator[redis.Redis]:
    with connection.connect(server.url, timeout=PATIENCE) as made:
        yield made
        made.connection_pool.disconnect()


@pytest.fixture
def ours(client: redis.Redis) -> ScriptConnections:
    return ScriptConnections(lambda: client.connection_pool)


def entry(number: int, due_in: float = 60.0) -> Entry:
    return Entry.at(number, timezone.now() + timedelta(seconds=due_in), 0)


def put(broker: RedisBroker, number: int, _other: object = None) -> None:
    """Put an id, and wait for the answer."""
    broker.send_put(QUEUE, [entry(number)])
    broker.flush()


def take(broker: RedisBroker, number: int, other: redis.Redis) -> None:
    """Take an id that somebody else has put."""
    other.zadd(broker.keys(QUEUE).delayed, {str(number): 1})
    assert [ticket.id for ticket in broker.take(QUEUE, 1).tickets] == [number]


both = pytest.mark.parametrize("call", [put, take])


@both
def test_a_call_uses_the_connection_of_the_one_before(broker: RedisBroker, other: redis.Redis, call: Any) -> None:
    call(broker, 1, other)
    before = connections_made(other)
    for number in range(2, 6):
        call(broker, number, other)
    assert connections_made(other) == before


@both
def test_a_script_that_the_server_has_forgotten_is_sent_again(
    broker: RedisBroker, other: redis.Redis, call: Any
) -> None:
    call(broker, 1, other)
    other.script_flush()
    call(broker, 2, other)
    call(broker, 3, other)
    assert held(other) == ({1, 2, 3} if call is put else set())


@both
def test_a_connection_that_the_server_closed_is_replaced(broker: RedisBroker, other: redis.Redis, call: Any) -> None:
    """A worker that used it would consider Redis unavailable, and poll the database for a while."""
    call(broker, 1, other)
    other.client_kill_filter(_type="normal", skipme=True)
    call(broker, 2, other)
    assert held(other) == ({1, 2} if call is put else set())


@both
def test_an_error_is_followed_by_a_new_connection(broker: RedisBroker, other: redis.Redis, call: Any) -> None:
    """A server that refuses may have become a replica, and its name may lead to another server now."""
    call(broker, 1, other)
    ready = broker.keys(QUEUE).ready
    other.set(ready, "not a set")
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        call(broker, 2, other)
    other.delete(ready)
    before = connections_made(other)
    call(broker, 2, other)
    assert connections_made(other) == before + 1


# --- calls that wait for their answer ---------------------------------------------------------------------------------


def test_a_call_without_an_answer_is_not_sent_again(
    broker: RedisBroker, other: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without an answer may have taken ids; a second call would take the next ids as well."""
    monkeypatch.setattr(connection, "is_closed", lambda raw: False)
    broker.take(QUEUE, 1)
    other.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(BrokerUnavailable):
        broker.take(QUEUE, 1)
    broker.take(QUEUE, 1)


def test_a_forked_process_has_connections_of_its_own(ours: ScriptConnections) -> None:
    mine = ours.execute_command("CLIENT", "ID")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(ours.execute_command("CLIENT", "ID")).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) != mine
    assert ours.execute_command("CLIENT", "ID") == mine
    os.close(read)
    os.close(write)


def test_a_small_pool_gets_its_connection_back(make: Make, server: RedisServer) -> None:
    broker = make(f"{server.url}?max_connections=1")
    broker.take(QUEUE, 1)
    broker.notify([QUEUE])
    broker.take(QUEUE, 1)


def test_the_pool_gets_the_second_connection_of_two_calls_at_the_same_time(
    client: redis.Redis, ours: ScriptConnections, other: redis.Redis
) -> None:
    """A worker would keep one for each thread that once called at the same moment, beside those of its pool."""
    ours.execute_command("PING")
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(ours.execute_command, "BLPOP", "two calls", 0) for _ in range(2)]
        eventually(lambda: other.info("clients")["blocked_clients"] == 2, "both calls wait")
        other.rpush("two calls", 1, 2)
        assert {call.result()[1] for call in calls} == {b"1", b"2"}
    before = connections_made(other)
    client.ping()
    ours.execute_command("PING")
    assert connections_made(other) == before


def test_a_connection_that_its_pool_disowns_is_replaced(
    broker: RedisBroker, other: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that asks Sentinel disowns its connections to the former master."""
    broker.take(QUEUE, 1)
    before = connections_made(other)
    monkeypatch.setattr(broker.client.connection_pool, "owns_connection", lambda connection: False)
    broker.take(QUEUE, 1)
    assert connections_made(other) == before + 1


# --- puts -------------------------------------------------------------------------------------------------------------


def test_the_next_put_tells_that_redis_has_answered(broker: RedisBroker, other: redis.Redis) -> None:
    assert not broker.send_put(QUEUE, [entry(1)])
    broker.flush()
    assert not broker.send_put(QUEUE, [entry(2)])
    assert all(broker.send_put(QUEUE, [entry(number)]) for number in range(3, 103))
    broker.flush()
    assert held(other) == set(range(1, 103))


def test_a_put_under_way_does_not_bring_back_what_is_removed(broker: RedisBroker, other: redis.Redis) -> None:
    put(broker, 1)
    # The put is refused, and sent again when its answer is read.
    other.script_flush()
    broker.send_put(QUEUE, [entry(2)])
    broker.remove(QUEUE, [2])
    broker.flush()
    assert held(other) == {1}


def test_a_put_sent_again_undoes_no_later_put(make: Make, broker: RedisBroker, other: redis.Redis) -> None:
    put(broker, 1)
    other.script_flush()
    broker.send_put(QUEUE, [entry(1, 90.0)])
    # Not before the server has refused it.
    while "errorstat_NOSCRIPT" not in other.info("errorstats"):
        time.sleep(0.001)
    sooner = entry(1, 30.0)
    make().put(QUEUE, [sooner])
    broker.flush()
    score = other.zscore(broker.keys(QUEUE).delayed, "1")
    assert score is not None
    assert float(score) // SECOND == sooner.due_at.timestamp() // 1


def test_a_put_under_way_on_a_broken_connection_is_sent_again(
    make: Make, server: RedisServer, other: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        put(broker, 1)
        assert proxy.forget() == 1
        broker.send_put(QUEUE, [entry(2)])
        proxy.cut()
        assert held(other) == {1}
        put(broker, 3)
        assert held(other) == {1, 2, 3}


def impatient(broker: RedisBroker) -> RedisBroker:
    """Have a broker keep a connection with a short timeout. Later ones wait for as long as a busy machine takes."""

    def is_put() -> bool:
        try:
            put(broker, 1)
        except BrokerUnavailable:
            return False
        return True

    eventually(is_put, "the server answers in time")
    broker.client.connection_pool.connection_kwargs["socket_timeout"] = PATIENCE
    return broker


def test_a_put_on_a_connection_that_died_without_notice_is_sent_again(
    make: Make, server: RedisServer, other: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        broker = impatient(make(proxy.url, timeout=0.5))
        assert proxy.forget()
        for number in (2, 3):
            broker.send_put(QUEUE, [entry(number)])
        broker.flush()
        assert held(other) == {1, 2, 3}


def test_a_frozen_server_is_noticed_by_the_next_put(make: Make, server: RedisServer) -> None:
    broker = impatient(make(timeout=0.5))
    broker.client.connection_pool.connection_kwargs["socket_timeout"] = 0.5
    server.freeze()
    # This one returns although nobody answers.
    broker.send_put(QUEUE, [entry(2)])
    with pytest.raises(BrokerUnavailable, match="Timeout"):
        broker.send_put(QUEUE, [entry(3)])


def test_the_kernel_looks_after_idle_connections(broker: RedisBroker) -> None:
    there = socket_of(broker.client.connection_pool.get_connection())
    assert there is not None
    assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            assert there.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
