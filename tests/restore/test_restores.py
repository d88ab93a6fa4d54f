"""Tests of delayq_restore while producers and workers go on."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.db import connections

from django_delayq import cancel_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from django_delayq.restore.engine import Restore
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from testproject.servers import RedisServer
from tests.support.commands import run
from tests.support.processes import Start
from tests.support.record_of import begun_per_message, effects_per_message, once_each, states
from tests.support.workers import eventually

DELAYED = keys("delayq", "default").delayed


def restore_again_and_again(until: int) -> int:
    """Restore until ``until`` messages are consumed, and return how often."""
    times = 0
    try:
        while states()[State.CONSUMED] < until:
            run("delayq_restore")
            times += 1
    finally:
        connections.close_all()
    return times


def test_restores_and_traffic_beside_each_other_lose_and_double_nothing(
    start: Start, redis_server: RedisServer
) -> None:
    messages = schedule_messages({"topic": "t.tx", "delay": 0.005 * n} for n in range(300))
    cancelled = schedule_messages({"topic": "t.tx", "delay": 20} for n in range(20))
    for _ in range(2):
        start("--threads", "4")
    with ThreadPoolExecutor(2) as threads, redis.Redis(port=redis_server.port) as client:
        client.flushall()
        restores = [threads.submit(restore_again_and_again, 420) for _ in range(2)]
        for message in cancelled:
            assert cancel_message(message)
        more = [schedule_message("t.tx", delay=0.01 * n) for n in range(100)]
        moved = [schedule_message("t.tx", delay=3600) for _ in range(20)]
        for message in moved:
            assert reschedule_message(message, delay=0.2)
        eventually(lambda: states() == {State.CONSUMED: 420, State.CANCELLED: 20}, "all are delivered")
        assert all(restore.result(30) for restore in restores)
    assert effects_per_message() == once_each([*messages, *more, *moved])
    assert begun_per_message() == once_each([*messages, *more, *moved])


@pytest.mark.parametrize("how", ["stopped", "interrupted"])
@pytest.mark.django_db(transaction=True)
def test_a_restore_that_ends_early_lets_a_worker_load_the_rest_at_once(redis_client: redis.Redis, how: str) -> None:
    messages = schedule_messages({"topic": "t.ok", "delay": 60} for _ in range(50))
    redis_client.flushall()
    brokers = BrokerSwitch("default", dict)
    assert brokers.redis is not None
    restore = Restore("default", brokers.redis, batch_size=10)
    restore.preview()

    def interrupt(done: int) -> None:
        if how == "interrupted":
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        restore.run(should_stop=lambda: restore.report.total().put > 0, progress=interrupt)
    assert redis_client.zcard(DELAYED) < len(messages)
    Loader("default", brokers, "host/1").tick()
    assert redis_client.zcard(DELAYED) == len(messages)
    brokers.close()
