"""Redis and the database as sources: when Redis is away, and when somebody writes under our keys in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_delayq import schedule_message
from django_delayq.broker.keys import keys
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.shared import broker_switch
from django_delayq.worker.upkeep.loader import Loader
from tests.support.assembled import Assemble
from tests.support.claims import state

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


def test_an_answer_to_what_was_asked_before_redis_failed_does_not_bring_it_back(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Some commands succeed in a Redis that is full; and one thread may have asked before another one failed."""
    brokers = parts.brokers
    brokers.has_loader = True
    asked = time.monotonic()
    brokers.report_failure(BrokerUnavailable("used memory"))
    brokers.report_answer(asked)
    brokers.report_failure(BrokerUnavailable("used memory"))
    assert brokers.current() is brokers.database
    brokers.report_answer(time.monotonic())
    assert brokers.current() is brokers.redis
    lines = [record.getMessage() for record in caplog.records if "Redis is" in record.getMessage()]
    assert [text.split(";")[0] for text in lines] == ["Redis is away", "Redis is back"]


def test_the_error_that_lasts_is_told_after_the_first_one(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    brokers = parts.brokers
    brokers.has_loader = True
    for error in ("Connection closed by server.", *["invalid username-password pair"] * 3):
        brokers.report_failure(BrokerUnavailable(error))
    brokers.report_answer(time.monotonic())
    brokers.report_failure(BrokerUnavailable("Connection closed by server."))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "Connection closed by server.",
        "invalid username-password pair",
        "Redis is back",
        "Connection closed by server.",
    ]


