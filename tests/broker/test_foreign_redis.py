"""Producers leave the Redis of another database alone: they notice without a query and without a round trip."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_delayq import cancel_message, move_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.broker import publisher
from django_delayq.broker.broker_tuning import BrokerTuning
from django_delayq.broker.keys import keys
from django_delayq.core.known_record import doubt_identity, known_identity
from django_delayq.models import Message
from django_delayq.models.messages import Identity
from django_delayq.record.reads import identity
from tests.broker.bench import load, redis_broker
from tests.conftest import close_publishers
from tests.support.commands import run
from tests.support.in_redis import calls, content, held
from tests.support.known_scripts import teach
from tests.support.steps import TOPIC
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = keys("delayq", "default")


@pytest.fixture
def foreign(redis_client: redis.Redis) -> redis.Redis:
    """Redis as the worker of another database leaves it, with the ids of two of its messages."""
    broker = redis_broker(horizon=False)
    load(broker, str(uuid4()))
    redis_client.zadd(KEYS.delayed, {"1": 2**44, "2": 2**44})
    redis_client.zadd(KEYS.ready, {"3": 2**44, "4": 2**44})
    broker.close()
    return redis_client


@pytest.mark.parametrize("has_identity", [True, False], ids=["known database", "database of a test"])
def test_the_redis_of_another_database_is_left_as_it_is(
    foreign: redis.Redis, has_identity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "usual", BrokerTuning(retry_after=0.0))
    publisher.get.cache_clear()
    if has_identity:
        identity("default")
        doubt_identity("default")
    with transaction.atomic():
        moved, cancelled = schedule_message(TOPIC, delay=60).pk, schedule_message(TOPIC, delay=60).pk
    # Theirs have the same ids.
    foreign.zadd(KEYS.delayed, {str(moved): 2**44, str(cancelled): 2**44})
    before = content(foreign)
    for _ in range(3):
        schedule_message(TOPIC)
        schedule_messages([{"topic": TOPIC}] * 3)
        reschedule_message(moved, delay=5)
    cancel_message(cancelled)
    close_publishers()
    assert content(foreign) == before


def test_the_operator_is_told_beside_calls_that_do_not_ask_whose_redis_it_is(
    foreign: redis.Redis, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["pulled"]}
    identity("default")
    there = publisher.get("default")
    assert there is not None
    with caplog.at_level(logging.INFO, "django_delayq"):
        for _ in range(3):
            schedule_message(TOPIC, delay=60)
            there.count_call("a token", "a window", 1, 10, 60_000)
            schedule_message(TOPIC, queue="pulled")
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def test_the_operator_is_told_once(foreign: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    identity("default")
    with caplog.at_level(logging.INFO, "django_delayq"):
        for _ in range(30):
            cancel_message(schedule_message(TOPIC, delay=60).pk)
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert "belongs to another database" in caplog.text
    assert "safe in the record" in caplog.text
    ran = run("delayq_check", "--min-workers", "0")
    schedule_message(TOPIC, delay=60)
    ran = run("delayq_check", "--min-workers", "0")
    assert ran.code == 78
    assert "CRITICAL Redis identity: " in ran.out


def test_an_identity_that_was_made_anew_is_noticed(redis_client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """A test that empties all tables takes the identity along, and a worker makes another one."""
    publisher.get.cache_clear()
    redis_broker().close()
    schedule_message(TOPIC, delay=60)
    close_publishers()
    Identity.objects.all().delete()
    redis_client.flushall()
    fresh = str(Identity.objects.create(id=1).value)
    broker = redis_broker(horizon=False)
    load(broker, fresh)
    broker.close()
    assert known_identity("default") != fresh
    ids = [schedule_message(TOPIC, delay=60).pk for _ in range(60)]
    close_publishers()
    assert known_identity("default") == fresh
    assert ids[-1] in held(redis_client)
    assert caplog.records == []


VERBS: dict[str, Callable[[Message], object]] = {
    "schedule": lambda _waiting: schedule_message(TOPIC, delay=60),
    "schedule with a key": lambda _waiting: schedule_message(TOPIC, delay=60, key="k"),
    "schedule many": lambda _waiting: schedule_messages([{"topic": TOPIC, "delay": 60}]),
    "cancel": cancel_message,
    "reschedule": lambda waiting: reschedule_message(waiting, delay=5),
    "move": lambda waiting: move_message(waiting, queue="b"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_brings_the_identity_along_at_no_cost(redis_client: redis.Redis, verb: str) -> None:
    redis_broker().close()
    teach(redis_client)
    counted = []
    for number in range(2):
        waiting = schedule_message(TOPIC, delay=60, key=f"waiting {number}")
        identity("default")
        if number == 0:
            doubt_identity("default")
        close_publishers()
        calls(redis_client)
        with CaptureQueriesContext(connection) as queries, transaction.atomic():
            VERBS[verb](waiting)
        close_publishers()
        counted.append((len(queries), calls(redis_client)))
        assert known_identity("default") == str(Identity.objects.get().value)
        cancel_message(topic=TOPIC, key="k")
    assert counted[0] == counted[1]


def test_an_identity_is_forgotten_with_the_name_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runner puts another database behind the alias."""
    identity("default")
    assert known_identity("default")
    monkeypatch.setitem(connections.settings["default"], "NAME", "test_of_it")
    assert known_identity("default") == ""


