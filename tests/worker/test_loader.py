"""The loaders of two processes on one Redis: when they load, and what they tell."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from testproject.servers import RedisServer
from tests.support.claims import DB
from tests.support.commands import held, schedule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


@pytest.fixture
def loaders(redis_client: redis.Redis) -> Iterator[tuple[Loader, Loader]]:
    brokers = BrokerSwitch(DB, dict)
    tuning = UpkeepTuning()
    yield Loader(DB, brokers, "host/1", tuning), Loader(DB, brokers, "host/2", tuning)
    brokers.close()


@pytest.mark.parametrize("how", ["emptied", "restarted"])
def test_each_loss_is_told_and_mended_by_one_of_two_processes(
    loaders: tuple[Loader, Loader],
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    caplog.set_level(logging.INFO, "django_delayq")
    client = loaders[0].broker.client

    def look() -> None:
        # Each process counts at every other look.
        for loader in (*loaders, *reversed(loaders)):
            loader.tick()

    def snapshot() -> dict[bytes, Any]:
        return {key: client.dump(key) for key in client.scan_iter()}

    messages = [*schedule(1)]
    look()
    oldest = snapshot()
    messages += schedule(1)
    look()
    if how == "restarted":
        redis_server.restart()
        # Other threads of the process have seen it, and the loader has not.
        client.connection_pool.disconnect()
    else:
        client.flushall()
    look()
    # Five seconds later.
    loaders[0].tuning.identity_interval = 0.0
    look()
    assert caplog.text.count("Redis lost its ids (it is empty)") == 1
    for losses, former in enumerate((oldest, snapshot()), start=2):
        messages += schedule(1)
        look()
        client.flushall()
        for key, value in former.items():
            client.restore(key, 0, value)
        look()
        assert held().keys() == set(messages)
        assert caplog.text.count("Redis lost its ids") == losses
        assert caplog.text.count("Loaded Redis from the record") == 1 + losses


def test_a_process_warns_once_of_a_redis_that_evicts(
    loaders: tuple[Loader, Loader], caplog: pytest.LogCaptureFixture
) -> None:
    loader, client = loaders[0], loaders[0].broker.client
    loader.tuning.identity_interval = 0.0
    loader.tick()
    assert "evict" not in caplog.text
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for _look in range(3):
            loader.tick()
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    (warning,) = [record for record in caplog.records if "evict" in record.getMessage()]
    assert (warning.levelname, warning.getMessage().split()[-1]) == ("WARNING", "allkeys-lru")


def test_a_load_that_a_process_asks_for_is_told_as_no_loss(
    loaders: tuple[Loader, Loader], caplog: pytest.LogCaptureFixture
) -> None:
    loaders[0].tick()
    loaders[0].broker.request_load()
    for loader in loaders:
        loader.tick()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == "Redis was out of reach for a process; it is loaded again from the record"
