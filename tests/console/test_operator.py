"""Operations in real workers are completed even when a worker is killed or replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction

from django_delayq import schedule_message, schedule_messages
from django_delayq.console.models import Operation, OperationState
from django_delayq.console.operations.work import MESSAGES_PER_STEP
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from tests.console.admin import samples
from tests.support.processes import Start
from tests.support.transactions import waits_for_a_lock
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = "default"
MANY = MESSAGES_PER_STEP + 100


def scheduled() -> list[int]:
    return [m.pk for m in schedule_messages([{"topic": "t.none", "delay": "1h"}] * MANY)]


def started() -> Operation:
    ids = tuple(Message.objects.filter(state=State.SCHEDULED).order_by("pk").values_list("pk", flat=True))
    return samples.operation("cancel", *ids)


def fresh(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def is_done(operation: Operation) -> bool:
    return fresh(operation).state == OperationState.DONE


def all_is_well(operation: Operation) -> None:
    now = fresh(operation)
    assert (now.done, now.outcomes, now.worker) == (MANY, {"cancelled": MANY}, "")
    assert Counter(Message.objects.values_list("state", flat=True)) == {State.CANCELLED.value: MANY}
    moves = Transition.objects.filter(to_state=State.CANCELLED)
    assert moves.count() == MANY
    assert set(moves.values_list("actor", flat=True)) == {"user:anna"}


@contextmanager
def stuck_in_the_second_step(ids: list[int], operation: Operation) -> Iterator[None]:
    """Hold a worker in its second step: it waits for a row that this test has locked."""
    with transaction.atomic():
        list(Message.objects.select_for_update().filter(pk=ids[-1]))
        eventually(
            lambda: fresh(operation).done == MESSAGES_PER_STEP and waits_for_a_lock(), "the wait in the second batch"
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
def test_an_operation_whose_worker_is_killed_is_finished_by_another(start: Start) -> None:
    ids = scheduled()
    operation = started()
    worker = start("--roles", "operator")
    with stuck_in_the_second_step(ids, operation):
        worker.kill()
    held = fresh(operation)
    assert (held.state, held.done) == (OperationState.RUNNING, MESSAGES_PER_STEP)
    # The lease of the killed worker runs out.
    Operation.objects.update(leased_until=transitions.now(DB) - timedelta(seconds=1))
    start("--roles", "operator")
    eventually(lambda: is_done(operation), "the rest")
    all_is_well(operation)


@pytest.mark.postgresql("needs locks of rows")
def test_a_worker_that_stops_in_order_releases_its_operation_at_once(start: Start) -> None:
    ids = scheduled()
    operation = started()
    worker = start("--roles", "operator")
    with stuck_in_the_second_step(ids, operation):
        worker.stop()
        given_back = Operation.objects.values_list("state", "leased_until", "done").get()
        assert given_back == (OperationState.QUEUED, None, MESSAGES_PER_STEP)
    start("--roles", "operator")
    eventually(lambda: is_done(operation), "the rest")
    all_is_well(operation)
