"""Script calls on pinned connections: a closed connection is replaced, and no call is sent twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from django_delayq.broker import connection
from django_delayq.broker.connection import ScriptConnections
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.workers import eventually

from .bench import connections_made

QUEUE = "scripted"


@pytest.fixture
def broker(server: RedisServer) -> Iterator[RedisBroker]:
    made = RedisBroker(conf.parse({"REDIS": server.url})[0], "default", timeout=5.0)
    yield made
    made.close()


@pytest.fixture
def other(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def test_a_call_uses_the_connection_of_the_one_before(broker: RedisBroker, other: redis.Redis) -> None:
    broker.take(QUEUE, 1)
    before = connections_made(other)
    for _ in range(5):
        broker.take(QUEUE, 1)
    assert connections_made(other) == before


def test_a_script_that_the_server_has_forgotten_is_sent_again(broker: RedisBroker, other: redis.Redis) -> None:
    broker.take(QUEUE, 1)
    other.script_flush()
    other.zadd(broker.keys(QUEUE).ready, {"7": 0})
    assert [ticket.id for ticket in broker.take(QUEUE, 1).tickets] == [7]


def test_an_error_is_followed_by_a_new_connection(broker: RedisBroker, other: redis.Redis) -> None:
    """A server that refuses may have become a replica, and its name may lead to another server now."""
    broker.take(QUEUE, 1)
    other.set(broker.keys(QUEUE).ready, "not a set")
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        broker.take(QUEUE, 1)
    other.delete(broker.keys(QUEUE).ready)
    before = connections_made(other)
    broker.take(QUEUE, 1)
    assert connections_made(other) == before + 1


def test_a_connection_that_the_server_closed_is_replaced(broker: RedisBroker, other: redis.Redis) -> None:
    """A worker that used it would consider Redis unavailable, and poll the database for a while."""
    broker.take(QUEUE, 1)
    other.client_kill_filter(_type="normal", skipme=True)
    broker.take(QUEUE, 1)


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


def test_a_forked_process_has_connections_of_its_own(server: RedisServer, other: redis.Redis) -> None:
    client = connection.connect(server.url, timeout=5.0)
    ours = ScriptConnections(lambda: client.connection_pool)
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
    client.close()
    client.connection_pool.disconnect()
    os.close(read)
    os.close(write)


def test_a_small_pool_gets_its_connection_back(server: RedisServer, other: redis.Redis) -> None:
    made = RedisBroker(conf.parse({"REDIS": f"{server.url}?max_connections=1"})[0], "default", timeout=5.0)
    made.take(QUEUE, 1)
    made.notify([QUEUE])
    made.take(QUEUE, 1)
    made.close()


def test_the_pool_gets_the_second_connection_of_two_calls_at_the_same_time(
    server: RedisServer, other: redis.Redis
) -> None:
    """A worker would keep one for each thread that once called at the same moment, beside those of its pool."""
    client = connection.connect(server.url, timeout=5.0)
    ours = ScriptConnections(lambda: client.connection_pool)
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
    client.close()
    client.connection_pool.disconnect()


def test_a_connection_that_its_pool_disowns_is_replaced(
    broker: RedisBroker, other: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that asks Sentinel disowns its connections to the former master."""
    broker.take(QUEUE, 1)
    before = connections_made(other)
    monkeypatch.setattr(broker.client.connection_pool, "owns_connection", lambda connection: False)
    broker.take(QUEUE, 1)
    assert connections_made(other) == before + 1
