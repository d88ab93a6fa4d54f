"""Killed workers lose no message, and a message that kills its worker does not take others with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now

from django_delayq import MessageDict, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import crashes
from tests.faults.program import freeze, wait_for_state
from tests.support.processes import Gate, Start
from tests.support.record_of import (
    effects_per_message,
    log_of,
    once_each,
    states,
    wait_until,
    wait_until_all,
)
from tests.support.rows import unguarded
from tests.support.workers import eventually

BOTH = pytest.mark.usefixtures("timed_by")


def wait_until_begun(gate: Gate, number: int) -> None:
    eventually(lambda: gate.how_many_began() == number, f"{number} handlers have begun")


@BOTH
def test_a_killed_child_is_replaced_and_its_claims_are_given_back_at_once(start: Start, gate: Gate) -> None:
    worker = start("--processes", "2", "--threads", "2")
    children = worker.wait_for_children(2)
    messages = [schedule_message("t.gate", gate.payload) for _ in range(4)]
    wait_until_begun(gate, 4)
    victim = children[0]
    lost = list(Message.objects.filter(worker__contains=f"/{victim}/"))
    assert lost
    os.kill(victim, signal.SIGKILL)
    worker.wait_for("died .killed by signal 9")
    worker.wait_for_children(2, other_than=[victim])
    for message in lost:
        eventually(partial(gate.begun, message.pk, 2), "it begins again")
        end = Transition.objects.get(message=message, number=3)
        # Another reason would say that its lease ran out.
        assert (end.to_state, end.reason) == (State.SCHEDULED, "worker process died")
    gate.open()
    wait_until_all(State.CONSUMED, 4)
    assert effects_per_message() == once_each(messages)


@BOTH
@pytest.mark.usefixtures("quick_take_over")
def test_after_a_power_cut_everything_is_delivered_again_when_the_leases_have_run_out(
    start: Start, configure: Callable[..., None], gate: Gate
) -> None:
    configure(LEASE=1)
    dying = start("--threads", "4")
    begun = [schedule_message("t.gate", gate.payload) for _ in range(3)]
    # On SQLite, an open transaction would keep all others from writing.
    within = [schedule_message("t.short_lease_tx", gate.payload)] if connection.vendor == "postgresql" else []
    wait_until_begun(gate, len([*begun, *within]))
    waiting = [schedule_message("t.tx") for _ in range(10)]
    dying.kill()
    # The second deliveries keep their leases, however slow the machine is.
    unguarded(Message).update(lease=60.0)
    gate.open()
    start()
    wait_until_all(State.CONSUMED, len([*begun, *within, *waiting]))
    assert effects_per_message() == once_each([*begun, *within, *waiting])
    for message in [*begun, *within]:
        end = log_of(message)[2]
        assert (end.reason, end.from_state) == ("lease ran out", State.RUNNING)
        assert message.deliveries == 0  # as it was scheduled
        message.refresh_from_db()
        assert (message.deliveries, message.attempts) == (2, 0)


def test_the_effects_of_a_transaction_cut_off_by_a_kill_happen_once(start: Start) -> None:
    start()
    messages = [schedule_message("t.kill_after_effect") for _ in range(3)]
    wait_until_all(State.CONSUMED, 3)
    assert effects_per_message() == once_each(messages)


def test_poison_dies_with_a_reason_and_what_dies_with_it_again_and_again_does_not(start: Start) -> None:
    innocent: list[MessageDict] = [{"topic": "t.sleep", "payload": {"seconds": 0.5}} for _ in range(6)]
    deadly: MessageDict = {"topic": "t.kill"}
    schedule_messages([deadly, *innocent, deadly])
    start("--threads", "10")
    eventually(lambda: states() == {State.CONSUMED: 6, State.DEAD: 2}, "each is what it is")
    for message in Message.objects.filter(state=State.DEAD):
        # Somebody else may have sent the signals: it takes the two crashes of a suspect, and three more.
        assert message.crashes == 5
        assert log_of(message)[-1].reason == "worker process died; it ran alone; 5 deliveries crashed"


@BOTH
def test_a_message_runs_alone_in_one_process_at_a_time_while_the_others_deliver(start: Start, gate: Gate) -> None:
    suspects = [schedule_message("t.gate", gate.payload) for _ in range(2)]
    # As if two deliveries of each had crashed.
    unguarded(Message).update(deliveries=2)
    worker = start("--processes", "2", "--threads", "2")
    put_off = Transition.objects.filter(reason="is to run alone", due_at__gt=F("at"))
    eventually(put_off.exists, "one makes way for the other")
    wait_until_begun(gate, 1)
    plain = schedule_message("t.effect")
    wait_until(plain, State.CONSUMED)
    # The other one is claimed again and again, and put off.
    running = Message.objects.get(state=State.RUNNING, worker__endswith=crashes.ALONE)
    assert running.pk != put_off[0].message_id
    # The right of a message to run alone ends with the process that runs it.
    os.kill(int(running.worker.split("/")[1]), signal.SIGKILL)
    worker.wait_for("it ran alone")
    # Either may be the next.
    wait_until_begun(gate, 2)
    gate.open()
    # One kill from outside is no evidence: it runs alone again.
    wait_until_all(State.CONSUMED, 3)
    assert worker.count("runs alone in its process, because") >= len(suspects) + 1


@pytest.mark.usefixtures("quick_take_over")
def test_harmless_messages_survive_any_number_of_killed_workers(
    start: Start, configure: Callable[..., None], gate: Gate
) -> None:
    """The whole worker dies with all that it runs; the next one still runs as many as it has threads."""
    configure(LEASE=1)
    schedule_messages([{"topic": "t.gate", "payload": gate.payload}] * 8)
    running = Message.objects.filter(state=State.RUNNING, leased_until__gt=Now())
    for number in range(8, 56, 8):
        worker = start("--threads", "8")
        wait_until_begun(gate, number)
        worker.kill()
        eventually(lambda: not running.exists(), "their leases have run out")
    start("--threads", "8")
    gate.open()
    wait_until_all(State.CONSUMED, 8)


def test_harmless_messages_survive_a_process_that_is_killed_from_outside(
    start: Start, gate: Gate, set_pace: Callable[[dict[str, float]], None]
) -> None:
    """They become suspects and run alone, and die there too, but not often enough to be taken for poison."""
    # No process takes the place of another one that lives, however late that is killed.
    set_pace({"supervisor.USUAL.replaced_after": 90.0})
    messages = [schedule_message("t.gate", gate.payload) for _ in range(3)]
    worker = start("--threads", "8")
    killed: list[int] = []
    for number in (3, 6, 7, 8, 9):
        wait_until_begun(gate, number)
        # The process that has released the claims of the last victim ends by itself.
        victims = worker.wait_for_children(1, other_than=killed)
        os.kill(victims[0], signal.SIGKILL)
        killed += victims
    gate.open()
    wait_until_all(State.CONSUMED, 3)
    for message in messages:
        message.refresh_from_db()
        assert 2 <= message.crashes <= 4


def test_the_death_of_all_processes_at_once_accuses_nobody(start: Start, gate: Gate) -> None:
    messages = [schedule_message("t.gate", gate.payload) for _ in range(4)]
    worker = start("--processes", "2", "--threads", "2")
    children = worker.wait_for_children(2)
    wait_until_begun(gate, 4)
    # The supervisor finds both dead when it wakes up.
    freeze(worker.pid)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        wait_for_state(child, "Z")
    worker.send(signal.SIGCONT)
    wait_until_begun(gate, 8)
    gate.open()
    wait_until_all(State.CONSUMED, 4)
    for message in messages:
        message.refresh_from_db()
        assert (message.deliveries, message.crashes) == (2, 0)


def test_a_message_that_runs_alone_for_long_keeps_no_other_waiting(start: Start, gate: Gate) -> None:
    """Another process takes the place of the one in which it runs, and that one ends with it."""
    suspect = schedule_message("t.gate", gate.payload)
    unguarded(Message).update(deliveries=2)
    worker = start("--threads", "2")
    wait_until_begun(gate, 1)
    first = int(Message.objects.get(pk=suspect.pk).worker.split("/")[1])
    wait_until(schedule_message("t.effect"), State.CONSUMED)
    assert Message.objects.get(pk=suspect.pk).state == State.RUNNING
    assert len(worker.children) == 2
    gate.open()
    wait_until(suspect, State.CONSUMED)
    worker.wait_for_children(1, other_than=[first])
    assert worker.count("died") == 0
    wait_until(schedule_message("t.effect"), State.CONSUMED)


def test_the_claims_of_a_namesake_are_not_given_back(start: Start, gate: Gate) -> None:
    """Two workers with the same --worker-name: the death of a child of one says nothing of the other's."""
    first, second = (start("--worker-name", "twin", "--threads", "1") for _ in range(2))
    messages = [schedule_message("t.gate", gate.payload) for _ in range(2)]
    wait_until_begun(gate, 2)
    os.kill(first.children[0], signal.SIGKILL)
    first.wait_for("died")
    wait_until_begun(gate, 3)
    gate.open()
    wait_until_all(State.CONSUMED, 2)
    assert sorted(m.deliveries for m in Message.objects.filter(pk__in=[m.pk for m in messages])) == [1, 2]
    assert second.count("died") == 0
    assert crashes.release_worker("default", "twin", actor="test", shutdown=True) == []
