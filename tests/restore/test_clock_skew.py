"""Clocks differ: the record's decides, and what a process knows of it is corrected.

A process is wrong about the record's clock after that was set; here it has learned from an answer that shows the wrong
time. What a Redis with a wrong clock does is in ``tests/faults/test_clock_skew.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import OperationalError

from django_delayq import schedule_message
from django_delayq.broker import RedisBroker, index, publisher
from django_delayq.broker.base import Entry
from django_delayq.core.clock import SECOND, to_tenths
from django_delayq.core.known_record import CLOCK_OFF, record_clock
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads, transitions
from django_delayq.record.sql import statements
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.upkeep.heartbeat import Heartbeat
from django_delayq.worker.upkeep.loader import Loader
from tests.support.assembled import Assemble
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB, QUEUE = "default", "default"
HOUR = 3600.0


class Worker:
    """A worker process, assembled but not running, with the Redis that it uses."""

    def __init__(self, parts: Parts) -> None:
        assert parts.brokers.redis is not None
        self.broker: RedisBroker = parts.brokers.redis
        self.consumer = parts.consumer
        self.loader = Loader(DB, parts.brokers, "w")
        self.heartbeat = Heartbeat(DB, "w", lambda: (QUEUE,), 1, ())

    def put(self, message: Message) -> None:
        """Put a message once more, after Redis has taken the put of the call that wrote it."""
        told = publisher.get(DB)
        assert told is not None
        # Redis reads two connections in any order: the earlier put could come last.
        told.broker.flush()
        self.broker.put(message.queue, [Entry.at(message.pk, message.due_at, message.priority)])

    def due_there(self, message: Message) -> int | None:
        """Return the due tenth at which the message waits in Redis."""
        return self.broker.locations(message.queue, [message.pk])[0].delayed_tenths


@pytest.fixture
def worker(redis_client: redis.Redis, assembled: Assemble) -> Iterator[Worker]:
    yield Worker(assembled(threads=10))
    record_clock.cache_clear()


def be_wrong(ahead: float) -> None:
    """Have this process take the record's clock for so many seconds ahead (negative: behind) of the truth."""
    asked = time.monotonic()
    record_clock(DB).learn(asked, reads.now(DB) + timedelta(seconds=ahead))


def error() -> float:
    """Return by how many seconds this process takes the record's clock for ahead of the truth, or nearly."""
    known = record_clock(DB).seconds()
    return known - reads.now(DB).timestamp()


def state(message: Message) -> State:
    return State(Message.objects.get(pk=message.pk).state)


def test_a_process_ahead_of_the_record_claims_nothing_early_and_learns_the_time(worker: Worker) -> None:
    worker.loader.tick()
    message = schedule_message("t.ok", delay="5m")
    be_wrong(HOUR)
    worker.put(message)
    assert worker.broker.locations(QUEUE, [message.pk])[0].ready_tenths is not None
    worker.consumer.run_round()
    assert state(message) == State.SCHEDULED
    assert worker.due_there(message) == to_tenths(message.due_at)
    assert abs(error()) < HOUR / 2
    assert worker.broker.take(QUEUE, 10).tickets == []


def test_a_process_behind_the_record_learns_the_time_from_its_heartbeat(worker: Worker) -> None:
    worker.loader.tick()
    message = schedule_message("t.ok")
    worker.put(message)
    be_wrong(-HOUR)
    worker.consumer.run_round()
    assert state(message) == State.SCHEDULED
    worker.heartbeat.tick()

    def begins() -> bool:
        worker.consumer.run_round()
        return state(message) == State.RUNNING

    eventually(begins, "it is claimed")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_call_and_a_claim_teach_the_time(worker: Worker, ahead: float) -> None:
    worker.loader.tick()
    be_wrong(ahead)
    message = schedule_message("t.ok")
    assert abs(record_clock(DB).seconds() - time.time()) < HOUR / 2
    worker.put(message)
    be_wrong(ahead)
    ticket = worker.broker.take(QUEUE, 10).tickets or statements(DB).due(QUEUE, ["t.ok"], 1)
    assert transitions.claim(DB, ticket, {"t.ok": 60.0}, "w")
    assert abs(record_clock(DB).seconds() - time.time()) < HOUR / 2


def test_a_worker_that_is_not_sure_of_the_time_asks_and_a_publisher_does_not(worker: Worker) -> None:
    asking, publishing = index(DB), index(DB, identity=lambda: "")
    assert asking is not None
    assert publishing is not None
    record_clock.cache_clear()
    assert not record_clock(DB).is_sure
    publishing.now_tenths()
    assert not record_clock(DB).is_sure
    asked = asking.now_tenths()
    assert record_clock(DB).is_sure
    assert abs(asked - to_tenths(reads.now(DB))) < CLOCK_OFF * SECOND
    asking.close()
    publishing.close()


def test_a_loader_goes_on_while_the_database_is_away(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(using: str) -> Any:
        raise OperationalError

    worker.loader.tick()
    monkeypatch.setattr(reads, "now", fail)
    record_clock.cache_clear()
    before = worker.broker.read_meta().tick
    # Every other check counts.
    worker.loader.tick()
    worker.loader.tick()
    assert worker.broker.read_meta().tick > before
