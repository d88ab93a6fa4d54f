"""Async handlers in a worker process: many at once, beside sync ones, and through the death and the end of it."""

from __future__ import annotations

import os
import signal

import pytest

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, once_each, states, wait_until, wait_until_all
from tests.support.workers import eventually

MANY = 120


def schedule_many(gate: Gate) -> list[Message]:
    return schedule_messages([{"topic": "t.gate_async", "payload": gate.payload}] * MANY)


@pytest.mark.usefixtures("timed_by")
def test_all_async_handlers_of_a_killed_process_run_again_and_take_effect_once(start: Start, gate: Gate) -> None:
    worker = start("--threads", "1", "--async-concurrency", str(MANY))
    (victim,) = worker.wait_for_children(1)
    messages = schedule_many(gate)
    eventually(lambda: gate.how_many_began() == MANY, "all begin")
    # A handler that takes long on the only thread does not hold them up, and they do not hold up that one.
    between = schedule_message("t.gate", gate.payload)
    eventually(lambda: gate.begun(between.pk), "the sync handler begins beside them")
    os.kill(victim, signal.SIGKILL)
    worker.wait_for_children(1, other_than=[victim])
    eventually(lambda: gate.how_many_began() == 2 * (MANY + 1), "all begin again")
    ends = Transition.objects.filter(number=3)
    assert set(ends.values_list("to_state", "reason")) == {(State.SCHEDULED, "worker process died")}
    assert len(ends) == MANY + 1
    gate.open()
    wait_until_all(State.CONSUMED, MANY + 1)
    assert effects_per_message() == once_each([*messages, between])
    assert set(Message.objects.values_list("deliveries", flat=True)) == {2}


def test_async_handlers_end_with_their_worker_or_when_somebody_cancels(start: Start, gate: Gate) -> None:
    worker = start("--async-concurrency", str(MANY), "--graceful-timeout", "0.5s")
    messages = schedule_many(gate)
    eventually(lambda: gate.how_many_began() == MANY, "all begin")
    cancel_message(messages[0])
    wait_until(messages[0], State.CANCELLED)
    assert worker.stop() == 0
    assert states() == {State.SCHEDULED: MANY - 1, State.CANCELLED: 1}
    last = Transition.objects.filter(message__state=State.SCHEDULED, number=3)
    assert set(last.values_list("reason", flat=True)) == {"shutdown"}
    assert set(Message.objects.values_list("attempts", flat=True)) == {0}


@pytest.mark.usefixtures("timed_by")
def test_handlers_that_block_the_loop_are_each_delivered_once(start: Start) -> None:
    """A loop that took on as many as it may would keep those behind them waiting for too long, and give them back."""
    messages = schedule_messages([{"topic": "t.block_async"}] * MANY)
    start("--threads", "2", "--processes", "1", "--async-concurrency", "60")
    wait_until_all(State.CONSUMED, len(messages))
    assert set(Message.objects.values_list("deliveries", flat=True)) == {1}
