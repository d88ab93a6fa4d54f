"""The broker on Redis: notifications between processes, errors while Redis is unavailable, and the meta of queues."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq.broker import check_settings, connection, describe, listener
from django_delayq.broker.base import Entry, Put
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerRubbish, BrokerUnavailable, ForeignBroker
from django_delayq.project import conf, registry
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from testproject.servers import RedisServer
from tests.support.broker_methods import METHODS, QUEUE
from tests.support.workers import eventually

from .bench import load


def entry(id_: int, *, due_in: float = -1.0, priority: int = 0) -> Entry:
    return Entry.at(id_, timezone.now() + timedelta(seconds=due_in), priority)


def settings_for(server: RedisServer) -> conf.Settings:
    return conf.Settings()._replace(REDIS=server.url, PREFIX="brokertest")


@pytest.fixture
def server(server: RedisServer) -> RedisServer:
    server.start()
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server


@pytest.fixture
def brokers(server: RedisServer) -> Iterator[tuple[RedisBroker, RedisBroker]]:
    """Two brokers, as two processes would have them."""
    pair = (RedisBroker(settings_for(server), "default", timeout=2.0) for _ in range(2))
    one, other = pair
    load(one)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def broker(brokers: tuple[RedisBroker, RedisBroker]) -> RedisBroker:
    return brokers[0]


def wait_for_listeners(server: RedisServer, *, times: int = 1) -> None:
    """Wait until so many clients listen."""
    with redis.Redis(port=server.port) as client:
        eventually(lambda: client.info("clients")["blocked_clients"] >= times, "they listen")


def listeners(broker: RedisBroker) -> list[str]:
    """Return the connections on which somebody waits for a wake-up."""
    return [client["id"] for client in broker.client.client_list() if "b" in client["flags"]]


def test_tokens_and_wakes_come_also_where_redis_py_hides_its_socket(
    brokers: tuple[RedisBroker, RedisBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "socket_of", lambda raw: None)
    worker, producer = brokers
    assert worker.listen([QUEUE], 0) is False
    producer.put(QUEUE, [entry(1)])
    began = time.monotonic()
    eventually(lambda: worker.listen([QUEUE], 300), "the token comes")
    assert [ticket.id for ticket in worker.take(QUEUE, 5).tickets] == [1]
    worker.wake()
    assert worker.listen([QUEUE], 300) is False
    assert time.monotonic() - began < 100


def test_a_message_due_earlier_than_the_earliest_ends_a_listen_and_a_later_one_does_not(
    server: RedisServer, brokers: tuple[RedisBroker, RedisBroker]
) -> None:
    worker, producer = brokers
    producer.put(QUEUE, [entry(1, due_in=300)])
    worker.listen([QUEUE], 0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.listen, [QUEUE], 300)
        wait_for_listeners(server)
        producer.put(QUEUE, [entry(2, due_in=400)])
        producer.notify(["elsewhere"])
        assert not waiting.done()
        producer.put(QUEUE, [entry(3, due_in=200)])
        assert waiting.result(timeout=100) is True
    next_due = worker.take(QUEUE, 0).next_due
    assert next_due is not None
    assert 110 < next_due < 200.01


def unread(server: RedisServer) -> bool:
    """Return whether bytes wait that the server has not read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{server.port:04X}") and not row[4].endswith(":00000000") for row in rows)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not show what waits to be read")
def test_a_wake_up_is_not_given_to_a_connection_that_was_closed_just_before(
    server: RedisServer, brokers: tuple[RedisBroker, RedisBroker]
) -> None:
    """A busy Redis finds the end of a connection and the next command of another one at the same time."""
    worker, other = brokers
    worker.listen([QUEUE], 0)
    wait_for_listeners(server)
    worker.notify(["elsewhere"])

    def pass_on() -> None:
        worker.stop_listening()
        worker.notify([QUEUE])

    with ThreadPoolExecutor(1) as pool:
        server.freeze()
        passed = pool.submit(pass_on)
        eventually(lambda: unread(server), "the next command waits")
        server.thaw()
        passed.result()
    assert other.listen([QUEUE], 30) is True


def test_a_listen_ends_when_any_of_its_queues_is_notified(
    server: RedisServer, brokers: tuple[RedisBroker, RedisBroker]
) -> None:
    worker, other = brokers
    for queue in ("a", "b"):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.listen, ["a", "b"], 300)
            wait_for_listeners(server)
            other.notify([queue])
            assert waiting.result(timeout=100) is True


