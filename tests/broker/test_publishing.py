"""The publisher tells Redis after the commit, in as few calls as possible, and never harms a caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import pytest
import redis
from django.db import connection, transaction

from django_delayq import (
    cancel_message,
    move_message,
    requeue_message,
    reschedule_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.broker import publisher
from django_delayq.broker.base import Entry
from django_delayq.broker.broker_tuning import USUAL, BrokerTuning
from django_delayq.broker.keys import keys
from django_delayq.core.clock import SECOND, to_tenths
from django_delayq.models import Message
from testproject.servers import RedisServer
from tests.broker.bench import redis_broker
from tests.conftest import close_publishers
from tests.support.in_redis import calls, held
from tests.support.steps import TOPIC, at_once, claim, due
from tests.support.workers import PATIENCE, eventually, is_quick

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

# Django 6.1 has another name for it.
savepoint: Any = getattr(transaction, "savepoint_create", None) or transaction.savepoint


class Undo(Exception):
    """An exception that rolls a transaction back."""


@pytest.fixture(autouse=True)
def _horizon(redis_client: redis.Redis) -> None:
    """Return Redis as a loader leaves it: messages that are due within ten minutes go there."""
    redis_broker().close()


def soon(queue: str = "default") -> Message:
    return schedule_message(TOPIC, delay=60, queue=queue)


def test_a_message_that_is_rolled_back_is_not_published(redis_client: redis.Redis) -> None:
    with pytest.raises(Undo), transaction.atomic():
        soon()
        schedule_messages([{"topic": TOPIC, "delay": 60}] * 3)
        raise Undo
    assert held(redis_client) == set()


def test_only_the_messages_of_a_rolled_back_savepoint_are_not_published(redis_client: redis.Redis) -> None:
    with transaction.atomic():
        kept = [soon().pk, soon().pk]
        with pytest.raises(Undo), transaction.atomic():
            soon()
            with transaction.atomic():
                soon()
            soon()
            raise Undo
        kept.append(soon().pk)
        with transaction.atomic():
            kept.append(soon().pk)
            with pytest.raises(Undo), transaction.atomic():
                soon()
                raise Undo
            kept.append(soon().pk)
        kept.append(soon().pk)
    assert held(redis_client) == set(kept)
    assert set(Message.objects.values_list("pk", flat=True)) == set(kept)


def test_a_savepoint_rolled_back_by_hand_leaves_at_most_an_id_that_no_claim_finds(redis_client: redis.Redis) -> None:
    with transaction.atomic():
        kept = due().pk
        mark = savepoint()
        gone = due().pk
        transaction.savepoint_rollback(mark)
        last = due().pk
    assert {kept, last} <= held(redis_client) <= {kept, gone, last}
    assert sorted(row.id for row in claim(kept, gone, last)) == [kept, last]


def test_messages_are_published_after_the_commit_in_a_call_for_each_queue(redis_client: redis.Redis) -> None:
    soon()
    calls(redis_client)
    with transaction.atomic():
        here = {soon().pk for _ in range(50)}
        there = {soon("slow").pk for _ in range(50)}
        assert calls(redis_client) == 0
    assert calls(redis_client) == 2
    assert here <= held(redis_client)
    assert there == held(redis_client, "slow")


def test_more_than_a_thousand_messages_are_published_in_calls_of_a_thousand(redis_client: redis.Redis) -> None:
    soon()
    calls(redis_client)
    rows = schedule_messages([{"topic": TOPIC, "delay": 60}] * 2_300)
    assert calls(redis_client) == 3
    assert {row.pk for row in rows} <= held(redis_client)


def test_a_message_scheduled_and_cancelled_in_one_transaction_is_not_left_in_redis(redis_client: redis.Redis) -> None:
    with transaction.atomic():
        id_, kept = soon().pk, soon().pk
        cancel_message(id_)
    assert held(redis_client) == {kept}


def test_a_message_that_moves_in_the_record_moves_in_redis(redis_client: redis.Redis) -> None:
    id_ = soon().pk
    reschedule_message(id_, delay=120)
    score = redis_client.zscore(keys("delayq", "default").delayed, str(id_))
    assert score is not None
    assert int(float(score)) == to_tenths(Message.objects.get(pk=id_).due_at)
    reschedule_message(id_, delay="2h")
    assert held(redis_client) == set()
    reschedule_message(id_, delay=60)
    assert held(redis_client) == {id_}
    cancel_message(id_)
    assert held(redis_client) == set()
    requeue_message(id_)
    assert held(redis_client) == {id_}


@pytest.mark.parametrize("delay", ["1d", "12m"])
def test_a_new_message_due_beyond_the_horizon_costs_no_round_trip(redis_client: redis.Redis, delay: str) -> None:
    soon()
    calls(redis_client)
    schedule_message(TOPIC, delay=delay)
    with transaction.atomic():
        schedule_message(TOPIC, delay=delay, key="k")
        schedule_messages([{"topic": TOPIC, "delay": delay}] * 3)
    assert calls(redis_client) == 0
    near = schedule_messages([{"topic": TOPIC, "delay": wait} for wait in (delay, 60, delay, 5)])
    assert calls(redis_client) == 1
    assert {near[1].pk, near[3].pk} < held(redis_client)
    assert not {near[0].pk, near[2].pk} & held(redis_client)


def test_a_message_that_is_a_little_beyond_the_horizon_is_left_to_redis_to_judge(redis_client: redis.Redis) -> None:
    """The clocks of hosts differ."""
    calls(redis_client)
    schedule_message(TOPIC, delay=600 + USUAL.clock_margin - 5)
    assert calls(redis_client) == 1


def test_the_clock_is_read_at_the_commit(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction takes so long that the message is within the horizon by its end."""
    now = time.time()
    with transaction.atomic():
        id_ = schedule_message(TOPIC, delay=900).pk
        monkeypatch.setattr(time, "time", lambda: now + 400)
        redis_client.hset(keys("delayq", "default").meta, "horizon", int((now + 1000) * SECOND))
    assert held(redis_client) == {id_}


