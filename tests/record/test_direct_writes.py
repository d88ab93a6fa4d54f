"""Rows of the record are not written by Django's own means, which would bypass the log and Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.models import Message, Transition
from tests.support.rows import unguarded

pytestmark = pytest.mark.django_db


@async_to_sync
async def awaited(call: Callable[..., Awaitable[Any]], **arguments: Any) -> None:
    await call(**arguments)


WRITES: dict[str, Callable[[Any], Any]] = {
    "save": lambda row: row.save(),
    "save of fields": lambda row: row.save(update_fields=["due_at"]),
    "asave": lambda row: awaited(row.asave),
    "create": lambda row: type(row).objects.create(due_at=timezone.now()),
    "acreate": lambda row: awaited(type(row).objects.acreate, due_at=timezone.now()),
    "bulk_create": lambda row: type(row).objects.bulk_create([row]),
    "get_or_create": lambda row: type(row).objects.get_or_create(due_at=timezone.now()),
    "update_or_create": lambda row: type(row).objects.update_or_create(pk=row.pk, defaults={"due_at": timezone.now()}),
    "bulk_update": lambda row: type(row).objects.bulk_update([row], ["due_at"]),
    "update": lambda row: type(row).objects.filter(pk=row.pk).update(due_at=timezone.now()),
    "update of all": lambda row: type(row).objects.update(due_at=timezone.now()),
    "aupdate": lambda row: awaited(type(row).objects.aupdate, due_at=timezone.now()),
}
DELETES: dict[str, Callable[[Any], Any]] = {
    "delete": lambda row: row.delete(),
    "adelete": lambda row: awaited(row.adelete),
    "delete of a queryset": lambda row: type(row).objects.filter(pk=row.pk).delete(),
    "delete of all": lambda row: type(row).objects.all().delete(),
}


def everything() -> list[Any]:
    return [*Message.objects.values_list(), *Transition.objects.values_list()]


@pytest.fixture(params=["message", "transition"])
def row(request: pytest.FixtureRequest) -> Message | Transition:
    message = schedule_message("t.ok", {"n": 1}, delay="1h")
    message.refresh_from_db()
    return message if request.param == "message" else message.transitions.get()


@pytest.mark.parametrize("how", WRITES)
def test_a_direct_write_is_refused_and_the_functions_to_use_are_named(row: Message | Transition, how: str) -> None:
    before = everything()
    with pytest.raises(TypeError, match=f"rows of {type(row).__name__} are not written directly.*schedule_message"):
        WRITES[how](row)
    assert everything() == before


@pytest.mark.parametrize("how", DELETES)
def test_a_direct_delete_is_refused_and_the_ways_to_delete_are_named(row: Message | Transition, how: str) -> None:
    before = everything()
    with pytest.raises(
        TypeError, match=f"rows of {type(row).__name__} are not deleted.*cancel_message.*delayq_act purge"
    ):
        DELETES[how](row)
    assert everything() == before


def test_the_log_of_a_message_is_not_written_directly() -> None:
    log: Any = schedule_message("t.ok").transitions
    before = everything()
    times = {"at": timezone.now(), "due_at": timezone.now()}
    writes: list[Callable[[], Any]] = [
        lambda: log.create(number=2, to_state="dead", **times),
        lambda: log.update(to_state="dead"),
        lambda: log.all().delete(),
    ]
    for write in writes:
        with pytest.raises(TypeError, match="rows of Transition are not"):
            write()
    assert everything() == before


def test_messages_and_their_log_travel_as_fixtures(tmp_path: Path) -> None:
    message = schedule_message("t.ok", {"n": 1}, key="k", delay="1h")
    file = tmp_path / "messages.json"
    call_command("dumpdata", "delayq.message", "delayq.transition", output=str(file), verbosity=0)
    unguarded(Message).filter(pk=message.pk).delete()
    assert not everything()
    call_command("loaddata", str(file), verbosity=0)
    message.refresh_from_db()
    assert (message.topic, message.payload, message.key) == ("t.ok", {"n": 1}, "k")
    assert [row.to_state for row in message.transitions.all()] == ["scheduled"]