# --- refusals that are over, and what is no refusal ------------------------------------------------------------------


def refuse(client: redis.Redis, owner: str) -> None:
    """Have Redis refuse one put: for that moment it belongs to another database than its owner."""
    client.hset(KEYS.meta, "identity", str(uuid4()))
    calls(client)
    schedule_message(TOPIC, delay=60)
    eventually(lambda: calls(client) > 0)
    client.hset(KEYS.meta, "identity", owner)


@pytest.fixture
def ours(redis_client: redis.Redis, caplog: pytest.LogCaptureFixture) -> str:
    """Have Redis filled for this database, and a publisher connected to it. Return the identity."""
    redis_broker().close()

    def is_put() -> bool:
        message, told = schedule_message(TOPIC, delay=60), publisher.get("default")
        assert told is not None
        # An answer that is too late is as good as none.
        with contextlib.suppress(redis.RedisError):
            told.broker.flush()
        return message.pk in held(redis_client)

    eventually(is_put, "a busy machine connects in time")
    redis_client.delete(KEYS.delayed)
    caplog.clear()
    caplog.set_level(logging.INFO, "django_delayq")
    return identity("default")


def test_whoever_is_to_read_the_identity_again_publishes_meanwhile(
    redis_client: redis.Redis, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep, or a refusal, has it read again while a transaction that has written its messages is still open."""
    put = []
    for _ in range(4):
        with transaction.atomic():
            put.append(schedule_message(TOPIC, delay=60).pk)
            doubt_identity("default")
    close_publishers()
    assert set(put) == held(redis_client)
    assert caplog.records == []


def test_a_database_that_has_no_identity_is_no_conflict(foreign: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has filled a Redis for it, so no Redis waits for its messages."""
    before = content(foreign)
    for _ in range(3):
        schedule_message(TOPIC, delay=60)
    close_publishers()
    assert content(foreign) == before
    assert caplog.records == []


def test_a_refusal_costs_no_other_put(redis_client: redis.Redis, ours: str, caplog: pytest.LogCaptureFixture) -> None:
    refuse(redis_client, ours)
    put = [schedule_message(TOPIC, delay=60).pk for _ in range(3)]
    close_publishers()
    assert held(redis_client) == set(put)
    assert caplog.records == []


def test_a_refusal_is_over_with_the_next_put(
    redis_client: redis.Redis, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody restores a dump, and another one: Redis belongs to another database for moments, again and again."""
    for _ in range(3):
        refuse(redis_client, ours)
        put = [schedule_message(TOPIC, delay=60).pk for _ in range(3)]
    close_publishers()
    assert set(put) <= held(redis_client)
    assert caplog.records == []


def test_a_key_of_another_type_costs_no_put_of_another_queue(redis_client: redis.Redis, ours: str) -> None:
    redis_client.set(keys("delayq", "spoilt").delayed, "somebody's")
    schedule_message(TOPIC, delay=60, queue="spoilt")
    put = schedule_message(TOPIC, delay=60)
    close_publishers()
    assert held(redis_client) == {put.pk}
