"""Redis servers that are unusual: full, or behind Sentinel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.test import Client, override_settings

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from django_delayq.models import Worker
from testproject.servers import RedisServer
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.record_of import (
    consumed,
    effects_per_message,
    once_each,
    states,
    wait_until,
    wait_until_all,
    wait_until_redis_times,
)
from tests.support.redis_servers import SentinelServer, of
from tests.support.sentinel import FACTORY, guarded
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
        # A script and a command say it in two ways, which the log tells once a minute each, and not for each message.
        assert worker.count("cannot be used.*used memory") < 20
        client.config_set("maxmemory", 0)
        worker.wait_for("Redis is back")
        worker.stop()


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


def redis_finding(**delayq: Any) -> str:
    """Return what ``delayq_check`` finds about the contents of the Redis of these settings."""
    with override_settings(DELAYQ={**django_settings.DELAYQ, **delayq}):
        return next((line for line in run("delayq_check").out.splitlines() if "Redis contents" in line), "")


def test_a_worker_with_another_prefix_than_the_web_is_found_from_both_sides(
    start: Start, configure: Configure, redis_client: redis.Redis
) -> None:
    """Each message waits for the sweep, and both of them use a Redis that answers."""
    configure(PREFIX="web")
    worker = start(delayq={"PREFIX": "worker"})
    worker.wait_for("Loaded Redis")
    # Nothing is scheduled yet.
    assert "WARN" in redis_finding()
    assert "no worker fills it" in redis_finding()
    assert redis_finding(PREFIX="worker") == ""
    wait_until(schedule_message("t.tx"), State.CONSUMED)
    worker.wait_for("The sweep of queue default put 1 messages")
    found = eventually(lambda: redis_finding(PREFIX="worker"))
    assert "the sweep put messages that nobody had put here" in found
    assert "REDIS and PREFIX of the processes that schedule" in found


@pytest.mark.usefixtures("puts_are_flushed", "redis_has_time")
def test_a_redis_that_is_used_by_all_has_no_such_finding(
    start: Start, configure: Configure, redis_client: redis.Redis
) -> None:
    configure(GRACE=60.0)
    worker = start()
    worker.wait_for("Loaded Redis")
    wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert redis_finding() == ""


@pytest.mark.console
def test_a_redis_that_refuses_is_not_called_away(start: Start, configure: Configure, admin_client: Client) -> None:
    with RedisServer() as server, of(server) as client:
        client.config_set("requirepass", "secret")
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Redis answers, and cannot be used; .*Authentication required")
        eventually(Worker.objects.exists, "the worker has told the record of itself")
        assert re.search(r"^Redis .*: refuses \(AuthenticationError", run("delayq_stats").out, re.MULTILINE)
        page = admin_client.get("/admin/delayq_console/health/").content.decode()
        assert "refuses: AuthenticationError" in page
        now = admin_client.get("/admin/delayq_console/dashboard/").content.decode()
        assert "Redis cannot be used: messages are delivered from the database" in now
        for text in (worker.log, page, now, run("delayq_stats").out):
            assert "does not answer" not in text
            assert "Redis is away" not in text
