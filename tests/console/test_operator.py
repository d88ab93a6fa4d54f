"""Operations in real workers are completed even when a worker is killed or replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction

from django_delayq import schedule_message, schedule_messages
from django_delayq.console.console_tuning import tuning
from django_delayq.console.models import Operation, OperationState
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import reads
from tests.console.admin import samples
from tests.support.processes import Start
from tests.support.record_of import states
from tests.support.transactions import waits_for_a_lock
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = "default"
MANY = tuning.step_messages + 100


def scheduled() -> list[int]:
    return [m.pk for m in schedule_messages([{"topic": "t.none", "delay": "1h"}] * MANY)]


def started() -> Operation:
    ids = tuple(Message.objects.filter(state=State.SCHEDULED).order_by("pk").values_list("pk", flat=True))
    return samples.operation("cancel", *ids)


def fresh(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def is_done(operation: Operation) -> bool:
    return fresh(operation).state == OperationState.DONE


@contextmanager
def stuck_in_the_second_step(ids: list[int], operation: Operation) -> Iterator[None]:
    """Hold a worker in its second step: it waits for a row that this test has locked."""
    with transaction.atomic():
        list(Message.objects.select_for_update().filter(pk=ids[-1]))
        eventually(
            lambda: fresh(operation).done == tuning.step_messages and waits_for_a_lock(), "the wait in the second batch"
        )
        yield


def test_two_workers_do_each_message_once(start: Start) -> None:
    scheduled()
    first, second = started(), started()
    for _number in range(2):
        start("--roles", "operator")
    eventually(lambda: is_done(first) and is_done(second), "both operations")
    # Both want the same messages: one that the first has cancelled is too late for the second, or not found by it.
    outcomes = Counter(fresh(first).outcomes) + Counter(fresh(second).outcomes)
    assert outcomes["cancelled"] == MANY
    assert set(outcomes) <= {"cancelled", "too late"}
    assert Transition.objects.filter(to_state=State.CANCELLED).count() == MANY


def test_a_worker_without_the_role_leaves_operations_queued(start: Start) -> None:
    scheduled()
    operation = started()
    sign = schedule_message("t.none", delay=0, expires="1ms")
    worker = start("--roles", "reaper")
    eventually(lambda: Message.objects.get(pk=sign.pk).state == State.EXPIRED, "the work of another role")
    assert worker.stop() == 0
    assert fresh(operation).state == OperationState.QUEUED


@pytest.mark.postgresql("needs locks of rows")
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped in order"])
def test_an_operation_whose_worker_ends_is_finished_by_another(start: Start, is_killed: bool) -> None:
    ids = scheduled()
    operation = started()
    worker = start("--roles", "operator")
    with stuck_in_the_second_step(ids, operation):
        (worker.kill if is_killed else worker.stop)()
        left = fresh(operation)
    assert (left.done, left.state) == (tuning.step_messages, "running" if is_killed else "queued")
    if is_killed:
        # The lease of the killed worker runs out. One that stops in order has released it.
        Operation.objects.update(leased_until=reads.now(DB) - timedelta(seconds=1))
    start("--roles", "operator")
    eventually(lambda: is_done(operation), "the rest")
    now = fresh(operation)
    assert (now.done, now.outcomes, now.worker) == (MANY, {"cancelled": MANY}, "")
    assert states() == {State.CANCELLED: MANY}
    moves = Transition.objects.filter(to_state=State.CANCELLED).values_list("actor", flat=True)
    assert Counter(moves) == {"user:anna": MANY}
