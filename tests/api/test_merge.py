"""``on_conflict="merge"``: calls with one key join their payloads in the message that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_delayq import (
    InvalidMessage,
    KeyConflict,
    PayloadTooLarge,
    aschedule_message,
    schedule_messages,
)
from django_delayq.core.actors import handling
from django_delayq.core.states import LIVE
from django_delayq.models import Message
from tests.support.steps import TOPIC, at_once, claim, claimed, due, fail, later, log, message, snapshot
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def merged(payload: Any = None, **options: Any) -> Message:
    return later(payload, **{"key": "k", "on_conflict": "merge", **options})


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        ([1, {"a": 1}], [2, [3]], [1, {"a": 1}, 2, [3]]),
        ([], [1], [1]),
        ((1,), (2,), [1, 2]),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": [1], "n": 1}, {"a": [2, 1]}, {"a": [1, 2, 1], "n": 1}),
        # Under a key two objects are updated, and no deeper.
        ({"a": {"x": 1, "y": [1]}}, {"a": {"y": [2], "z": 3}}, {"a": {"x": 1, "y": [2], "z": 3}}),
        ({"a": [1], "b": {"x": 1}, "c": 1}, {"a": 2, "b": [3], "c": None}, {"a": 2, "b": [3], "c": None}),
        (None, [1], [1]),
        ({"a": 1}, None, {"a": 1}),
        (None, None, None),
    ],
)
def test_two_payloads_become_one(old: Any, new: Any, both: Any) -> None:
    first = merged(old)
    second = merged(new)
    assert (second.pk, second.existed, second.payload) == (first.pk, True, both)
    assert message(first.pk).payload == both


@pytest.mark.parametrize(("old", "new"), [([1], {"a": 1}), ({"a": 1}, [1])])
def test_a_list_and_an_object_are_not_joined(old: Any, new: Any) -> None:
    first = merged(old)
    before = snapshot(first.pk)
    with transaction.atomic():
        with pytest.raises(InvalidMessage, match=r"cannot be merged.*two lists can, and two dicts"):
            merged(new)
        assert snapshot(first.pk) == before


@pytest.mark.parametrize("payload", [1, "text", True, 1.5])
@pytest.mark.parametrize("choice", ["merge", "merge_debounce"])
def test_what_is_neither_is_refused_at_the_call(choice: str, payload: Any) -> None:
    with pytest.raises(InvalidMessage, match="joins lists or dicts"):
        merged(payload, on_conflict=choice)
    row = {"topic": TOPIC, "key": "k", "on_conflict": choice}
    with pytest.raises(InvalidMessage, match=r"message 1: .*joins lists or dicts"):
        schedule_messages([{**row, "payload": [1]}, {**row, "payload": payload}])  # type: ignore[typeddict-item]
    assert not Message.objects.exists()


def test_a_message_with_a_payload_that_is_neither_is_left() -> None:
    first = later(5, key="k")
    with pytest.raises(InvalidMessage, match="type list cannot be merged into one of type int"):
        merged([1])
    assert message(first.pk).payload == 5


@pytest.mark.parametrize(("choice", "moves_due"), [("merge", False), ("merge_debounce", True)])
def test_the_due_time_is_kept_or_moves_out(choice: str, moves_due: bool) -> None:
    first = merged([1], expires="1h", priority=1, headers={"h": 1}, max_attempts=3, on_conflict=choice)
    second = merged([2], delay="20m", priority=2, headers={"h": 2}, max_attempts=5, on_conflict=choice)
    assert (second.payload, second.priority, second.headers, second.max_attempts) == ([1, 2], 1, {"h": 1}, 3)
    assert (second.due_at - first.due_at >= timedelta(minutes=10)) == moves_due
    assert (second.due_at == first.due_at) != moves_due
    assert second.expires_at == second.due_at + timedelta(hours=1)
    # Never back.
    assert merged([3], delay="1m", on_conflict=choice).due_at == second.due_at
    assert [row.reason for row in log(first.pk)] == ["", "merged", "merged"]


def test_the_bounds_of_a_payload_are_those_of_both_together(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PAYLOAD_MAX_BYTES": 30}
    first = merged(["x" * 10])
    merged(["x" * 10])
    before = snapshot(first.pk)
    with transaction.atomic():
        with pytest.raises(PayloadTooLarge) as caught:
            merged(["x" * 10])
        assert f"joined to that of message {first.pk}" in "".join(caught.value.__notes__)
        assert snapshot(first.pk) == before
    assert merged().payload == ["x" * 10] * 2


def test_a_message_that_waits_for_its_retry_gets_the_payload_and_goes_on_counting() -> None:
    first = claimed(key="k", payload=[1])
    assert fail(first.id, delay=timedelta(minutes=1))
    second = merged([2])
    assert (second.pk, second.payload, second.attempts, second.error) == (first.id, [1, 2], 1, "it broke")


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_beside_a_running_message_a_new_one_is_made_or_the_call_refused(unique: str) -> None:
    running = claimed(key="k", payload=[1], unique=unique)
    if unique == "scheduled":
        new = merged([2], unique=unique)
        assert (new.pk != running.id, merged([3], unique=unique).payload) == (True, [2, 3])
    else:
        with pytest.raises(KeyConflict, match="is running already"):
            merged([2], unique=unique)
    assert message(running.id).payload == [1]


def test_a_handler_fills_the_next_message_of_its_own_key() -> None:
    first = claimed(key="k", payload=[0])
    with handling("default", TOPIC, "k", first.id):
        made = [merged([number]) for number in range(3)]
    assert len({row.pk for row in made} - {first.id}) == 1
    # A caller elsewhere meets it too.
    assert merged([3]).payload == [0, 1, 2, 3]
    assert message(first.id).payload == [0]
    assert Message.objects.filter(state__in=LIVE).count() == 2


def test_many_messages_at_once_meet_each_other_and_those_that_wait() -> None:
    first = merged([0])
    rows: list[Any] = [
        {"topic": TOPIC, "key": key, "payload": [number], "on_conflict": "merge", "delay": "1h"}
        for number, key in enumerate(["k", "a", "k", "a"], 1)
    ]
    found = schedule_messages(rows)
    assert [row.existed for row in found] == [True, False, True, True]
    assert message(first.pk).payload == [0, 1, 3]
    assert message(found[1].pk).payload == [2, 4]


def test_the_middleware_of_the_first_call_made_the_headers() -> None:
    first = merged([1], headers={"tenant": 1})
    assert merged([2], headers={"tenant": 2}).headers == message(first.pk).headers == {"tenant": 1}


@committed
def test_async_code_merges() -> None:
    for number in range(2):
        row = async_to_sync(aschedule_message)(TOPIC, [number], key="k", on_conflict="merge", delay="1h")
    assert row.payload == [0, 1]


@committed
def test_a_rollback_leaves_what_was_there() -> None:
    first = merged([1])
    before = snapshot(first.pk)
    with transaction.atomic():
        assert merged([2]).payload == [1, 2]
        transaction.set_rollback(True)
    assert snapshot(first.pk) == before


@committed
@pytest.mark.postgresql("a transaction that writes keeps all others out")
def test_a_hot_key_is_a_lock_until_the_commit() -> None:
    first = merged([0])
    with unfinished(lambda: merged([1])) as go:
        waiting = threading.Thread(target=lambda: at_once(1, lambda _number: merged([2])))
        waiting.start()
        eventually(waits_for_a_lock, "the second call waits")
        go.set()
    waiting.join(PATIENCE)
    assert message(first.pk).payload == [0, 1, 2]


@committed
def test_of_eight_callers_none_loses_its_payload() -> None:
    def call(number: int) -> list[Message]:
        return [merged([[number, turn]], unique="scheduled") for turn in range(5)]

    answers = at_once(8, call)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    row = Message.objects.get()
    assert sorted(row.payload or ()) == [[number, turn] for number in range(8) for turn in range(5)]
    assert row.moves == 40


@committed
def test_a_claim_at_the_same_moment_has_the_payload_or_leaves_it_to_the_next_message() -> None:
    def race(call: Callable[[int], Any]) -> None:
        assert [found for found in at_once(2, call) if isinstance(found, BaseException)] == []

    for turn in range(10):
        first = due([turn], key="k", unique="scheduled")
        race(lambda number, pk=first.pk: claim(pk) if number else due(["new"], **choice))  # type: ignore[misc]
        rows = Message.objects.filter(key="k").order_by("pk")
        assert [item for row in rows for item in row.payload or ()] == [turn, "new"]
        for row in rows:
            Message._base_manager.filter(pk=row.pk).update(key=None)


choice: dict[str, Any] = {"key": "k", "unique": "scheduled", "on_conflict": "merge"}
