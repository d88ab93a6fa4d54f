"""Runs functions as handlers, as a worker does, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg
from django.db import connection

from django_delayq import handler, schedule_message
from django_delayq.core.outcomes import Outcome
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run import executor
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.pool import Pool
from django_delayq.worker.run.recorder import Recorder
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from tests.support.claims import claimed
from tests.support.rows import unguarded

if TYPE_CHECKING:
    from django_delayq.broker.redis import RedisBroker

TOPIC = "integration.worker"


def delivery_to(function: Callable[[Any], Any], **terms: Any) -> Delivery:
    """Register a function as the handler, and claim a message for it."""
    registry.unregister(TOPIC)
    handler(TOPIC, **terms)(function)
    (delivery,) = claimed(TOPIC)
    return delivery


def execute(delivery: Delivery) -> Outcome:
    return executor.execute(delivery, "worker:w")


def run(function: Callable[[Any], Any], **terms: Any) -> Outcome:
    """Run a function for one message, and return the outcome."""
    return execute(delivery_to(function, **terms))


def recorded(recorder: Recorder, function: Callable[[Any], Any], **terms: Any) -> Message:
    """Run a function for one message, have the recorder write its outcome, and return the message."""
    delivery = delivery_to(function, **terms)
    recorder.submit(delivery, execute(delivery), "worker:w")
    assert recorder.flush(60)
    return Message.objects.get(pk=delivery.id)


def returns(value: object) -> Callable[[Any], object]:
    """Return a handler that returns this."""
    return lambda message: value


def raises(error: BaseException) -> Callable[[Any], None]:
    """Return a handler that raises this."""

    def fail(message: Delivery) -> None:
        raise error

    return fail


def cut() -> None:
    """End the server process of this thread's connection, which the driver does not notice yet."""
    with psycopg.connect(os.environ["DATABASE_URL"], dbname=connection.settings_dict["NAME"], autocommit=True) as other:
        pid = connection.connection.info.backend_pid
        assert other.execute("SELECT pg_terminate_backend(%s, 60000)", [pid]).fetchone() == (True,)


def redis_of(brokers: BrokerSwitch) -> RedisBroker:
    """Return the broker of Redis that a worker uses, for tests that look into Redis."""
    return cast("RedisBroker", brokers.redis)


def turn(parts: Parts) -> None:
    """Make turns of a worker until it would wait for something."""
    while parts.consumer.run_round() == 0:
        pass


def held(parts: Parts) -> list[int]:
    """Return the ids of the messages that a worker holds."""
    return [delivery.id for delivery in parts.pool.held()]


def suspect(topic: str = "t.ok") -> Message:
    """Schedule a message that is to run alone, because it has crashed twice."""
    message = schedule_message(topic)
    unguarded(Message).filter(pk=message.pk).update(deliveries=2)
    return message


@contextmanager
def running(*threads: Pool | Consumer) -> Iterator[None]:
    """Have threads of a worker run until the block ends."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.stop()
            if isinstance(thread, Consumer):
                thread.join()
