"""Tests with a full Redis: it refuses new ids, but messages are scheduled and delivered."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.utils import timezone

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.base import Entry
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import effects_per_message, log_of, once_each, wait_until, wait_until_all
from tests.support.redis_servers import of
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

KEYS = keys("delayq", "default")


def test_messages_are_delivered_from_the_database_while_redis_is_full(start: Start, configure: Configure) -> None:
    with RedisServer() as server, of(server) as client:
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        waiting = schedule_messages({"topic": "t.tx", "delay": 1.0 + 0.01 * n} for n in range(20))
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.ResponseError, match="used memory"):
            client.lpush("more", "x")
        meanwhile = [schedule_message("t.tx", delay=0.02 * n) for n in range(20)]
        for message in [*waiting, *meanwhile]:
            wait_until(message, State.CONSUMED)
        assert client.lpop("more") is None
        assert worker.count("Redis is away.*used memory") == 1
        client.config_set("maxmemory", 0)
        worker.wait_for("Redis is back")
        eventually(
            lambda: log_of(wait_until(schedule_message("t.tx"), State.CONSUMED))[1].ready_at is not None,
            "Redis times again",
        )
        assert set(effects_per_message().values()) == {1}
        worker.stop()


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_redis_filled_by_our_own_ids_empties_itself_as_they_fall_due(start: Start, configure: Configure) -> None:
    with RedisServer() as server, of(server) as client:
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        messages = schedule_messages({"topic": "t.tx", "delay": 5.0 + 0.001 * n} for n in range(300))
        assert client.zcard(KEYS.delayed) == 300
        client.config_set("maxmemory", 1)
        wait_until_all(State.CONSUMED, 300)
        assert effects_per_message() == once_each(messages)
        eventually(lambda: client.zcard(KEYS.delayed) + client.zcard(KEYS.ready) == 0, "none of them is left")
        client.config_set("maxmemory", 0)
        worker.wait_for("Redis is back")
        worker.stop()


def test_taking_and_removing_work_in_a_full_redis() -> None:
    with RedisServer() as server, of(server) as client:
        broker = RedisBroker(conf.Settings(REDIS=server.url), "default", timeout=2)
        client.hset(KEYS.meta, "horizon", 2**46)
        now = timezone.now()
        broker.put("default", [Entry.at(n, now + timedelta(milliseconds=300), 0) for n in range(1, 11)])
        broker.put("default", [Entry.at(n, now, 0) for n in range(11, 21)])
        broker.put("default", [Entry.at(21, now + timedelta(hours=1), 0)])
        eventually(lambda: broker.take("default", 0).left == 20 or None, "all are ready or due")
        broker.put("default", [Entry.at(n, timezone.now() + timedelta(milliseconds=100), 0) for n in range(31, 41)])
        client.config_set("maxmemory", 1)
        taken: set[int] = set()

        def look() -> bool:
            taken.update(ticket.id for ticket in broker.take("default", 7).tickets)
            return taken == {*range(1, 21), *range(31, 41)}

        eventually(look, "all are taken")
        broker.remove("default", [21])
        assert client.zcard(KEYS.delayed) == client.zcard(KEYS.ready) == 0
        assert not Message.objects.exists()
        broker.close()
