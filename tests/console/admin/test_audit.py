"""The audit: each action by anybody writes one event, which outlives the user."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import cancel_message, override_limit, pause_queue
from django_delayq.console import audit
from django_delayq.console.admin.site import PAGES
from django_delayq.console.models import Acknowledgement, AuditEvent, Operation
from django_delayq.core import actors
from django_delayq.models import Message, Transition

from . import samples
from .asking import ACTIONS, GIVEN, NEEDED, confirm, started, worked_off

pytestmark = pytest.mark.django_db

LIST = "admin:delayq_console_auditevent_changelist"


def event(action: str = "cancel", target: str = "something", actor: str = "user:anna", **values: Any) -> AuditEvent:
    with actors.acting_as(actor):
        return audit.record(samples.DB, action, target, **values)


def found(client: Client, **asked: str) -> list[int]:
    response = client.get(reverse(LIST), asked)
    assert response.status_code == 200
    return [shown.event.pk for shown in response.context["events"]]


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "outcome"),
    [*zip(ACTIONS, ("cancelled", "rescheduled", "rescheduled", "moved", "requeued", "purged"), strict=True)],
)
def test_each_action_on_one_message_writes_one_event(chief: Client, action: str, outcome: str) -> None:
    message = NEEDED[action]()
    confirm(chief, action, message, **GIVEN.get(action, {}))
    written = AuditEvent.objects.get()
    values = (written.actor, written.action, written.message_id, written.reason, written.outcomes, written.operation_id)
    assert values == ("user:cora", action, message.pk, "because", {outcome: 1}, None)
    assert written.target == f"message #{message.pk}"
    assert written.user_key == str(User.objects.get(username="cora").pk)
    if action != "purge":
        last = Transition.objects.filter(message=message).latest("number")
        moved = "priority 0 → 7: " if action == "move" else ""
        assert (last.actor, last.reason) == ("user:cora", f"{moved}because")


def test_an_action_on_some_messages_names_them_all(chief: Client) -> None:
    made = samples.one_of_each()
    confirm(chief, "cancel", *made.values())
    written = AuditEvent.objects.get()
    assert written.message_id is None
    assert written.outcomes == {"cancelled": 1, "requested": 1, "too late": 4}
    for message in made.values():
        assert f"#{message.pk}" in written.target


def test_an_operation_is_one_event_that_leads_to_it(chief: Client) -> None:
    samples.scheduled()
    operation = started(chief, "cancel", f"is:live topic:{samples.TOPIC}", reason="all of it")
    worked_off()
    written = AuditEvent.objects.get()
    assert (written.operation_id, written.reason, written.action) == (operation.pk, "all of it", "cancel")
    assert written.target == f"live, topic is “{samples.TOPIC}”"
    response = chief.get(reverse(LIST))
    assert "1 cancelled" in samples.text(response)
    assert reverse("admin:delayq_console_operation_change", args=[operation.pk]) in response.content.decode()


def test_an_event_outlives_its_user_message_and_operation(chief: Client) -> None:
    message = samples.scheduled()
    confirm(chief, "cancel", message)
    started(chief, "purge", "")
    worked_off()
    user = User.objects.get(username="cora")
    key = str(user.pk)
    user.delete()
    Operation.objects.all().delete()
    assert not Message.objects.exists()
    rows = AuditEvent.objects.order_by("pk")
    assert list(rows.values_list("actor", "user_key", "action")) == [
        ("user:cora", key, "cancel"),
        ("user:cora", key, "purge"),
    ]


def test_a_command_on_one_message_names_it_in_the_audit_unless_it_only_tries() -> None:
    message = samples.scheduled()
    for words in (["cancel", str(message.pk), "--dry-run"], ["purge", "--finished-before", "1d", "--dry-run"]):
        call_command("delayq_act", *words, stdout=StringIO(), stderr=StringIO())
    assert not AuditEvent.objects.exists()
    call_command("delayq_act", "cancel", str(message.pk), "--reason", "by hand", stdout=StringIO())
    written = AuditEvent.objects.get()
    values = (written.action, written.target, written.reason, written.outcomes, written.message_id)
    assert values == ("cancel", f"message #{message.pk}", "by hand", {"cancelled": 1}, message.pk)
    assert written.actor.startswith("command:delayq_act")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_tells_who_did_what_and_why(chief: Client) -> None:
    message = samples.scheduled()
    confirm(chief, "cancel", message, reason="<b>refunded</b>")
    event("pause schedule")
    response = chief.get(reverse(LIST))
    text = samples.text(response)
    assert f"cora Cancel message #{message.pk} 1 cancelled &lt;b&gt;refunded" in text
    assert samples.change_url(message) in response.content.decode()
    # Other apps have actions of their own.
    assert "pause schedule" in dict(response.context["actions"])


def test_the_page_is_narrowed_by_action_by_actor_and_by_period(chief: Client) -> None:
    old, purged, by_berta = event(), event("purge"), event(actor="user:berta")
    AuditEvent.objects.filter(pk=old.pk).update(at=timezone.now() - timedelta(days=3))
    assert found(chief) == [by_berta.pk, purged.pk, old.pk]
    assert found(chief, action="purge") == [purged.pk]
    assert found(chief, actor="bert") == [by_berta.pk]
    assert found(chief, period="day") == [by_berta.pk, purged.pk]
    assert found(chief, period="week", action="cancel", actor="anna") == [old.pk]
    assert found(chief, action="nothing'--", actor="\x00", period="ever", before="x") == []


def test_the_audit_is_searched_by_message_and_by_target(chief: Client) -> None:
    one = event(target="message #12", message_id=12)
    some = event(target="2 selected messages: #12, #13")
    other = event(target="2 selected messages: #123, #130")
    words = event(target="live, topic is “mail.daily”")
    assert found(chief, q="12") == found(chief, q="#12") == [some.pk, one.pk]
    assert found(chief, q="130") == [other.pk]
    assert found(chief, q="MAIL.daily") == [words.pk]
    assert found(chief, q="100%") == []


def test_many_events_have_several_pages(chief: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.console.admin.audit_pages.AuditEventAdmin.list_per_page", 2)
    made = [event().pk for _number in range(3)]
    event("purge")
    first = chief.get(reverse(LIST), {"action": "cancel"})
    assert [shown.event.pk for shown in first.context["events"]] == made[:0:-1]
    second = chief.get(f"{reverse(LIST)}?{first.context['older']}")
    assert [shown.event.pk for shown in second.context["events"]] == made[:1]


def test_users_are_named_alike_on_all_pages(boss: Client) -> None:
    cancelled, dead = samples.scheduled(queue="mail"), samples.dead()
    with actors.acting_as("user:anna"):
        pause_queue("mail", reason="so")
        override_limit(queue="mail", limit=0, reason="so")
        cancel_message(cancelled.pk, reason="so")
        samples.many(2, queue="mail", delay=0)
        audit.record(samples.DB, "cancel", "something")
    Acknowledgement.objects.create(error=dead.error, actor="user:anna", note="so")
    operation = samples.operation()
    pages = [reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist") for model in PAGES]
    pages += [samples.change_url(cancelled), samples.admin_url("operation_change", operation.pk)]
    pages += [samples.admin_url("queue_detail", "mail"), samples.admin_url("queue_resume", "mail")]
    pages += [
        f"{samples.admin_url('limits_override')}?name=queue+mail",
        samples.admin_url("topics_detail", samples.TOPIC),
    ]
    told = {page: boss.get(page).content.decode() for page in pages}
    assert [page for page, html in told.items() if "user:anna" in html] == []
    assert sum("anna" in html for html in told.values()) >= 10