def test_a_replaced_message_is_put_into_its_new_place(redis_client: redis.Redis) -> None:
    id_ = schedule_message(TOPIC, delay=60, key="k").pk
    schedule_message(TOPIC, delay=90, key="k", queue="slow", on_conflict="replace")
    # A worker that takes it from the old one claims nothing.
    assert held(redis_client, "slow") == {id_}
    schedule_message(TOPIC, delay="1d", key="k", queue="slow", on_conflict="replace")
    assert held(redis_client, "slow") == set()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_each_database_has_keys_and_commits_of_its_own(redis_client: redis.Redis) -> None:
    redis_broker(using="other").close()
    there = schedule_message(TOPIC, delay=60, using="other").pk
    assert held(redis_client) == set()
    assert held(redis_client, namespace="delayq@other") == {there}
    with transaction.atomic(using="other"):
        here = soon().pk
        assert held(redis_client) == {here}


def test_no_payload_key_or_topic_ever_reaches_redis(redis_client: redis.Redis) -> None:
    schedule_message("s3cret.topic", {"s3cret": "s3cret"}, delay=60, key="s3cret", headers={"s3cret": 1})
    names: Any = redis_client.keys()
    assert held(redis_client)
    for name in names:
        assert b"s3cret" not in name + (redis_client.dump(name) or b"")


def test_nothing_is_published_without_redis(redis_client: redis.Redis, settings: Settings) -> None:
    settings.DELAYQ = {"REDIS": None}
    with transaction.atomic():
        id_ = soon().pk
        assert connection.run_on_commit == []
    assert held(redis_client) == set()
    cancel_message(id_)


def test_threads_publish_beside_each_other(redis_client: redis.Redis) -> None:
    answers = at_once(4, lambda number: [soon().pk for _ in range(10)])
    ids = {id_ for answer in answers if isinstance(answer, list) for id_ in answer}
    assert len(ids) == 40
    assert held(redis_client) == ids


# --- Redis is away ----------------------------------------------------------------------------------------------------


