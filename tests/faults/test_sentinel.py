"""Redis behind Sentinel, as django-redis is set up for it: three real processes."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import consumed, effects_per_message, once_each, wait_until_all, wait_until_redis_times
from tests.support.redis_servers import SentinelServer, of
from tests.support.sentinel import FACTORY, guarded
from tests.support.workers import eventually

KEYS = keys("delayq", "default")


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_failover_by_sentinel_under_a_working_worker_loses_nothing(
    start: Start,
    configure: Configure,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    trio: tuple[RedisServer, RedisServer, SentinelServer],
) -> None:
    master, replica, sentinel = trio
    monkeypatch.setenv("DELAYQ_TEST_SENTINEL", str(sentinel.port))
    settings.CACHES = {**settings.CACHES, "guarded": guarded(sentinel.port)}
    settings.DJANGO_REDIS_CONNECTION_FACTORY = FACTORY
    configure(REDIS="guarded")
    worker = start(prefix="env DJANGO_SETTINGS_MODULE=tests.support.sentinel_settings")
    worker.wait_for("Loaded Redis")
    messages = schedule_messages({"topic": "t.tx", "delay": 0.3 + 0.05 * n} for n in range(100))
    with of(master) as client:
        assert client.zcard(KEYS.delayed) > 0
    eventually(consumed(10), "the first are delivered")
    master.kill()
    meanwhile = [schedule_message("t.tx", delay=0.1 * n) for n in range(20)]
    wait_until_all(State.CONSUMED, 120)
    assert effects_per_message() == once_each([*messages, *meanwhile])
    worker.wait_for("Redis is back")
    with of(replica) as client:
        # The first put may still go to the old master.
        eventually(
            lambda: client.zscore(KEYS.delayed, str(schedule_message("t.tx", delay=120).pk)) is not None,
            "the new master times",
        )
    wait_until_redis_times()
    worker.stop()
