"""Puts whose answers are read later: what is lost on the way is sent again, and an error is told by the next."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq import conf
from django_delayq.broker import pipelined
from django_delayq.broker.base import Entry
from django_delayq.broker.pipelined import AHEAD, TOGETHER
from django_delayq.broker.redis import RedisBroker
from django_delayq.clock import SECOND
from django_delayq.exceptions import BrokerUnavailable
from testproject.servers import RedisServer
from tests.proxy import Proxy

from .bench import connections_made

pytestmark = pytest.mark.late_answers

QUEUE = "lines"
HORIZON = 10**15


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def make(server: RedisServer) -> Iterator[Callable[..., RedisBroker]]:
    """Makes brokers of processes that know nothing of each other."""
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


@pytest.fixture(autouse=True)
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets after how many seconds each put looks for answers: here every one does, unless a test says otherwise."""

    def after(seconds: float) -> None:
        monkeypatch.setattr(pipelined, "LOOK", seconds)

    after(-1.0)
    return after


def entry(number: int, due_in: float = 60.0) -> Entry:
    return Entry.at(number, timezone.now() + timedelta(seconds=due_in), 0)


def held(make: Callable[..., RedisBroker]) -> set[int]:
    broker = make()
    members: Any = broker.client.zrange(broker.keys(QUEUE).delayed, 0, -1)
    return {int(member) for member in members}


def until_it_raises(broker: RedisBroker) -> None:
    """Put until an answer, or its absence, is noticed."""
    for number in range(10_000, 11_000):
        broker.tell(QUEUE, [entry(number)])
        time.sleep(0.01)


def refuse_once(broker: RedisBroker, other: RedisBroker) -> None:
    """After a put that was good, have the server refuse the next ones until the broker says so; from then on none."""
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    other.client.set(other.keys(QUEUE).ready, "not a set")
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        until_it_raises(broker)
    other.client.delete(other.keys(QUEUE).ready)


def test_answers_are_counted_by_the_puts_after(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    assert broker.tell(QUEUE, [entry(1)]) == 0
    broker.settle()
    assert broker.tell(QUEUE, [entry(2)]) == 0
    answers = sum(broker.tell(QUEUE, [entry(number)]) for number in range(3, 103))
    assert 100 - AHEAD <= answers <= 101
    broker.settle()
    assert held(make) == set(range(1, 103))


def test_answers_to_many_are_read_together(make: Callable[..., RedisBroker], look: Callable[[float], None]) -> None:
    look(float("inf"))
    broker = make()
    answers = [broker.tell(QUEUE, [entry(number)]) for number in range(1, TOGETHER + 1)]
    assert answers == [0] * TOGETHER
    # The server has answered those that came before this question.
    assert held(make) == set(range(1, TOGETHER + 1))
    assert broker.tell(QUEUE, [entry(TOGETHER + 1)]) == TOGETHER
    broker.settle()
    assert held(make) == set(range(1, TOGETHER + 2))


def test_what_was_lost_before_the_answers_to_many_were_read_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer, look: Callable[[float], None]
) -> None:
    look(float("inf"))
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        broker.tell(QUEUE, [entry(1)])
        broker.settle()
        assert proxy.forget() == 1
        for number in range(2, TOGETHER + 1):
            broker.tell(QUEUE, [entry(number)])
        proxy.cut()
        assert held(make) == {1}
        for number in range(TOGETHER + 1, 2 * TOGETHER):
            broker.tell(QUEUE, [entry(number)])
        broker.settle()
        assert held(make) == set(range(1, 2 * TOGETHER))


def test_more_than_a_thousand_go_in_several_calls(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.tell(QUEUE, [entry(number) for number in range(1, 2_501)])
    broker.settle()
    assert len(held(make)) == 2_500
    stats = broker.client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] >= 1
    assert stats["cmdstat_evalsha"]["calls"] >= 2


