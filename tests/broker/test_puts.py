"""Puts whose answers are read later: a lost put is sent again, and the next put raises an error."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq.broker.base import Entry
from django_delayq.broker.connection import KEEPALIVE, socket_of
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.proxy import Proxy

from .bench import connections_made

QUEUE = "puts"
HORIZON = 10**15


@pytest.fixture
def make(server: RedisServer) -> Iterator[Callable[..., RedisBroker]]:
    """Make brokers that share nothing, like those of several processes."""
    made: list[RedisBroker] = []

    def broker(url: str = "", timeout: float = 5.0) -> RedisBroker:
        made.append(RedisBroker(conf.parse({"REDIS": url or server.url})[0], "default", timeout=timeout))
        return made[-1]

    server.start()
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.hset(broker().keys(QUEUE).meta, "horizon", HORIZON)
    client.close()
    yield broker
    server.thaw()
    for each in made:
        each.close()


def entry(number: int, due_in: float = 60.0) -> Entry:
    return Entry.at(number, timezone.now() + timedelta(seconds=due_in), 0)


def put(broker: RedisBroker, number: int) -> None:
    """Put an id, and wait for the answer."""
    broker.put_nowait(QUEUE, [entry(number)])
    broker.flush()


def held(make: Callable[..., RedisBroker]) -> set[int]:
    broker = make()
    members: Any = broker.client.zrange(broker.keys(QUEUE).delayed, 0, -1)
    return {int(member) for member in members}


def test_the_next_put_tells_that_redis_has_answered(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    assert not broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    assert not broker.put_nowait(QUEUE, [entry(2)])
    assert all(broker.put_nowait(QUEUE, [entry(number)]) for number in range(3, 103))
    broker.flush()
    assert held(make) == set(range(1, 103))


def test_a_put_under_way_does_not_bring_back_what_is_removed(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    # The put is refused, and sent again when its answer is read.
    make().client.script_flush()
    broker.put_nowait(QUEUE, [entry(2)])
    broker.remove(QUEUE, [2])
    broker.flush()
    assert held(make) == {1}


def test_a_script_that_the_server_forgot_is_sent_again(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    put(broker, 1)
    make().client.script_flush()
    put(broker, 2)
    put(broker, 3)
    assert held(make) == {1, 2, 3}


def test_a_put_sent_again_undoes_no_later_put(make: Callable[..., RedisBroker]) -> None:
    broker, other = make(), make()
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    other.client.script_flush()
    broker.put_nowait(QUEUE, [entry(1, 90.0)])
    # Not before the server has refused it.
    while "errorstat_NOSCRIPT" not in other.client.info("errorstats"):
        time.sleep(0.001)
    sooner = entry(1, 30.0)
    other.put_nowait(QUEUE, [sooner])
    other.flush()
    broker.flush()
    score = other.client.zscore(other.keys(QUEUE).delayed, "1")
    assert score is not None
    assert float(score) // SECOND == sooner.due_at.timestamp() // 1


def test_a_connection_that_the_server_closed_is_replaced(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    put(broker, 1)
    make().client.client_kill_filter(_type="normal", skipme=True)
    put(broker, 2)
    assert held(make) == {1, 2}


def test_a_put_under_way_on_a_broken_connection_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        put(broker, 1)
        assert proxy.forget() == 1
        broker.put_nowait(QUEUE, [entry(2)])
        proxy.cut()
        assert held(make) == {1}
        put(broker, 3)
        assert held(make) == {1, 2, 3}


def test_a_put_on_a_connection_that_died_without_notice_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    with Proxy(server.port) as proxy:
        broker = make(proxy.url, timeout=1.0)
        put(broker, 1)
        assert proxy.forget() == 1
        for number in (2, 3):
            broker.put_nowait(QUEUE, [entry(number)])
        broker.flush()
        assert held(make) == {1, 2, 3}


def test_the_kernel_looks_after_idle_connections(make: Callable[..., RedisBroker]) -> None:
    raw = make().client.connection_pool.get_connection()
    there = socket_of(raw)
    assert there is not None
    assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            assert there.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_a_frozen_server_is_noticed_by_the_next_put(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    broker = make(timeout=0.5)
    put(broker, 1)
    server.freeze()
    # This one returns although nobody answers.
    broker.put_nowait(QUEUE, [entry(2)])
    with pytest.raises(BrokerUnavailable, match="Timeout"):
        broker.put_nowait(QUEUE, [entry(3)])
    server.thaw()


def test_the_next_put_raises_an_error_and_the_one_after_has_a_new_connection(make: Callable[..., RedisBroker]) -> None:
    """A server that refuses may have become a replica, and its name may lead to another server now."""
    broker, other = make(), make()
    put(broker, 1)
    other.client.set(other.keys(QUEUE).ready, "not a set")
    broker.put_nowait(QUEUE, [entry(2)])
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        broker.put_nowait(QUEUE, [entry(3)])
    other.client.delete(other.keys(QUEUE).ready)
    before = connections_made(other.client)
    put(broker, 2)
    assert connections_made(other.client) == before + 1
    assert {1, 2} <= held(make)