@pytest.fixture
def away(server: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """Return the project's Redis, to be stopped or frozen. Calls wait for it as long as in production."""
    monkeypatch.setattr(publisher, "usual", USUAL)
    server.start()
    settings.DELAYQ = {"REDIS": server.url}
    yield server
    server.thaw()
    there = publisher.get("default")
    if there is not None:
        there.broker.close()


def test_callers_wait_only_once_for_a_redis_that_does_not_answer(
    away: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    away.freeze()

    def twenty_calls() -> None:
        close_publishers()
        caplog.clear()
        for _ in range(20):
            soon()
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    with caplog.at_level(logging.WARNING, "django_delayq"):
        # Each call would wait for 0.25 s.
        is_quick(twenty_calls, 4.0)
    assert Message.objects.count() % 20 == 0


def test_who_finds_another_trying_redis_again_does_not_wait_for_it(
    away: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "usual", BrokerTuning(timeout=PATIENCE / 3, retry_after=0.0))
    close_publishers()
    away.kill()
    soon()
    away.start()
    away.freeze()
    there, entries = publisher.get("default"), [Entry(1, 0, 0)]
    assert there is not None
    trying, flush = threading.Event(), there.broker.flush

    def noted() -> None:
        trying.set()
        flush()

    monkeypatch.setattr(there.broker, "flush", noted)
    there.tuning = BrokerTuning(retry_after=PATIENCE)
    tries = threading.Thread(target=there.announce, args=("default", entries))
    tries.start()
    assert trying.wait(PATIENCE)
    there.announce("default", entries)
    assert tries.is_alive()
    away.thaw()
    tries.join()


def test_a_publisher_that_failed_has_all_loaded_again_once_when_redis_is_back(
    away: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "usual", BrokerTuning(retry_after=0.0))
    close_publishers()
    with redis.Redis(port=away.port) as client:
        client.flushall()
    with closing(redis_broker(away.url)) as broker:
        soon()
        assert broker.read_meta().loaded_tenths is not None
        away.freeze()
        for _ in range(3):
            soon()
        away.thaw()

        def is_requested() -> bool:
            soon()
            return broker.read_meta().is_requested

        eventually(is_requested, "a load is asked for")
        assert broker.read_meta().loaded_tenths is None
        server, owner = broker.server(), broker.read_meta().identity
        begun = broker.load(ahead=600, worker="w", lease=10, identity=owner, server=server, lost=False)
        assert begun is not None
        assert begun[0] is None
        soon()
        assert not broker.read_meta().is_requested


def test_a_redis_that_answers_nonsense_harms_no_caller(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.delete(keys("delayq", "default").meta)
    redis_client.set(keys("delayq", "default").meta, "not a hash")
    with transaction.atomic():
        soon()
    assert Message.objects.count() == 1
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().startswith("Redis cannot be used. ")) == ("WARNING", True)


def test_redis_follows_a_move_at_the_commit(redis_client: redis.Redis) -> None:
    soon, ready = schedule_message(TOPIC, delay=60).pk, schedule_message(TOPIC).pk
    with transaction.atomic():
        move_message(Message.objects.filter(pk__in=[soon, ready]), queue="b")
        assert (held(redis_client), held(redis_client, "b")) == ({soon, ready}, set())
    assert (held(redis_client), held(redis_client, "b")) == (set(), {soon, ready})
    with transaction.atomic():
        move_message(soon, queue="c")
        transaction.set_rollback(True)
    assert (held(redis_client, "b"), held(redis_client, "c")) == ({soon, ready}, set())


def test_a_message_with_another_priority_is_put_into_its_new_place(redis_client: redis.Redis) -> None:
    ids = [schedule_message(TOPIC).pk for _number in range(2)]
    of_queue = keys("delayq", "default")
    members: Any = redis_client.zrange(of_queue.ready, 0, -1)
    assert [int(member) for member in members] == ids
    move_message(ids[1], priority=1)
    members = redis_client.zrange(of_queue.ready, 0, -1)
    assert [int(member) for member in members] == ids[::-1]


@pytest.mark.parametrize("choice", ["keep", "merge"])
def test_a_message_that_is_kept_until_a_commit_is_published_again(
    redis_client: redis.Redis, choice: Literal["keep", "merge"]
) -> None:
    first = schedule_message(TOPIC, delay=60, key="k", unique="scheduled")
    with transaction.atomic():
        kept = schedule_message(TOPIC, delay=60, key="k", unique="scheduled", on_conflict=choice)
        # A worker takes the id, and passes over the row, which is locked.
        redis_client.delete(keys("delayq", "default").delayed)
    assert kept.pk == first.pk
    assert held(redis_client) == {first.pk}