def test_a_notification_wakes_one_of_two_and_is_used_once(
    server: RedisServer, brokers: tuple[RedisBroker, RedisBroker]
) -> None:
    answers: list[bool] = []
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(lambda one: answers.append(one.listen([QUEUE], 300)), one) for one in brokers]
        wait_for_listeners(server, times=2)
        brokers[0].notify([QUEUE])
        while not answers:
            time.sleep(0.002)
        assert answers == [True]
        for one in brokers:
            one.wake()
        for wait in waits:
            wait.result(timeout=100)
    assert answers == [True, False]


def test_the_wait_for_a_wake_up_begins_anew_after_redis_did_not_answer(
    brokers: tuple[RedisBroker, RedisBroker],
) -> None:
    worker, producer = brokers
    assert not worker.listen([QUEUE], 0.05)
    (before,) = eventually(lambda: listeners(producer))
    switch = BrokerSwitch("default", registry.handlers)
    switch.redis = worker
    switch.report_failure(BrokerUnavailable())
    # It is woken, to ask the database.
    assert not worker.listen([QUEUE], 300)
    # The old connection is gone, and a new one waits.
    eventually(lambda: len(now := listeners(producer)) == 1 and now != [before])
    producer.notify([QUEUE])
    assert worker.listen([QUEUE], 300)


@pytest.mark.parametrize("how", ["after a notification", "told to stop listening"])
def test_a_busy_process_takes_no_wake_up_from_an_idle_one(
    brokers: tuple[RedisBroker, RedisBroker], server: RedisServer, how: str
) -> None:
    """Redis answers those first who have waited longest."""
    busy, idle = brokers
    if how == "after a notification":
        busy.notify([QUEUE])
        assert busy.listen([QUEUE], 300)
    else:
        assert not busy.listen([QUEUE], 0.01)
        busy.stop_listening()
        eventually(lambda: busy.client.info("clients")["blocked_clients"] == 0, "nobody waits")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(idle.listen, [QUEUE], 300)
        wait_for_listeners(server)
        assert busy.client.info("clients")["blocked_clients"] == 1
        busy.notify([QUEUE])
        assert waiting.result(timeout=100) is True


def test_a_listening_connection_that_redis_closed_meanwhile_is_replaced(broker: RedisBroker) -> None:
    for _again in range(2):
        broker.notify([QUEUE])
        assert broker.listen([QUEUE], 300)
        broker.client.client_kill_filter(skipme=True, _type="normal")


def test_a_server_that_accepts_and_says_nothing_ends_a_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}/0"
        broker = RedisBroker(conf.Settings()._replace(REDIS=url), "default", timeout=0.3)
        # Nothing has to be said before the command that waits; the next take finds out.
        assert not broker.listen([QUEUE], 0.3)
        with pytest.raises(BrokerUnavailable):
            broker.take(QUEUE, 1)
        broker.close()


@pytest.mark.parametrize("member", [str(2**63), "9" * 5000, "x", "-3"], ids=lambda member: member[:20])
def test_an_id_that_no_database_can_hold_is_told(broker: RedisBroker, member: str) -> None:
    broker.client.zadd(broker.keys(QUEUE).ready, {member: 1, "7": 4})
    with pytest.raises(BrokerRubbish):
        broker.take(QUEUE, 10)


def test_without_a_horizon_everything_is_left_to_the_loader(server: RedisServer) -> None:
    broker = RedisBroker(settings_for(server), "default", timeout=2.0)
    assert broker.put(QUEUE, [entry(number) for number in range(1, 1_501)]) == Put(beyond=1_500)
    assert broker.take(QUEUE, 10).tickets == []
    broker.close()


def test_a_parked_id_comes_back_after_its_time_with_its_rank(broker: RedisBroker) -> None:
    broker.put(QUEUE, [entry(1, priority=-7)])
    taken = broker.take(QUEUE, 1)
    assert taken.tickets[0].rank == 107
    broker.delay(QUEUE, taken.tickets, 60)
    next_due = broker.take(QUEUE, 1).next_due
    assert next_due is not None
    assert 10 < next_due < 60.01
    broker.now = lambda: time.time() + 60
    assert [(ticket.id, ticket.rank) for ticket in broker.take(QUEUE, 1).tickets] == [(1, 107)]


def test_the_redis_of_another_database_is_refused_and_left_as_it_is(server: RedisServer, broker: RedisBroker) -> None:
    terms: dict[str, Any] = {"ahead": 600.0, "worker": "test", "lease": 10.0, "server": broker.server(), "lost": True}
    broker.now = lambda: 1e9
    before = broker.read_meta()
    other = RedisBroker(settings_for(server), "default", timeout=2.0, identity=lambda: "another")
    for call in (
        lambda: other.load(**terms, identity="another"),
        lambda: other.tick(counts=True),
        lambda: other.tick(counts=False),
    ):
        with pytest.raises(ForeignBroker):
            call()
    other.close()
    assert broker.read_meta() == before


