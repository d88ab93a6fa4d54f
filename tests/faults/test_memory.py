"""Tests with a full Redis: it refuses new ids, but messages are scheduled and delivered."""

from __future__ import annotations

import pytest
import redis

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import effects_per_message, once_each, states
from tests.support.redis_servers import of
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

KEYS = keys("delayq", "default")


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_redis_filled_by_our_own_ids_empties_itself_as_they_fall_due_or_are_cancelled(
    start: Start, configure: Configure
) -> None:
    with RedisServer() as server, of(server) as client:
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        messages = schedule_messages({"topic": "t.tx", "delay": 5.0 + 0.001 * n} for n in range(300))
        unwanted = schedule_message("t.tx", delay=300)
        assert client.zcard(KEYS.delayed) == 301
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.ResponseError, match="used memory"):
            client.lpush("more", "x")
        assert cancel_message(unwanted)
        eventually(lambda: states() == {State.CONSUMED: 300, State.CANCELLED: 1}, "the others are delivered")
        assert effects_per_message() == once_each(messages)
        eventually(lambda: client.zcard(KEYS.delayed) + client.zcard(KEYS.ready) == 0, "none of them is left")
        assert worker.count("Redis is away.*used memory") <= 1
        client.config_set("maxmemory", 0)
        worker.wait_for("Redis is back")
        worker.stop()
