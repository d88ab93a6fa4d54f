"""Operations lead to their messages, and are undone: exactly those moves that are still the last ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from django_delayq import cancel_message, requeue_message, reschedule_message, schedule_message
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.core.states import State
from django_delayq.models import Message

from . import asking, samples
from .asking import worked_off
from .samples import TOPIC, fresh, text

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


def test_two_people_undo_an_operation_once(chief: Client, boss: Client) -> None:
    samples.many(3, delay="2h")
    operation = finished(chief, "cancel")
    assert "Undo" in text(chief.get(url("change", operation)))
    undo(chief, operation)
    assert "Nothing was done" in text(undo(boss, operation))
    worked_off()
    assert "Nothing was done" in text(undo(boss, operation))
    assert Operation.objects.count() == 2


def test_nobody_undoes_an_operation_without_the_permission(chief: Client, restorer: Client, viewer: Client) -> None:
    samples.many(3, delay="2h")
    operation = finished(chief, "cancel")
    for client in (viewer, restorer):
        assert client.post(url("undo", operation)).status_code == 403
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
