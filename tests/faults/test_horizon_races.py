"""Producers leave out what is due beyond the horizon, while a loader moves it: no message is in neither."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connections
from django.utils import timezone

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker import publisher
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import from_tenths
from django_delayq.inspector.consistency import ConsistencyCheck, Mismatch
from django_delayq.models import Message
from django_delayq.record.reads import identity
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = keys("delayq", "default")
# The shortest horizon that the settings allow. Seconds.
HORIZON = 5.0
# Clocks differ by less here, where all servers run on one host. Seconds.
MARGIN = 0.05


@pytest.fixture
def loader(
    settings: Any, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis, redis_has_time: None
) -> Iterator[Loader]:
    """The loader of a worker, which looks often."""
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": HORIZON}
    monkeypatch.setattr(publisher, "usual", replace(publisher.usual, clock_margin=MARGIN))
    publisher.get.cache_clear()
    brokers = BrokerSwitch("default", dict)
    yield Loader("default", brokers, "racing")
    brokers.close()


def in_thread(work: Callable[[], object], over: threading.Event) -> threading.Thread:
    def run() -> None:
        try:
            while not over.is_set():
                work()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_no_message_around_the_horizon_is_left_out_by_all(loader: Loader, redis_client: redis.Redis) -> None:
    loader.tick()
    rounds = 3
    first = loader.broker.read_meta().horizon_tenths
    assert first is not None
    over = threading.Event()

    def load() -> None:
        loader.tick()
        time.sleep(0.02)

    def schedule() -> None:
        # Around the place where a loader sets the next horizon, and where it has set the last one.
        near = HORIZON + random.uniform(-0.5, 3 * MARGIN)
        schedule_message("t.ok", due_at=timezone.now() + timedelta(seconds=near))
        schedule_messages({"topic": "t.ok", "delay": HORIZON + random.uniform(-3.0, 1.0)} for _ in range(3))

    threads = [in_thread(load, over), *(in_thread(schedule, over) for _ in range(2))]
    horizons = {first}
    try:
        deadline = time.monotonic() + PATIENCE
        while len(horizons) <= rounds and time.monotonic() < deadline:
            horizons.add(int(redis_client.hget(KEYS.meta, "horizon") or 0))
            time.sleep(0.01)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert len(horizons) > rounds
    there = publisher.get("default")
    assert there is not None
    there.broker.close()
    publisher.get.cache_clear()
    meta = loader.broker.read_meta()
    assert meta.loaded_tenths == meta.horizon_tenths
    found = ConsistencyCheck("default", loader.broker, "default", pause=0.0).run()
    assert found.compared > 100
    assert found.counts[Mismatch.MISSING] == 0, found.examples
    assert meta.horizon_tenths is not None
    assert Message.objects.filter(due_at__gt=from_tenths(meta.horizon_tenths)).exists()


@pytest.mark.parametrize("before", [3600.0, 60.0])
def test_a_horizon_that_was_farther_away_under_another_setting_is_loaded_anew(
    loader: Loader, redis_client: redis.Redis, before: float
) -> None:
    """A producer with the nearer HORIZON leaves out what the farther one had covered."""
    broker = RedisBroker(loader.broker.settings, "default", timeout=2.0)
    begun = broker.load(
        ahead=before,
        worker="old",
        lease=10.0,
        identity=identity("default"),
        server=broker.server(),
        lost=False,
    )
    assert begun is not None
    assert broker.loaded(worker="old", upto_tenths=begun[1], lease=None)
    broker.close()
    between = schedule_message("t.ok", delay=HORIZON + 1.0)
    assert redis_client.zcard(KEYS.delayed) == 0
    loader.tick()
    meta = loader.broker.read_meta()
    assert meta.horizon_tenths is not None
    assert meta.horizon_tenths < meta.now_tenths + (HORIZON + 1) * 10_000

    def is_loaded() -> bool:
        loader.tick()
        return redis_client.zscore(KEYS.delayed, str(between.pk)) is not None

    eventually(is_loaded, "the loader brings it before it is due")
    assert Message.objects.get().due_at > timezone.now()
