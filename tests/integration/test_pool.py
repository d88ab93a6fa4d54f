"""The threads that run handlers, and the deliveries that wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from django_delayq import signals
from django_delayq.models import Message
from django_delayq.outcomes import Ack
from django_delayq.states import State
from django_delayq.worker import timeouts
from django_delayq.worker.assembly import Parts
from django_delayq.worker.budget import Budget
from django_delayq.worker.timeouts import TimeoutWatch
from tests.integration.claims import claimed, state
from tests.integration.conftest import Assemble
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_handler_whose_lease_ran_out_just_before_it_began_does_not_run(parts: Parts) -> None:
    """The process froze after everything else was checked."""
    (one,) = claimed("t.ok")
    pool = parts.pool

    def freeze(**facts: Any) -> None:
        one.leased_mono -= one.handler.lease + 1

    signals.message_delivered.connect(freeze)
    try:
        pool.start()
        pool.submit([one])
        eventually(lambda: state(one) != State.RUNNING, "the end of the delivery")
    finally:
        signals.message_delivered.disconnect(freeze)
        pool.stop()
    last = Message.objects.get(pk=one.id).transitions.last()
    assert last is not None
    assert (state(one), last.reason) == (State.SCHEDULED, "lease ran out before it began")


class Rude(BaseException):
    """Nobody catches it."""


@pytest.fixture
def rude_receiver() -> Iterator[list[str]]:
    calls: list[str] = []

    def receiver(**facts: Any) -> None:
        calls.append("called")
        raise Rude

    for signal in (signals.message_delivered, signals.message_succeeded):
        signal.connect(receiver)
    yield calls
    for signal in (signals.message_delivered, signals.message_succeeded):
        signal.disconnect(receiver)


def test_a_receiver_that_raises_anything_ends_no_thread(parts: Parts, rude_receiver: list[str]) -> None:
    (one, other) = claimed("t.ok", "t.ok")
    pool, recorder = parts.pool, parts.recorder
    pool.start()
    pool.submit([one])
    assert pool.wait_idle(60)
    assert recorder.flush(60)
    recorder.submit(other, Ack(), "worker:w")
    assert recorder.flush(60)
    assert rude_receiver == ["called", "called"]
    assert (state(one), state(other)) == (State.SCHEDULED, State.CONSUMED)
    assert recorder.is_alive()
    assert all(member.is_alive() for member in pool.members)
    pool.stop()


@pytest.mark.parametrize("threads", [1, 8, 20, 100])
def test_no_delivery_is_queued_before_handlers_are_known_to_be_quick(assembled: Assemble, threads: int) -> None:
    assert assembled(threads).pool.threads.size == threads


def test_deliveries_queued_behind_a_handler_that_turned_out_slow_are_released(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LONGEST_QUEUED", 60.0)
    first, *others = claimed("t.ok", "t.ok", "t.ok")
    budget = Budget(3)
    budget.commit(budget.reserve(3), 3)
    parts = assembled(budget=budget)
    pool, recorder = parts.pool, parts.recorder
    pool.threads._mean.seconds = 0.0001
    room = pool.threads.size
    pool.submit([first, *others])
    # As if a thread had it.
    assert pool.threads._queue.get_nowait() is first
    first.started_mono = time.monotonic()
    TimeoutWatch(pool, lambda deliveries: None).tick()
    assert len(pool.held()) == 3
    for delivery in others:
        delivery.queued_mono -= 60.1
        delivery.due_mono -= 60.1
    TimeoutWatch(pool, lambda deliveries: None).tick()
    assert pool.held() == [first]
    assert recorder.flush(5)
    assert [state(delivery) for delivery in (first, *others)] == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]
    assert room > 2
    assert pool.threads.size == 1
    assert budget.reserve(3) == 2
