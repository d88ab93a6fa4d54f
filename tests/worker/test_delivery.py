"""Delivery by a worker process, from schedule_message() to the recorded outcome."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import Verdict, cancel_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from tests.app.handlers import digest_of
from tests.app.models import Effect
from tests.support.claims import needs_row_locks
from tests.support.processes import Gate, Start
from tests.support.record_of import (
    begun_per_message,
    effects_per_message,
    is_early,
    log_of,
    once_each,
    path_of,
    states,
    wait_until,
    wait_until_all,
)
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("timed_by")


def test_every_message_is_delivered_and_none_before_its_time(start: Start) -> None:
    start()
    messages = [schedule_message("t.tx", delay=timedelta(milliseconds=61 * n)) for n in range(25)]
    wait_until_all(State.CONSUMED, 25)
    assert effects_per_message() == once_each(messages)
    for message in messages:
        claim = log_of(message)[1]
        assert claim.to_state == State.RUNNING
        assert not is_early(claim)
        assert Effect.objects.get(message_id=message.pk).at >= message.due_at


def test_each_message_has_the_fate_that_its_handler_decides_and_the_log_tells(start: Start) -> None:
    late = schedule_message("t.effect", expires=0.01)
    eventually(lambda: timezone.now() > late.due_at + timedelta(seconds=0.02))
    second_time, never, never_tx, later, rejected = (
        schedule_message(topic) for topic in ("t.second_time", "t.fail", "t.fail_tx", "t.later", "t.reject")
    )
    with pytest.raises(RuntimeError), transaction.atomic():
        schedule_message("t.effect")
        raise RuntimeError
    with transaction.atomic():
        kept = schedule_message("t.effect")
    start()

    wait_until(second_time, State.CONSUMED)
    assert path_of(second_time) == ["scheduled", "running", "scheduled", "running", "consumed"]
    assert (second_time.attempts, second_time.deliveries, second_time.reported) == (1, 2, 2)
    first, failure, second = log_of(second_time)[1:4]
    assert failure.error == "RuntimeError: not yet"
    assert "handlers.py" in failure.traceback
    assert failure.due_at - first.at >= timedelta(seconds=0.05)
    assert not is_early(second)

    for message in (never, never_tx):
        wait_until(message, State.DEAD)
        assert (message.attempts, message.deliveries) == (3, 3)
        assert log_of(message)[-1].error == "RuntimeError: it never works"
    wait_until(later, State.CONSUMED)
    assert (later.attempts, later.deliveries) == (0, 3)
    wait_until(rejected, State.DEAD)
    assert (rejected.deliveries, log_of(rejected)[-1].error) == (1, "Reject: not wanted")
    wait_until(late, State.EXPIRED)
    wait_until(kept, State.CONSUMED)
    # A failed transactional handler leaves nothing behind, and a message whose transaction was rolled back is none.
    assert effects_per_message() == {second_time.pk: 1, never.pk: 3, later.pk: 1, kept.pk: 1}
    assert Message.objects.count() == 7


def test_a_cancelled_message_never_runs_and_a_rescheduled_one_runs_at_its_new_time(start: Start) -> None:
    start()
    cancelled = schedule_message("t.effect", delay=3)
    earlier = schedule_message("t.effect", delay=3600)
    later = schedule_message("t.effect", delay=3)
    assert cancel_message(cancelled).verdict == Verdict.CANCELLED
    assert reschedule_message(earlier, delay=0.1)
    assert reschedule_message(later, delay=3.5)
    wait_until(earlier, State.CONSUMED)
    wait_until(later, State.CONSUMED)
    assert not is_early(log_of(later)[2])
    assert Effect.objects.get(message_id=later.pk).at >= later.due_at
    assert effects_per_message() == once_each([earlier, later])
    cancelled.refresh_from_db()
    assert path_of(cancelled) == ["scheduled", "cancelled"]


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
def test_a_handler_that_stops_when_it_is_asked_to_ends_its_message_as_cancelled(
    start: Start, gate: Gate, transactional: bool
) -> None:
    if transactional:
        # On SQLite, the open transaction would keep the cancel from writing.
        needs_row_locks()
    start()
    for topic in ["t.stop_tx"] if transactional else ["t.stop", "t.stop_async"]:
        message = gate.running(topic)
        assert cancel_message(message).verdict == Verdict.REQUESTED
        wait_until(message, State.CANCELLED)
        assert (message.attempts, message.deliveries, message.error) == (0, 1, "")
        assert log_of(message)[-1].reason.startswith("cancel requested; ")
        assert cancel_message(message).verdict == Verdict.TOO_LATE
        assert Effect.objects.filter(message_id=message.pk).exists() != transactional


def test_the_payload_arrives_as_it_was_given(start: Start) -> None:
    payloads: list[Any] = [None, 0, "", [], {"a": ["ä", 1.5, None, True]}, "€" * 5000, "\\u0000", {"": {"": ""}}]
    messages = [schedule_message("t.echo", payload) for payload in payloads]
    start()
    wait_until_all(State.CONSUMED, len(payloads))
    notes = {effect.message_id: effect.note for effect in Effect.objects.all()}
    assert [notes[message.pk] for message in messages] == [digest_of(payload) for payload in payloads]


def test_many_scheduled_at_once_are_each_delivered_once(start: Start) -> None:
    messages = schedule_messages({"topic": "t.tx", "delay": 0.001 * n} for n in range(300))
    start("--processes", "2")
    wait_until_all(State.CONSUMED, 300)
    assert effects_per_message() == once_each(messages)
    assert begun_per_message() == once_each(messages)


# --- async handlers ---------------------------------------------------------------------------------------------------


MANY = 120


def schedule_many(gate: Gate) -> list[Message]:
    return schedule_messages([{"topic": "t.gate_async", "payload": gate.payload}] * MANY)


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


def test_handlers_that_block_the_loop_are_each_delivered_once(start: Start) -> None:
    """A loop that took on as many as it may would keep those behind them waiting for too long, and give them back."""
    messages = schedule_messages([{"topic": "t.block_async"}] * MANY)
    start("--threads", "2", "--processes", "1", "--async-concurrency", "60")
    wait_until_all(State.CONSUMED, len(messages))
    assert set(Message.objects.values_list("deliveries", flat=True)) == {1}
