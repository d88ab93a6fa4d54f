"""Puts whose answers are read later: a lost put is sent again, and a later put raises an error."""

from __future__ import annotations

import fcntl
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq.broker import pipelined
from django_delayq.broker.base import Entry
from django_delayq.broker.connection import is_plain_tcp, socket_of
from django_delayq.broker.pipelined import MAX_UNREAD, READ_AT_UNREAD, PipelinedConnection
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.proxy import Proxy
from tests.workers import eventually

from .bench import connections_made

QUEUE = "pipelined"
HORIZON = 10**15


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


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


@pytest.fixture(autouse=True)
def read_interval(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set after how many seconds a put reads answers: here every put does, unless a test says otherwise."""

    def after(seconds: float) -> None:
        monkeypatch.setattr(pipelined, "READ_INTERVAL", seconds)

    after(-1.0)
    return after


def entry(number: int, due_in: float = 60.0) -> Entry:
    return Entry.at(number, timezone.now() + timedelta(seconds=due_in), 0)


def held(make: Callable[..., RedisBroker]) -> set[int]:
    broker = make()
    members: Any = broker.client.zrange(broker.keys(QUEUE).delayed, 0, -1)
    return {int(member) for member in members}


def until_it_raises(broker: RedisBroker, *, pause: float = 0.01) -> None:
    """Put until a put raises what an earlier answer says, or that it is late."""
    for number in range(10_000, 11_000):
        broker.put_nowait(QUEUE, [entry(number)])
        time.sleep(pause)


def refuse_once(broker: RedisBroker, other: RedisBroker) -> None:
    """Put once with success, then have the server refuse puts until the broker raises; after that it refuses none."""
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    other.client.set(other.keys(QUEUE).ready, "not a set")
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        until_it_raises(broker)
    other.client.delete(other.keys(QUEUE).ready)


def test_later_puts_count_the_answers(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    assert broker.put_nowait(QUEUE, [entry(1)]) == 0
    broker.flush()
    assert broker.put_nowait(QUEUE, [entry(2)]) == 0
    answers = sum(broker.put_nowait(QUEUE, [entry(number)]) for number in range(3, 103))
    assert 100 - MAX_UNREAD <= answers <= 101
    broker.flush()
    assert held(make) == set(range(1, 103))


def test_answers_to_many_are_read_together(
    make: Callable[..., RedisBroker], read_interval: Callable[[float], None]
) -> None:
    read_interval(float("inf"))
    broker = make()
    answers = [broker.put_nowait(QUEUE, [entry(number)]) for number in range(1, READ_AT_UNREAD + 1)]
    assert answers == [0] * READ_AT_UNREAD
    # The server answers in order: it has answered the puts before it answers this question.
    assert held(make) == set(range(1, READ_AT_UNREAD + 1))
    assert broker.put_nowait(QUEUE, [entry(READ_AT_UNREAD + 1)]) == READ_AT_UNREAD
    broker.flush()
    assert held(make) == set(range(1, READ_AT_UNREAD + 2))


def test_a_put_lost_before_the_answers_to_many_were_read_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer, read_interval: Callable[[float], None]
) -> None:
    read_interval(float("inf"))
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        broker.put_nowait(QUEUE, [entry(1)])
        broker.flush()
        assert proxy.forget() == 1
        for number in range(2, READ_AT_UNREAD + 1):
            broker.put_nowait(QUEUE, [entry(number)])
        proxy.cut()
        assert held(make) == {1}
        for number in range(READ_AT_UNREAD + 1, 2 * READ_AT_UNREAD):
            broker.put_nowait(QUEUE, [entry(number)])
        broker.flush()
        assert held(make) == set(range(1, 2 * READ_AT_UNREAD))


def test_more_than_a_thousand_go_in_several_calls(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.put_nowait(QUEUE, [entry(number) for number in range(1, 2_501)])
    broker.flush()
    assert len(held(make)) == 2_500
    stats = broker.client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] >= 1
    assert stats["cmdstat_evalsha"]["calls"] >= 2


def test_a_script_that_the_server_forgot_is_sent_again(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    make().client.script_flush()
    broker.put_nowait(QUEUE, [entry(2)])
    broker.flush()
    broker.put_nowait(QUEUE, [entry(3)])
    broker.flush()
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
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    make().client.client_kill_filter(_type="normal", skipme=True)
    broker.put_nowait(QUEUE, [entry(2)])
    broker.flush()
    assert held(make) == {1, 2}


def test_a_put_under_way_on_a_broken_connection_is_sent_again(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        broker.put_nowait(QUEUE, [entry(1)])
        broker.flush()
        assert proxy.forget() == 1
        for number in (2, 3):
            broker.put_nowait(QUEUE, [entry(number)])
        proxy.cut()
        assert held(make) == {1}
        broker.put_nowait(QUEUE, [entry(4)])
        broker.flush()
        assert held(make) == {1, 2, 3, 4}


def test_a_put_after_a_restart_reaches_the_new_server(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    broker = make()
    broker.put_nowait(QUEUE, [entry(1)])
    server.kill()
    server.start()
    fresh = make()
    fresh.client.hset(fresh.keys(QUEUE).meta, "horizon", HORIZON)
    broker.put_nowait(QUEUE, [entry(2)])
    broker.flush()
    assert 2 in held(make)


def test_a_frozen_server_is_noticed_without_waiting_for_it(
    make: Callable[..., RedisBroker], server: RedisServer
) -> None:
    broker = make(timeout=0.5)
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    server.freeze()
    broker.put_nowait(QUEUE, [entry(2)])
    with pytest.raises(BrokerUnavailable, match="no answer within"):
        # So slowly that the answers are missed before too many are unread.
        until_it_raises(broker, pause=0.1)
    server.thaw()


def test_a_later_put_raises_an_error(make: Callable[..., RedisBroker]) -> None:
    broker, other = make(), make()
    refuse_once(broker, other)
    broker.put_nowait(QUEUE, [entry(2)])
    broker.flush()
    assert {1, 2} <= held(make)


def test_puts_behind_an_error_arrive_nevertheless(
    make: Callable[..., RedisBroker], read_interval: Callable[[float], None]
) -> None:
    read_interval(float("inf"))
    broker, other = make(), make()
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    other.client.set(other.keys("broken").ready, "not a set")
    other.client.hset(other.keys("broken").meta, "horizon", HORIZON)
    other.client.config_resetstat()
    broker.put_nowait("broken", [entry(2)])
    while "errorstat_WRONGTYPE" not in other.client.info("errorstats"):
        time.sleep(0.001)
    # The server refuses the next puts too, and they have to be sent again.
    other.client.script_flush()
    numbers = set(range(3, READ_AT_UNREAD + 2))
    for number in numbers:
        broker.put_nowait(QUEUE, [entry(number)])
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        broker.put_nowait(QUEUE, [entry(READ_AT_UNREAD + 2)])
    broker.flush()
    assert held(make) == {1} | numbers


def test_an_error_is_followed_by_a_new_connection(make: Callable[..., RedisBroker]) -> None:
    """A server that refuses may have become a replica, and its name may lead to another server now."""
    broker, other = make(), make()
    refuse_once(broker, other)
    before = connections_made(other.client)
    broker.put_nowait(QUEUE, [entry(2)])
    broker.flush()
    assert connections_made(other.client) == before + 1
    assert {1, 2} <= held(make)


def test_a_put_waits_when_too_many_answers_are_unread(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    broker = make(timeout=0.5)
    broker.put_nowait(QUEUE, [entry(1)])
    broker.flush()
    server.freeze()
    with pytest.raises(BrokerUnavailable):
        broker.put_nowait(QUEUE, [entry(number) for number in range(1000 * (MAX_UNREAD + 2))])
    server.thaw()


def put_in_a_child(broker: RedisBroker, number: int, *, gather: bool = False) -> None:
    """Put in a process that is forked from this one, and wait for its end."""
    child = os.fork()
    if not child:
        try:
            broker.put_nowait(QUEUE, [entry(number)], gather=gather)
            broker.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_forked_process_has_connections_of_its_own(make: Callable[..., RedisBroker]) -> None:
    broker = make()
    broker.put_nowait(QUEUE, [entry(1)])
    put_in_a_child(broker, 2)
    broker.put_nowait(QUEUE, [entry(3)])
    broker.flush()
    assert held(make) == {1, 2, 3}


# --- puts that are kept back ------------------------------------------------------------------------------------------


@pytest.fixture
def keeping(
    make: Callable[..., RedisBroker], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RedisBroker, Proxy]]:
    """A broker that has put id 1, and keeps back the next puts that may be, however long ago that was."""
    if pipelined.MSG_MORE is None:
        pytest.skip("this system has no MSG_MORE")
    monkeypatch.setattr(pipelined, "GATHER_INTERVAL", float("inf"))
    with Proxy(server.port) as proxy:
        broker = make(proxy.url)
        broker.put_nowait(QUEUE, [entry(1)])
        broker.flush()
        yield broker, proxy


def connection_of(broker: RedisBroker) -> PipelinedConnection:
    (connection,) = broker._pipelined._idle
    return connection


def keep_back(broker: RedisBroker, *numbers: int, due_in: float = 60.0) -> None:
    for number in numbers:
        assert broker.put_nowait(QUEUE, [entry(number, due_in)], gather=True) == 0
        connection = connection_of(broker)
        assert connection.unread[-1] is connection._kept[-1]


def unsent(broker: RedisBroker) -> int:
    """Return how many bytes of the broker the kernel keeps back (Linux: SIOCOUTQNSD)."""
    sent = socket_of(connection_of(broker).raw)
    return int.from_bytes(fcntl.ioctl(sent, 0x894B, bytes(4)), sys.byteorder)


def test_the_kernel_keeps_puts_back_until_the_next_one(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, _proxy = keeping
    numbers = iter(range(2, 100_000))

    def are_kept() -> bool:
        # The kernel keeps nothing for longer than 0.2 s, and this process may stand still for longer.
        keep_back(broker, next(numbers))
        one = unsent(broker)
        keep_back(broker, next(numbers))
        kept = 0 < one < unsent(broker)
        broker.put_nowait(QUEUE, [entry(next(numbers))])
        broker.flush()
        assert unsent(broker) == 0
        return kept

    eventually(are_kept)
    assert held(make) == set(range(1, next(numbers)))


def test_the_last_put_that_is_kept_back_leaves_by_itself(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    keep_back(keeping[0], 2)
    eventually(lambda: held(make) == {1, 2})


def test_a_put_after_a_pause_is_not_kept_back(
    keeping: tuple[RedisBroker, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, _proxy = keeping
    monkeypatch.setattr(pipelined, "GATHER_INTERVAL", -1.0)
    broker.put_nowait(QUEUE, [entry(2)], gather=True)
    connection = connection_of(broker)
    assert (len(connection.unread), connection._kept) == (1, [])


def test_no_more_than_so_many_puts_are_kept_back(keeping: tuple[RedisBroker, Proxy]) -> None:
    broker, _proxy = keeping
    keep_back(broker, *range(2, MAX_UNREAD + 2))
    broker.put_nowait(QUEUE, [entry(MAX_UNREAD + 2)], gather=True)
    assert connection_of(broker)._kept == []


def test_a_flush_sends_what_is_kept_back(keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]) -> None:
    broker, _proxy = keeping
    keep_back(broker, 2, 3)
    broker.flush()
    assert held(make) == {1, 2, 3}


@pytest.mark.parametrize("kept_for", [1000.0, -1000.0])
def test_the_time_in_which_a_put_is_kept_back_does_not_count_as_a_wait_for_its_answer(
    keeping: tuple[RedisBroker, Proxy], monkeypatch: pytest.MonkeyPatch, server: RedisServer, kept_for: float
) -> None:
    """The wait counts from the next put that sends it, or from when the kernel sends it by itself."""
    monkeypatch.setattr(pipelined, "KEPT_FOR", kept_for)
    broker, _proxy = keeping
    server.freeze()
    keep_back(broker, 2)
    connection = connection_of(broker)
    connection._timeout = 0.0
    with nullcontext() if kept_for > 0 else pytest.raises(BrokerUnavailable, match="no answer within"):
        broker.put_nowait(QUEUE, [entry(3)])
    server.thaw()
    sent = time.monotonic()
    assert all(put.sent_at <= sent for put in connection.unread)


def test_a_put_that_was_kept_back_does_not_bring_back_what_is_removed(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, _proxy = keeping
    keep_back(broker, 2)
    broker.remove(QUEUE, [2])
    broker.flush()
    assert held(make) == {1}


def test_a_put_that_was_kept_back_undoes_no_later_put(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    """The caller may have told another process about the message, which has moved it forward meanwhile."""
    broker, other, sooner = keeping[0], make(), entry(2, 30.0)
    keep_back(broker, 2, due_in=90.0)
    other.put_nowait(QUEUE, [sooner])
    other.flush()
    broker.flush()
    score = other.client.zscore(other.keys(QUEUE).delayed, "2")
    assert score is not None
    assert float(score) // SECOND == sooner.due_at.timestamp() // 1


def test_puts_that_were_kept_back_on_a_broken_connection_are_sent_again(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, proxy = keeping
    assert proxy.forget() == 1
    keep_back(broker, 2, 3)
    proxy.cut()
    broker.put_nowait(QUEUE, [entry(4)])
    broker.flush()
    assert held(make) == {1, 2, 3, 4}


def test_a_put_that_cannot_be_kept_back_on_a_broken_connection_takes_another_one(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, _proxy = keeping
    keep_back(broker, 2)
    connection = connection_of(broker)
    socket_of(connection.raw).shutdown(socket.SHUT_RDWR)
    broker.put_nowait(QUEUE, [entry(3)], gather=True)
    broker.flush()
    assert held(make) == {1, 2, 3}


def test_puts_that_were_kept_back_while_the_server_forgot_the_script_are_sent_again(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, _proxy = keeping
    keep_back(broker, 2)
    make().client.script_flush()
    keep_back(broker, 3)
    broker.flush()
    assert held(make) == {1, 2, 3}


def test_a_forked_process_leaves_what_is_kept_back_to_its_parent(
    keeping: tuple[RedisBroker, Proxy], make: Callable[..., RedisBroker]
) -> None:
    broker, _proxy = keeping
    keep_back(broker, 2)
    put_in_a_child(broker, 3, gather=True)
    broker.flush()
    assert held(make) == {1, 2, 3}


def test_only_plain_tcp_keeps_puts_back() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    unix, other = socket.socketpair()
    with socket.socket() as plain, unix, other, context.wrap_socket(socket.socket()) as encrypted:
        assert [is_plain_tcp(each) for each in (plain, unix, encrypted)] == [True, False, False]


PROGRAM = """
import sys
from datetime import UTC, datetime, timedelta
from django_delayq.project import conf
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
broker = RedisBroker(conf.parse({"REDIS": sys.argv[1]})[0], "default", timeout=5.0)
due = datetime.now(UTC) + timedelta(seconds=60)
for number in range(1, 4001, 400):
    broker.put_nowait(sys.argv[2], [Entry.at(n, due, 0) for n in range(number, number + 400)], gather=number > 3000)
"""


def test_a_process_that_ends_at_once_has_put_everything(make: Callable[..., RedisBroker], server: RedisServer) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM, server.url, QUEUE], check=True, timeout=60, env=environment)
    assert len(held(make)) == 4_000
