"""Several threads fill, take from and flush Redis at once: the record lets each message start once."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import cancel_message, reschedule_message, schedule_messages
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import conf
from django_delayq.record import transitions
from django_delayq.restore import reading
from tests.settings import REDIS_SERVER
from tests.support.together import Together

QUEUE = "default"


@pytest.fixture
def brokers(together: Together, settings: Any) -> Any:
    """Return clients of one loaded Redis."""
    assert REDIS_SERVER is not None
    there = [RedisBroker(conf.Settings(REDIS=REDIS_SERVER.url), "default", timeout=5.0) for _ in range(6)]
    there[0].load(ahead=600, worker="test", lease=10, identity="test", server=there[0].server(), lost=False)
    yield there
    for broker in there:
        broker.close()


class Delivering:
    """Take and claim as consumers do, until told to end and nothing is left."""

    def __init__(self) -> None:
        self.claimed: Counter[int] = Counter()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def run(self, broker: RedisBroker) -> None:
        while True:
            over = self.over.is_set()
            taken = broker.take(QUEUE, 7)
            rows = transitions.claim("default", taken.tickets, {"t.ok": 60.0}, "w")
            with self._lock:
                self.claimed.update(row.id for row in rows)
            if over and not taken.tickets:
                return


def fill(broker: RedisBroker) -> None:
    for batch in reading.merged("default", [QUEUE], end=timezone.now() + timedelta(minutes=10)):
        broker.fill(batch.by_queue)


def due(number: int) -> list[Message]:
    past = timezone.now() - timedelta(seconds=1)
    return schedule_messages({"topic": "t.ok", "due_at": past} for _ in range(number))


def test_two_fills_against_two_consumers_start_each_message_once(
    together: Together, brokers: list[RedisBroker]
) -> None:
    for _ in range(10):
        messages = due(100)
        delivering = Delivering()

        def fill_and_end(broker: RedisBroker, barrier: threading.Barrier, end: threading.Event) -> None:
            fill(broker)
            if barrier.wait(60) == 0:
                end.set()

        barrier = threading.Barrier(2)
        answers = together(
            *[lambda b=b, k=barrier, e=delivering.over: fill_and_end(b, k, e) for b in brokers[:2]],
            *[lambda b=b, d=delivering: d.run(b) for b in brokers[2:4]],
        )
        assert answers == [None] * 4
        assert delivering.claimed == Counter({message.pk: 1 for message in messages})
        Message._base_manager.all().delete()


def test_fills_against_cancels_and_reschedules_start_no_wrong_message(
    together: Together, brokers: list[RedisBroker]
) -> None:
    for _ in range(10):
        messages = due(30)
        cancelled, moved, left = messages[:10], messages[10:20], messages[20:]
        delivering = Delivering()

        def steer(c: list[Message], m: list[Message], end: threading.Event) -> list[bool]:
            answers = [bool(reschedule_message(one, delay=3600)) for one in m]
            verdicts = [str(cancel_message(one)) == "cancelled" for one in c]
            end.set()
            return [*verdicts, *answers]

        steered, *others = together(
            lambda c=cancelled, m=moved, d=delivering: steer(c, m, d.over),
            *[lambda b=b: fill(b) for b in brokers[:2]],
            *[lambda b=b, d=delivering: d.run(b) for b in brokers[2:4]],
        )
        assert others == [None] * 4
        for message, won in zip([*cancelled, *moved], steered, strict=True):
            assert (message.pk in delivering.claimed) != won
        # The ids that the last fill put after the consumers had gone.
        delivering.run(brokers[0])
        assert set(delivering.claimed.values()) <= {1}
        assert {message.pk for message in left} <= set(delivering.claimed)
        for message in Message.objects.filter(state=State.CANCELLED):
            assert message.deliveries == 0
        Message._base_manager.all().delete()
