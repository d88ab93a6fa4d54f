"""The pages of a project that reads from a replica: what they write goes to the database behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_delayq.broker import publisher
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.console.operations import lifecycle
from django_delayq.models import Message
from django_delayq.recurring import create_schedule
from tests.support.replica import REPLICA
from tests.support.transactions import lock_table, unfinished

from . import samples
from .asking import ACTIONS, GIVEN, NEEDED, confirm
from .conftest import logged_in

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", REPLICA]),
    pytest.mark.usefixtures("read_from_a_replica"),
]


@pytest.fixture
def boss() -> Client:
    """A user who may do all."""
    user = User.objects.create_user("boss", is_staff=True)
    permissions = Permission.objects.using("default").filter(content_type__app_label__startswith="d")
    user.user_permissions.set(permissions)
    return logged_in(user)


def test_every_action_is_done_there(boss: Client) -> None:
    for action in ACTIONS:
        message = NEEDED[action]()
        confirm(boss, action, message, **GIVEN.get(action, {}))
        assert AuditEvent.objects.latest("pk").action == action
        found = Message.objects.using("default").filter(pk=message.pk)
        assert not found if action == "purge" else found.get().moves > message.moves


def test_a_page_asks_redis_for_that_database(boss: Client, redis_client: Any) -> None:
    message = samples.scheduled()
    before = publisher.get.cache_info().currsize
    assert boss.get(samples.change_url(message)).status_code == 200
    assert publisher.get.cache_info().currsize == before


@pytest.mark.parametrize(("view", "done"), [("restore", "restore"), ("reveal", "reveal")])
def test_a_restored_and_a_revealed_message_are_written_to_the_audit_there(boss: Client, view: str, done: str) -> None:
    message = samples.scheduled({"api_key": "leak-1"})
    page = boss.post(reverse(f"admin:delayq_message_{view}", args=[message.pk]), follow=True)
    assert page.status_code == 200
    assert (AuditEvent.objects.get().action, AuditEvent.objects.get().message_id) == (done, message.pk)


def test_an_export_is_written_to_the_audit_there(boss: Client) -> None:
    message = samples.scheduled()
    page: Any = boss.post(reverse("admin:delayq_message_export"), {"format": "jsonl"})
    assert str(message.pk) in b"".join(page.streaming_content).decode()
    assert AuditEvent.objects.get().action == "export"


def test_an_operation_is_stopped_and_resumed_there() -> None:
    started = samples.operation("cancel", samples.scheduled().pk)
    for verb, state in ((lifecycle.stop, "stopped"), (lifecycle.resume, "queued")):
        read = Operation.objects.get(pk=started.pk)
        assert read._state.db == REPLICA
        assert verb(read)
        assert Operation.objects.using("default").get(pk=started.pk).state == state


@pytest.mark.postgresql("locks tables")
@pytest.mark.parametrize("view", ["changelist", "change"])
def test_a_page_of_schedules_waits_for_no_lock_there(boss: Client, timed: Callable[..., None], view: str) -> None:
    create_schedule("s", samples.TOPIC, every="1h", using="default")
    timed(50)
    with unfinished(lambda: lock_table("delayq_schedule")):
        page = boss.get(reverse(f"admin:delayq_recurring_schedule_{view}", args=["s"] if view == "change" else []))
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted")
            assert cursor.fetchone()[0], "the page was there when the lock was gone"
    assert page.status_code == 503