def test_a_script_that_the_server_forgot_is_sent_again(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    make().client.script_flush()
    broker.tell(QUEUE, [entry(2)])
    broker.settle()
    broker.tell(QUEUE, [entry(3)])
    broker.settle()
    assert held(make) == {1, 2, 3}


def test_what_is_sent_again_undoes_nothing_that_came_since(make: Callable[..., RedisBroker]) -> None:
    broker, other = make(), make()
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    other.client.script_flush()
    broker.tell(QUEUE, [entry(1, 90.0)])
    # Not before the server has refused it.
    while "errorstat_NOSCRIPT" not in other.client.info("errorstats"):
        time.sleep(0.001)
    sooner = entry(1, 30.0)
    other.tell(QUEUE, [sooner])
    other.settle()
    broker.settle()
    score = other.client.zscore(other.keys(QUEUE).delayed, "1")
    assert score is not None
    assert float(score) // SECOND == sooner.due_at.timestamp() // 1


def test_a_connection_that_the_server_closed_is_replaced(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    make().client.client_kill_filter(_type="normal", skipme=True)
    broker.tell(QUEUE, [entry(2)])
    broker.settle()
    assert held(make) == {1, 2}


def test_what_was_under_way_on_a_broken_connection_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        broker.tell(QUEUE, [entry(1)])
        broker.settle()
        assert proxy.forget() == 1
        for number in (2, 3):
            broker.tell(QUEUE, [entry(number)])
        proxy.cut()
        assert held(make) == {1}
        broker.tell(QUEUE, [entry(4)])
        broker.settle()
        assert held(make) == {1, 2, 3, 4}


def test_after_a_restart_the_new_server_is_told(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    broker = make()
    broker.tell(QUEUE, [entry(1)])
    server.kill()
    server.start()
    fresh = make()
    fresh.client.hset(fresh.keys(QUEUE).meta, "horizon", HORIZON)
    broker.tell(QUEUE, [entry(2)])
    broker.settle()
    assert 2 in held(make)


def test_a_frozen_server_is_noticed_without_waiting_for_it(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    broker = make(timeout=0.05)
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    server.freeze()
    broker.tell(QUEUE, [entry(2)])
    with pytest.raises(BrokerUnavailable, match="no answer within"):
        until_it_raises(broker)
    server.thaw()


def test_an_error_is_told_by_a_later_put(make: Callable[..., RedisBroker]) -> None:
    broker, other = make(), make()
    refuse_once(broker, other)
    broker.tell(QUEUE, [entry(2)])
    broker.settle()
    assert {1, 2} <= held(make)


def test_what_stood_behind_an_error_is_put_all_the_same(
    make: Callable[..., RedisBroker], look: Callable[[float], None]
) -> None:
    look(float("inf"))
    broker, other = make(), make()
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    other.client.set(other.keys("broken").ready, "not a set")
    other.client.hset(other.keys("broken").meta, "horizon", HORIZON)
    other.client.config_resetstat()
    broker.tell("broken", [entry(2)])
    while "errorstat_WRONGTYPE" not in other.client.info("errorstats"):
        time.sleep(0.001)
    # What comes now the server refuses too, and it has to be sent again.
    other.client.script_flush()
    numbers = set(range(3, TOGETHER + 2))
    for number in numbers:
        broker.tell(QUEUE, [entry(number)])
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        broker.tell(QUEUE, [entry(TOGETHER + 2)])
    broker.settle()
    assert held(make) == {1} | numbers


def test_after_an_error_another_connection_is_made(make: Callable[..., RedisBroker]) -> None:
    """Who refuses may have become a replica: by the same name there may be another server now."""
    broker, other = make(), make()
    refuse_once(broker, other)
    before = connections_made(other.client)
    broker.tell(QUEUE, [entry(2)])
    broker.settle()
    assert connections_made(other.client) == before + 1
    assert {1, 2} <= held(make)


def test_so_many_answers_may_be_outstanding_and_no_more(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    broker = make(timeout=0.05)
    broker.tell(QUEUE, [entry(1)])
    broker.settle()
    server.freeze()
    with pytest.raises(BrokerUnavailable):
        broker.tell(QUEUE, [entry(number) for number in range(1000 * (AHEAD + 2))])
    server.thaw()


def test_a_forked_process_has_lines_of_its_own(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.tell(QUEUE, [entry(1)])
    child = os.fork()
    if not child:
        try:
            broker.tell(QUEUE, [entry(2)])
            broker.settle()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    broker.tell(QUEUE, [entry(3)])
    broker.settle()
    assert held(make) == {1, 2, 3}


PROGRAM = """
import sys
from datetime import UTC, datetime, timedelta
from django_delayq import conf
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
broker = RedisBroker(conf.parse({"REDIS": sys.argv[1]})[0], "default", timeout=5.0)
due = datetime.now(UTC) + timedelta(seconds=60)
for number in range(1, 4001, 400):
    broker.tell(sys.argv[2], [Entry.at(n, due, 0) for n in range(number, number + 400)])
"""


def test_a_process_that_ends_at_once_has_told_everything(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM, server.url, QUEUE], check=True, timeout=60, env=environment)
    assert len(held(make)) == 4_000
