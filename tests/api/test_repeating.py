"""A message that has ended, once more as a new message: ``repeat_message``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_delayq import (
    InvalidMessage,
    KeyConflict,
    PayloadTooLarge,
    RetryPolicy,
    arepeat_message,
    cancel_message,
    handler,
    repeat_message,
    requeue_message,
    schedule_message,
    signals,
)
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message
from tests.support.receivers import heard
from tests.support.steps import TOPIC, ago, bring, claim, claimed, due, fail, log, message, succeed

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS: dict[str, Any] = {
    "queue": "fast",
    "priority": 7,
    "key": "k",
    "headers": {"tenant": "acme"},
    "retry": RetryPolicy.exponential("1s", max_attempts=9),
    "max_attempts": 3,
    "timeout": False,
    "lease": "5m",
    "limit_key": "acme",
    "on_dead": "t.gave_up",
    "expires": "1h",
}


@dataclass
class Order:
    number: int


KEPT = ("topic", "queue", "priority", "key", "payload", "retry", "max_attempts", "timeout", "lease", "limit_key")


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_message_that_has_ended_comes_again_as_a_new_one(state: State) -> None:
    handler(TOPIC, limit=5)(lambda message: None)
    options = {name: value for name, value in OPTIONS.items() if state != State.EXPIRED or name != "expires"}
    pk = bring(state, payload={"order": 5}, **options)
    before = message(pk)
    with heard(signals.message_scheduled) as told:
        new = repeat_message(pk)
    assert new.pk != pk
    assert [one["message_id"] for one in told] == [new.pk]
    row = message(new.pk)
    assert {name: getattr(row, name) for name in KEPT} == {name: getattr(before, name) for name in KEPT}
    assert (row.state, row.attempts, row.deliveries, row.repeats) == (State.SCHEDULED, 0, 0, pk)
    assert row.headers == {"tenant": "acme", "delayq": {"on_dead": "t.gave_up", "repeats": pk}}
    assert row.expires_at is not None
    assert row.expires_at - row.due_at == timedelta(seconds=1 if state == State.EXPIRED else 3600)
    assert row.due_at >= row.created_at
    assert vars(message(pk)) | {"_state": 0} == vars(before) | {"_state": 0}
    assert len(log(new.pk)) == 1
    # It is a message like any other: the next one names it, and not the first.
    claim(new.pk)
    assert succeed(new.pk)
    assert repeat_message(message(new.pk), delay="1h").repeats == new.pk


@pytest.mark.parametrize("state", [State.SCHEDULED, State.RUNNING])
def test_a_live_message_is_not_repeated(state: State) -> None:
    pk = claimed().id if state == State.RUNNING else due().pk
    with pytest.raises(InvalidMessage, match=f"message {pk} is {state}: only one that has ended is repeated"):
        repeat_message(pk)
    assert Message.objects.count() == 1


def test_a_message_that_is_not_there_is_not_repeated() -> None:
    with pytest.raises(Message.DoesNotExist):
        repeat_message(5)
    with pytest.raises(InvalidMessage, match="not the id of a message"):
        repeat_message("five")
    with pytest.raises(TypeError, match="write delay"):
        repeat_message(5, countdown=5)  # type: ignore[call-arg]


def test_the_key_of_a_message_may_be_held_when_it_is_repeated() -> None:
    pk = bring(State.CONSUMED, key="k")
    other = due(key="k")
    with pytest.raises(KeyConflict, match=f"message {other.pk} of topic '{TOPIC}' is live and has this key"):
        repeat_message(pk)
    assert cancel_message(other)
    assert repeat_message(pk).key == "k"
    # It may hold the key itself after its end.
    held = bring(State.CONSUMED, key="held", unique="1h")
    with pytest.raises(KeyConflict, match="holds this key for 1 h after its end"):
        repeat_message(held)


@pytest.mark.parametrize("unique", ["live", "scheduled"])
def test_a_repeated_message_holds_its_key_for_as_long_as_the_old_one_did(unique: Any) -> None:
    pk = bring(State.CONSUMED, key="k", unique=unique)
    new = repeat_message(pk)
    assert message(new.pk).unique == unique
    with pytest.raises(KeyConflict):
        schedule_message(TOPIC, key="k")
    claim(new.pk)
    assert message(new.pk).holds_key == (unique == "live")


def test_the_time_to_live_counts_from_the_due_time_that_a_call_gave() -> None:
    pk = due(due_at=ago(30), expires="1h").pk
    claim(pk)
    assert fail(pk, delay=timedelta(minutes=20))
    assert cancel_message(pk)
    new = repeat_message(pk, delay="1d")
    assert new.expires_at is not None
    assert new.expires_at - new.due_at == timedelta(hours=1)


def test_a_message_is_repeated_with_another_payload() -> None:
    handler(TOPIC, limit=1, limit_key=lambda message: message.payload and message.payload["customer"])(lambda m: None)
    pk = bring(State.DEAD, payload={"customer": "acme", "sum": 5}, priority=3)
    assert message(pk).limit_key == "acme"
    new = repeat_message(pk, payload={"customer": "zoo", "sum": timedelta(seconds=5)})
    row = message(new.pk)
    assert (row.payload, row.limit_key) == ({"customer": "zoo", "sum": "P0DT00H00M05S"}, "zoo")
    assert (row.repeats, row.priority, message(pk).payload) == (pk, 3, {"customer": "acme", "sum": 5})
    # None is a payload like any other.
    assert message(repeat_message(pk, payload=None).pk).payload is None
    assert message(async_to_sync(arepeat_message)(pk, payload={"customer": 7}).pk).limit_key == "7"


def test_a_limit_key_that_a_call_gave_stays_with_another_payload() -> None:
    handler(TOPIC, limit=1)(lambda message: None)
    pk = bring(State.CONSUMED, limit_key="acme")
    assert repeat_message(pk, payload=[1]).limit_key == "acme"


def test_another_payload_is_checked_as_at_any_call(settings: Any) -> None:
    handler(TOPIC, payload=Order)(lambda message: None)
    pk = bring(State.CONSUMED, payload={"number": 1})
    for wrong in ({"name": 1}, object(), {"number": float("nan")}):
        with pytest.raises(InvalidMessage):
            repeat_message(pk, payload=wrong)
    settings.DELAYQ = {**settings.DELAYQ, "PAYLOAD_MAX_BYTES": 5}
    with pytest.raises(PayloadTooLarge):
        repeat_message(pk, payload={"number": 12})
    assert Message.objects.count() == 1


def test_the_new_message_exists_exactly_when_the_transaction_commits() -> None:
    pk = bring(State.CONSUMED)
    with heard(signals.message_scheduled) as told, pytest.raises(ZeroDivisionError), transaction.atomic():
        repeat_message(pk)
        assert told == []
        raise ZeroDivisionError
    assert (told, Message.objects.count()) == ([], 1)


def test_async_code_repeats_too() -> None:
    pk = bring(State.DEAD)
    assert async_to_sync(arepeat_message)(pk).repeats == pk
    assert requeue_message(pk)
