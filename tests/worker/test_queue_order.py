"""In which order messages are delivered, and how queues are found."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq import MessageDict, cancel_message, pause_queue, resume_queue, schedule_message, schedule_messages
from django_delayq.broker.base import IDS_PER_CALL
from django_delayq.broker.keys import RANKS, keys
from django_delayq.core.clock import SECOND
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.worker.claim.consumer import CATCH_UP, Consumer
from django_delayq.worker.claim.queues import QueueFinder
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.upkeep.loader import Loader
from tests.app.models import Effect
from tests.support.assembled import Assemble
from tests.support.claims import DB
from tests.support.workers import eventually
from tests.worker.bench import running

pytestmark = pytest.mark.django_db(transaction=True)


def overdue(count: int) -> list[int]:
    """Schedule messages, each overdue longer than the one before. Return their ids, the longest overdue first."""
    now = timezone.now()
    messages: list[MessageDict] = [
        {"topic": "t.effect", "due_at": now - timedelta(milliseconds=10 * number)} for number in range(1, count + 1)
    ]
    ids = [message.pk for message in schedule_messages(messages)]
    return ids[::-1]


@pytest.mark.parametrize("broker", ["redis", "database"])
@pytest.mark.parametrize("paused", [False, True], ids=["", "after a pause"])
def test_an_overdue_backlog_runs_longest_overdue_first(
    redis_client: redis.Redis, assembled: Assemble, broker: str, paused: bool
) -> None:
    ids = overdue(120)
    if paused:
        pause_queue("default")
    parts = assembled(threads=1, redis=broker == "redis")
    if parts.brokers.redis is not None:
        Loader("default", parts.brokers, "w").tick()
        assert parts.brokers.redis.sizes(["default"])["default"].ready == len(ids)
    if paused:
        parts.consumer.turn()
        resume_queue("default")

    def all_consumed() -> bool:
        parts.consumer.turn()
        return not Message.objects.exclude(state=State.CONSUMED).exists()

    with running(parts.pool):
        eventually(all_consumed)
    assert list(Effect.objects.order_by("id").values_list("message_id", flat=True)) == ids


QUEUE = "default"


@pytest.fixture
def consumer(redis_client: redis.Redis, assembled: Assemble) -> Consumer:
    """A consumer whose threads do not run, so that it has room for four deliveries and no more."""
    return assembled(4).consumer


def test_the_most_urgent_message_does_not_wait_for_those_that_fell_due_before_it(
    consumer: Consumer, redis_client: redis.Redis
) -> None:
    places = keys("delayq", QUEUE)
    now_tenths = int(time.time() * SECOND)
    # Ids that the record does not know are dropped as they come.
    many = {str(number): now_tenths - 5 * SECOND + 100 / RANKS for number in range(1, IDS_PER_CALL * CATCH_UP)}
    urgent = IDS_PER_CALL * CATCH_UP
    redis_client.zadd(places.delayed, {**many, str(urgent): now_tenths - SECOND})
    assert consumer.brokers.redis is not None
    consumer.turn()
    assert redis_client.zcard(places.delayed) == 0
    assert [ticket.id for ticket in consumer.brokers.redis.take(QUEUE, 1).tickets] == [urgent]


def test_a_turn_makes_a_limited_number_ready(consumer: Consumer, redis_client: redis.Redis) -> None:
    places = keys("delayq", QUEUE)
    due_tenths = int((time.time() - 5) * SECOND)
    number = IDS_PER_CALL * (CATCH_UP + 3)
    redis_client.zadd(places.delayed, {str(id_): due_tenths + 100 / RANKS for id_ in range(1, number + 1)})
    consumer.turn()
    assert redis_client.zcard(places.delayed) == IDS_PER_CALL * 2


def test_a_queue_that_runs_empty_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    message = schedule_message("t.ok", queue="found")
    queues = QueueFinder(DB)
    queues.tick()
    assert "found" in queues()
    cancel_message(message)
    queues.tick()
    assert "found" in queues()
    monkeypatch.setattr("django_delayq.worker.claim.queues.REMEMBERED", 0.0)
    queues.tick()
    assert "found" not in queues()


def test_the_first_message_of_a_new_queue_is_found_by_the_next_poll_without_redis(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    parts = Parts(Options("default", threads=1))
    # Handlers of the tests have queues of their own, which the worker would know.
    monkeypatch.setattr(parts.queues, "_found", ("default",))
    try:
        parts.consumer.turn()
        message = schedule_message("t.ok", queue="never-used")
        parts.consumer.turn()
        assert Message.objects.get(pk=message.pk).state == State.RUNNING
    finally:
        parts.brokers.close()