def test_every_method_raises_while_redis_is_down_and_works_again_afterwards(
    server: RedisServer, broker: RedisBroker
) -> None:
    broker.put(QUEUE, [entry(1)])
    before = broker.server()
    # Use the token up: one left on the connection would end the listen below although Redis is down.
    assert broker.listen([QUEUE], 10.0) is True
    server.kill()
    for name, method in METHODS.items():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            method(broker)
        assert time.monotonic() - began < 100, name
    server.start()
    assert (before.role, broker.server().run_id != before.run_id) == ("master", True)
    load(broker)
    assert broker.put(QUEUE, [entry(2)]).put == 1
    assert broker.listen([QUEUE], 10.0) is True
    assert [ticket.id for ticket in broker.take(QUEUE, 5).tickets] == [2]


def test_a_listen_raises_when_redis_is_killed_under_it(server: RedisServer, broker: RedisBroker) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broker.listen, [QUEUE], 300)
        wait_for_listeners(server)
        server.kill()
        with pytest.raises(BrokerUnavailable):
            waiting.result(timeout=100)


def test_reading_the_meta_counts_no_tick(broker: RedisBroker) -> None:
    before = broker.read_meta()
    for again in (broker.read_meta(), broker.tick(counts=False)):
        assert before == replace(again, now_tenths=before.now_tenths)
    after = broker.tick()
    assert after == replace(before, now_tenths=after.now_tenths, tick=before.tick + 1)
    assert after.horizon_tenths == after.loaded_tenths is not None
    assert (after.run_id, after.identity) == (broker.server().run_id, "i")
    assert before.now_tenths <= after.now_tenths <= broker.now_tenths()


def test_what_an_idle_worker_asks_for_each_second_is_few_commands(server: RedisServer, broker: RedisBroker) -> None:
    with redis.Redis(port=server.port) as client:
        for call, most in (
            (lambda: broker.tick(counts=False), 1),
            (lambda: broker.tick(counts=True), 2),
            (lambda: broker.hold_duty("d", "w", 4.0), 3),
            (lambda: broker.take_duty("d", "w", 4.0), 1),
        ):
            call()
            client.config_resetstat()
            call()
            stats = client.info("commandstats")
            called = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
            assert sum(n for name, n in called.items() if not name.startswith(("config", "info"))) == most


def test_a_duty_is_taken_only_when_nobody_has_it(broker: RedisBroker) -> None:
    assert broker.take_duty("d", "a", 60.0)
    assert not broker.take_duty("d", "b", 60.0)
    assert not broker.hold_duty("d", "b", 60.0)
    assert broker.hold_duty("d", "a", None) is False
    assert broker.take_duty("d", "b", 60.0)
    assert broker.hold_duty("d", "b", 60.0)


def test_a_closed_broker_leaves_no_connection_behind(server: RedisServer) -> None:
    broker = RedisBroker(settings_for(server), "default", timeout=2.0)
    load(broker)
    broker.listen([QUEUE], 0.0)
    broker.close()
    with redis.Redis(port=server.port) as client:
        eventually(lambda: client.info("clients")["connected_clients"] == 1, "there is no other connection")


def test_a_connection_does_not_read_the_version_of_redis_py_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("importlib.metadata.version")
    client = connection.connect("redis://localhost:1/0", timeout=1.0)
    assert client.connection_pool.make_connection() is not None


def test_a_cache_is_tried_once_and_again_when_the_caches_change(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def connect(place: str, *, timeout: float) -> redis.Redis:
        tried.append(place)
        return redis.Redis()

    monkeypatch.setattr(connection, "connect", connect)
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://localhost:1/0"}
    settings.DELAYQ = {"REDIS": "guarded"}
    for times in (1, 2):
        settings.CACHES = {**settings.CACHES, "guarded": cache}
        for _ in range(3):
            check_settings()
        assert tried == ["guarded"] * times


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, "none"),
        ("redis://user:hunter2@host:7000/3", "host:7000 db 3"),
        ("rediss://:hunter2@host", "host:6379 db 0"),
        ("unix://user:hunter2@/run/redis.sock?db=2", "unix:/run/redis.sock db 2"),
        ("delayq", "cache alias 'delayq'"),
        ("http://user:hunter2@host", "an URL"),
    ],
)
def test_the_description_of_redis_shows_no_secrets(url: str | None, shown: str) -> None:
    text = describe(conf.Settings()._replace(REDIS=url))
    assert shown in text
    assert "hunter2" not in text