def test_a_redis_that_flaps_is_used_again_after_longer_and_longer_waits(
    parts: Parts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reports an answer each second, and each take fails."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    brokers = parts.brokers
    brokers.has_loader = True
    for _second in range(600):
        now += 1.0
        brokers.report_answer(now)
        if brokers.current() is brokers.redis:
            brokers.report_failure(BrokerUnavailable("WRONGTYPE"))
    lines = [record.getMessage().split(";")[0] for record in caplog.records]
    assert 10 <= lines.count("Redis is away") <= 20
    now += 3600.0
    brokers.report_answer(now)
    assert brokers.current() is brokers.redis
    now += broker_switch.FLAPPING
    brokers.report_failure(BrokerUnavailable("away for once"))
    now += 1.0
    brokers.report_answer(now)
    assert brokers.current() is brokers.redis


# --- rubbish ----------------------------------------------------------------------------------------------------------


DB, QUEUE = "default", "default"
KEYS = keys("delayq", QUEUE)
DAY = 86_400.0

Write = Callable[[redis.Redis], object]


def of_another_type(name: str) -> Write:
    def write(client: redis.Redis) -> None:
        client.delete(getattr(KEYS, name))
        client.set(getattr(KEYS, name), "somebody's")

    return write


RUBBISH: dict[str, Write] = {
    **{
        f"a {name} of another type": of_another_type(name)
        for name in ("delayed", "ready", "meta", "queues", "blocked_counts")
    },
    "a member that is no id": lambda client: client.zadd(KEYS.ready, {"x": 0}),
    "a member that is too large": lambda client: client.zadd(KEYS.ready, {"9" * 20: 0}),
    "a member below zero": lambda client: client.zadd(KEYS.ready, {"-3": 0}),
    "a member that is no text": lambda client: client.zadd(KEYS.delayed, {b"\xff\xfe": 0}),
    "a score beyond all times": lambda client: client.zadd(KEYS.ready, {"3": 1e300}),
    "a score without end": lambda client: client.zadd(KEYS.delayed, {"3": "-inf"}),
    "a score that is not whole": lambda client: client.zadd(KEYS.ready, {"3": 0.5}),
    "a queue without a name": lambda client: client.zadd(KEYS.queues, {"": 0}),
    "a queue with an endless name": lambda client: client.zadd(KEYS.queues, {"x" * 5000: 0}),
    "a queue that is no name": lambda client: client.zadd(KEYS.queues, {b"\xff\xfe": 0}),
    "a horizon that is no number": lambda client: client.hset(KEYS.meta, "horizon", "abc"),
    "a blocked id without a reason": lambda client: client.hset(KEYS.blocked_counts, QUEUE, 3),
    "a blocked id for another reason": lambda client: client.hset(KEYS.blocked_counts, f"{QUEUE}:lost", 3),
    "a count that is none": lambda client: client.hset(KEYS.blocked_counts, f"{QUEUE}:queue {QUEUE}", "abc"),
    "a tick at its end": lambda client: client.hset(KEYS.meta, "tick", 2**63 - 1),
}


class Worker:
    """A worker process with a loader, assembled but not running."""

    def __init__(self, parts: Parts) -> None:
        self.brokers = parts.brokers
        self.brokers.has_loader = True
        self.consumer = parts.consumer
        self.loader = Loader(DB, parts.brokers, "w")
        self.broker = self.loader.broker
        self.work()

    def is_away(self) -> bool:
        """Tell whether messages are delivered by query."""
        return self.brokers.is_away

    def work(self) -> None:
        for _time in range(3):
            self.consumer.run_round()
            self.loader.tick()


@pytest.fixture
def worker(redis_client: redis.Redis, assembled: Assemble) -> Worker:
    return Worker(assembled(threads=10, queues=None))


@pytest.mark.parametrize("write", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_stops_no_delivery_and_is_replaced(worker: Worker, redis_client: redis.Redis, write: Write) -> None:
    waiting = schedule_message("t.ok", delay=60)
    write(redis_client)
    due = schedule_message("t.ok")
    worker.work()
    assert state(due) == State.RUNNING
    assert not worker.is_away()
    assert list(worker.broker.ids(QUEUE)) == [[waiting.pk]]
    assert redis_client.zrange(KEYS.queues, 0, -1) == [QUEUE.encode()]
    meta = worker.broker.read_meta()
    assert meta.horizon_tenths == meta.loaded_tenths is not None


def test_rubbish_that_comes_again_within_half_a_minute_is_left_and_delivery_goes_on_by_query(
    worker: Worker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker: Any = worker.broker
    began = broker.now()
    monkeypatch.setattr(broker, "now", lambda: began)
    RUBBISH["a member that is no id"](redis_client)
    worker.work()
    assert not worker.is_away()
    monkeypatch.setattr(broker, "now", lambda: began + 29)
    RUBBISH["a member that is no id"](redis_client)
    message = schedule_message("t.ok")
    worker.work()
    assert worker.is_away()
    assert state(message) == State.RUNNING
    assert redis_client.hget(KEYS.meta, "cleared") is not None
    monkeypatch.setattr(broker, "now", lambda: began + 31)
    worker.work()
    assert not worker.is_away()
    assert redis_client.exists(KEYS.ready) == 0


def test_what_another_process_has_deleted_since_is_not_deleted_again(
    worker: Worker, assembled: Assemble, redis_client: redis.Redis
) -> None:
    other = Worker(assembled(threads=10, queues=None))
    for each in (worker, other):
        RUBBISH["a member that is no id"](redis_client)
        each.consumer.run_round()
    worker.loader.tick()
    message = schedule_message("t.ok", delay=60)
    cleared = redis_client.hget(KEYS.meta, "cleared")
    other.loader.tick()
    assert not other.is_away()
    assert redis_client.hget(KEYS.meta, "cleared") == cleared
    assert list(worker.broker.ids(QUEUE)) == [[message.pk]]


@pytest.mark.parametrize("write", RUBBISH.values(), ids=RUBBISH)
def test_under_the_identity_of_another_database_nothing_is_deleted(
    worker: Worker, redis_client: redis.Redis, write: Write
) -> None:
    write(redis_client)
    worker.consumer.run_round()
    if redis_client.type(KEYS.meta) != b"hash":
        pytest.skip("nothing tells whose it is")
    redis_client.hset(KEYS.meta, "identity", "somebody else's")
    before = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    message = schedule_message("t.ok")
    worker.work()
    assert state(message) == State.RUNNING
    assert worker.is_away()
    assert {key: redis_client.dump(key) for key in redis_client.scan_iter()} == before


def test_keys_of_others_are_never_deleted(worker: Worker, redis_client: redis.Redis) -> None:
    others = ["{delayq}:other:delayed", "{delayq2}:default:ready", "delayq"]
    for key in others:
        redis_client.set(key, "somebody's")
    RUBBISH["a meta of another type"](redis_client)
    worker.work()
    assert not worker.is_away()
    assert redis_client.exists(*others) == len(others)
    assert worker.broker.read_meta().now_tenths > DAY * SECOND
