"""Operations lead to their messages, and are undone: exactly those moves that are still the last ones."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.utils import timezone

from django_delayq import (
    cancel_message,
    move_message,
    pause_queue,
    requeue_message,
    reschedule_message,
    schedule_message,
)
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Ticket
from tests.support.claims import needs_row_locks
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

from . import asking, samples
from .asking import worked_off
from .samples import TOPIC, fresh, text

# What an undo of an action does to a message.
UNDONE = {"cancel": "requeued", "run": "rescheduled"}

pytestmark = pytest.mark.django_db(transaction=True)


def url(view: str, operation: Operation) -> str:
    return samples.admin_url(f"operation_{view}", operation.pk)


def undo(client: Client, operation: Operation) -> Any:
    return client.post(url("undo", operation), follow=True)


def finished(client: Client, action: str, **data: Any) -> Operation:
    operation = asking.started(client, action, f"topic:{TOPIC}", **data)
    worked_off()
    operation.refresh_from_db()
    return operation


def buttons(client: Client, operation: Operation) -> str:
    """Return the buttons of the page of an operation."""
    return " ".join(re.findall(r"<button[^>]*>(.*?)</button>", client.get(url("change", operation)).content.decode()))


def undone(client: Client, operation: Operation) -> Operation:
    assert "is queued" in text(undo(client, operation))
    worked_off()
    return Operation.objects.latest("pk")


def test_a_cancel_is_undone_but_for_what_changed_and_what_gave_its_key_away(chief: Client) -> None:
    kept, moved, taken = (samples.scheduled(delay="2h", key=f"k-{number}") for number in range(3))
    due = kept.due_at
    operation = finished(chief, "cancel")
    assert operation.outcomes == {"cancelled": 3}
    schedule_message("t.ok", key="other")
    newer = schedule_message(TOPIC, key="k-2", delay="1h")
    requeue_message(moved)
    cancel_message(moved)
    found = undone(chief, operation)
    assert found.outcomes == {"requeued": 1, "changed": 1, "key taken": 1}
    assert (fresh(kept).state, fresh(kept).due_at) == (State.SCHEDULED, due)
    assert (fresh(moved).state, fresh(taken).state) == (State.CANCELLED, State.CANCELLED)
    assert fresh(newer).state == State.SCHEDULED
    assert text(chief.get(url("change", found))).count("Undo #") >= 1
    assert AuditEvent.objects.filter(operation=found, action="requeue").exists()


@pytest.mark.parametrize(("action", "data"), [("reschedule", {"shift": "3h"}), ("run", {})])
def test_due_times_become_what_they_were(chief: Client, action: str, data: dict[str, str]) -> None:
    made = [samples.scheduled(delay=timedelta(hours=2 + number)) for number in range(5)]
    dues = {message.pk: message.due_at for message in made}
    operation = finished(chief, action, **data)
    assert {fresh(message).due_at for message in made}.isdisjoint(dues.values())
    later = timezone.now() + timedelta(days=1)
    reschedule_message(made[4], due_at=later)
    found = undone(chief, operation)
    assert found.outcomes == {"rescheduled": 4, "changed": 1}
    assert all(fresh(message).due_at == dues[message.pk] for message in made[:4])
    assert abs(fresh(made[4]).due_at - later) < timedelta(seconds=1)


@pytest.mark.postgresql("elsewhere a statement writes a few rows of the log")
@pytest.mark.parametrize("action", ["cancel", "run"])
def test_the_due_times_of_few_and_of_many_come_back_by_the_same_statements(chief: Client, action: str) -> None:
    numbers = []
    for number in (10, 100):
        for place in range(number):
            samples.scheduled(delay=timedelta(hours=2 + place), key=f"{number}-{place}")
        operation = finished(chief, action)
        undo(chief, operation)
        numbers.append(count_statements(worked_off))
        assert Operation.objects.latest("pk").outcomes == {UNDONE[action]: number}
        unguarded(Message).delete()
    assert numbers[0] == numbers[1]


def standing(rows: list[Message]) -> list[tuple[str, int]]:
    return [(row.queue, row.priority) for row in map(fresh, rows)]


def test_moved_messages_go_back_to_where_each_of_them_was(chief: Client) -> None:
    made = [samples.scheduled(queue=queue, priority=number % 3) for number, queue in enumerate("aaabbb")]
    dues = [row.due_at for row in made]
    was = standing(made)
    samples.worker(queues=("a", "b", "c"))
    operation = finished(chief, "move", queue="c", priority="2", reason="queue z → y, priority 9 → 8: busy")
    assert set(standing(made)) == {("c", 2)}
    cancel_message(made[0])
    move_message(made[1], queue="a")
    move_message(made[2], queue="a")
    move_message(made[2], queue="c")
    found = undone(chief, operation)
    assert found.outcomes == {"moved": 3, "changed": 3}
    assert standing(made) == [("c", 2), ("a", 2), ("c", 2), *was[3:]]
    assert [fresh(row).due_at for row in made] == dues
    assert "Undo" not in buttons(chief, operation)
    assert AuditEvent.objects.filter(operation=found, action="move").exists()


@pytest.mark.parametrize(("to", "left"), [({"queue": "b"}, ("b", 3)), ({"priority": "7"}, ("default", 7))])
def test_a_move_of_one_of_both_is_undone(chief: Client, to: dict[str, str], left: tuple[str, int]) -> None:
    made = samples.many(3, priority=3)
    samples.worker(queues=("b",))
    operation = finished(chief, "move", **to)
    assert set(standing(made)) == {left}
    assert undone(chief, operation).outcomes == {"moved": 3}
    assert set(standing(made)) == {("default", 3)}


@pytest.mark.parametrize("by_now", ["paused", "pulled"])
def test_a_move_is_undone_into_a_queue_that_is_paused_or_pulled_by_now(
    chief: Client, by_now: str, settings: Any
) -> None:
    made = samples.many(2, delay=0)
    samples.worker(queues=("b",))
    operation = finished(chief, "move", queue="b")
    if by_now == "paused":
        pause_queue("default")
    else:
        settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["default"]}
    assert undone(chief, operation).outcomes == {"moved": 2}
    assert set(standing(made)) == {("default", 0)}
    assert transitions.claim(samples.DB, [Ticket(row.pk) for row in made], {TOPIC: 60.0}, "w", queue="b") == []


def test_without_redis_a_move_is_undone(chief: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    made = samples.many(3)
    samples.worker(queues=("b",))
    assert undone(chief, finished(chief, "move", queue="b")).outcomes == {"moved": 3}
    assert set(standing(made)) == {("default", 0)}


@pytest.mark.parametrize("action", ["move", "run"])
def test_what_moves_while_it_is_undone_is_left(chief: Client, action: str) -> None:
    needs_row_locks()
    made = samples.many(2, delay="2h")
    samples.worker(queues=("b", "c"))
    operation = finished(chief, action, **({"queue": "b"} if action == "move" else {}))
    undo(chief, operation)
    with unfinished(lambda: move_message(made[0], queue="c")) as go:
        working = threading.Thread(target=work_off_apart)
        working.start()
        eventually(waits_for_a_lock, "the undo waits")
        go.set()
    working.join(PATIENCE)
    found = Operation.objects.latest("pk")
    assert found.outcomes == {"moved" if action == "move" else "rescheduled": 1, "changed": 1}
    assert fresh(made[0]).queue == "c"


def work_off_apart() -> None:
    try:
        worked_off()
    finally:
        connections.close_all()


def test_two_people_undo_an_operation_once(chief: Client, boss: Client) -> None:
    samples.many(3, delay="2h")
    operation = finished(chief, "cancel")
    assert "Undo" in text(chief.get(url("change", operation)))
    undo(chief, operation)
    assert "Nothing was done" in text(undo(boss, operation))
    worked_off()
    assert "Nothing was done" in text(undo(boss, operation))
    assert Operation.objects.count() == 2


@pytest.mark.parametrize(("action", "data"), [("cancel", {}), ("move", {"priority": "7"})])
def test_nobody_undoes_an_operation_without_the_permission(
    chief: Client, restorer: Client, viewer: Client, action: str, data: dict[str, str]
) -> None:
    samples.many(3, delay="2h")
    operation = finished(chief, action, **data)
    for client in (viewer, restorer):
        assert client.post(url("undo", operation)).status_code == 403
    assert "Undo" not in buttons(restorer, operation)
    assert Operation.objects.count() == 1


def test_an_operation_leads_to_its_messages(chief: Client) -> None:
    made = samples.many(3, delay="2h")
    schedule_message("t.ok", delay="2h")
    operation = finished(chief, "cancel")
    page = chief.get(url("change", operation))
    assert f"q=operation%3A{operation.pk}" in page.content.decode()
    assert samples.listed(chief, q=f"operation:{operation.pk}", state="all") == sorted(
        (message.pk for message in made), reverse=True
    )
    assert samples.listed(chief, q="operation:99999", state="all") == []
    assert Message.objects.count() == 4
