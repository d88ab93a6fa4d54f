"""Many messages that fall due together."""

from __future__ import annotations

import time

import pytest
import redis

from django_delayq.broker.base import IDS_PER_CALL
from django_delayq.broker.keys import RANKS, keys
from django_delayq.core.clock import SECOND
from django_delayq.worker.claim.consumer import CATCH_UP, Consumer
from tests.support.assembled import Assemble

pytestmark = pytest.mark.django_db(transaction=True)

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
