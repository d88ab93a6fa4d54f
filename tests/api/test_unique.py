"""``unique`` says how long a message holds its key, and one message at a time holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection, transaction

from django_delayq import (
    InvalidMessage,
    KeyConflict,
    OnConflict,
    cancel_message,
    requeue_message,
    reschedule_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.api.actions import foresee_requeue
from django_delayq.broker.keys import keys
from django_delayq.core.actors import handling
from django_delayq.core.states import FINAL, LIVE, State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.record.purge import finished, purge_ids
from django_delayq.signals import message_expired
from tests.support.in_redis import held
from tests.support.receivers import heard
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.steps import (
    TOPIC,
    ago,
    at_once,
    bring,
    claim,
    claimed,
    due,
    fail,
    later,
    lose,
    message,
    moves,
    snapshot,
    state,
    succeed,
)

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

POLICIES = list(OnConflict)


def ended(seconds: float, where: State = State.CONSUMED, **options: Any) -> int:
    """Bring a message to its end, so many seconds ago; return its id."""
    pk = bring(where, **options)
    unguarded(Message).filter(pk=pk).update(finished_at=ago(seconds))
    return pk


@contextmanager
def own_run(pk: int) -> Iterator[None]:
    """Run what is inside as the handler of a message."""
    row = message(pk)
    assert row.key is not None
    with handling("default", row.topic, row.key, pk):
        yield


def step(pk: int, *payload: Any, make: Callable[..., Message] = due, **options: Any) -> Message:
    """Schedule a message under the key of a message, as the handler of that one."""
    with own_run(pk):
        return make(*payload, key="k", **options)


def holders() -> list[int]:
    return sorted(row.pk for row in Message.objects.filter(key="k") if row.holds_key)


# --- the argument -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["", "Live", "waiting", "1 hour", "-1h", 0, -1, "0s", True, None, b"1h", [], "40000d"]
)
def test_a_wrong_unique_is_refused_at_the_call(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="unique"):
        later(key="k", unique=value)
    with pytest.raises(InvalidMessage, match="message 1: unique"):
        schedule_messages([{"topic": TOPIC}, {"topic": TOPIC, "key": "k", "unique": value}])
    assert not Message.objects.exists()


@pytest.mark.parametrize(
    ("value", "shown"),
    [("live", "live"), ("scheduled", "scheduled"), ("1h30m", timedelta(minutes=90)), (60, timedelta(minutes=1))],
)
def test_a_message_tells_its_unique_as_scheduled_and_as_read(value: Any, shown: Any) -> None:
    made = later(key="k", unique=value)
    assert made.unique == message(made.pk).unique == shown
    assert made.holds_key
    assert not made.existed


def test_many_messages_with_keys_are_scheduled_with_their_unique() -> None:
    held = ended(60, key="h", unique="1h")
    made = schedule_messages(
        [
            {"topic": TOPIC, "key": "s", "unique": "scheduled"},
            {"topic": TOPIC},
            {"topic": TOPIC, "key": "s", "unique": "scheduled", "on_conflict": "keep"},
            {"topic": TOPIC, "key": "h", "on_conflict": "keep"},
        ]
    )
    assert [row.existed for row in made] == [False, False, True, True]
    assert (made[2].pk, made[3].pk) == (made[0].pk, held)


# --- "scheduled" ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["live", "scheduled", "1h"])
@pytest.mark.parametrize("first", ["live", "scheduled", "1h"])
def test_a_waiting_message_holds_its_key_whatever_its_unique(first: str, second: str) -> None:
    old = later(1, key="k", unique=first)
    before = snapshot(old.pk)
    with pytest.raises(KeyConflict, match=f"message {old.pk}"):
        later(2, key="k", unique=second)
    kept = later(2, key="k", unique=second, on_conflict="keep")
    assert (kept.pk, kept.payload, kept.existed) == (old.pk, 1, True)
    assert (snapshot(old.pk), Message.objects.count()) == (before, 1)


@pytest.mark.parametrize("second", ["live", "scheduled", "1h"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_message_with_unique_scheduled_frees_its_key_when_its_delivery_begins(policy: str, second: str) -> None:
    running = claimed(key="k", unique="scheduled")
    before = snapshot(running.id)
    new = later(key="k", unique=second, on_conflict=policy)
    assert (new.pk != running.id, new.existed) == (True, False)
    assert snapshot(running.id) == before
    with pytest.raises(KeyConflict):
        later(key="k", unique="scheduled")
    assert holders() == [new.pk]


@pytest.mark.parametrize("second", ["live", "scheduled"])
@pytest.mark.parametrize("first", ["live", "1h"])
@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"keep"}))
def test_a_running_message_with_another_unique_holds_its_key(policy: str, first: str, second: str) -> None:
    running = claimed(key="k", unique=first)
    before = snapshot(running.id)
    with pytest.raises(KeyConflict):
        later(key="k", unique=second, on_conflict=policy)
    assert snapshot(running.id) == before


@pytest.mark.parametrize(
    "come_back", [fail, lambda pk: fail(pk, counts=False), lose], ids=["retry", "release", "crash"]
)
def test_a_message_that_comes_back_waits_beside_the_next_one(come_back: Callable[[int], object]) -> None:
    first = claimed(key="k", unique="scheduled")
    second = later(key="k", unique="scheduled")
    come_back(first.id)
    assert (state(first.id), state(second.pk)) == (State.SCHEDULED, State.SCHEDULED)
    with pytest.raises(KeyConflict, match=f"message {second.pk}"):
        later(key="k", unique="scheduled")
    assert claim(first.id)
    assert succeed(first.id)
    assert claim(second.pk) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_no_message_is_scheduled_beside_one_that_waits_for_its_retry(policy: str) -> None:
    first = claimed(key="k", unique="scheduled", payload=[1])
    assert fail(first.id, delay=timedelta(minutes=5))
    if policy == "error":
        with pytest.raises(KeyConflict, match=f"message {first.id}"):
            later(key="k", unique="scheduled", on_conflict=policy)
    else:
        other = later(key="k", unique="scheduled", on_conflict=policy, payload=[2])
        payload = {"replace": [2], "merge": [1, 2], "merge_debounce": [1, 2]}.get(policy, [1])
        assert (other.pk, other.existed, other.payload) == (first.id, True, payload)
        assert (other.due_at > first.due_at + timedelta(minutes=9)) == (policy not in ("keep", "merge"))
    assert Message.objects.count() == 1
    assert holders() == ([first.id] if policy == "replace" else [])


def test_a_message_whose_delivery_crashed_counts_as_running() -> None:
    first = claimed(key="k", unique="scheduled")
    lose(first.id)
    second = later(key="k", unique="scheduled", on_conflict="debounce")
    assert second.pk != first.id
    assert not second.existed


def test_a_replaced_message_gets_the_unique_of_the_new_one() -> None:
    first = later(key="k")
    for value, shown in (("scheduled", "scheduled"), ("1h", timedelta(hours=1)), ("live", "live")):
        assert later(key="k", unique=value, on_conflict="replace").unique == message(first.pk).unique == shown
    assert later(key="k", unique="scheduled", on_conflict="debounce").unique == "live"


@committed
@pytest.mark.postgresql("a transaction that writes keeps all others out")
def test_a_kept_message_does_not_start_before_the_callers_transaction_ends() -> None:
    if os.environ.get("DELAYQ_TEST_ISOLATION"):
        pytest.skip("at this level of isolation the claim may fail first")
    first = due(key="k", unique="scheduled")
    with transaction.atomic():
        kept = due(key="k", unique="scheduled", on_conflict="keep")
        assert kept.pk == first.pk
        # Several callers keep it at once.
        [found] = at_once(1, lambda _number: due(key="k", unique="scheduled", on_conflict="keep"))
        assert not isinstance(found, BaseException)
        assert found.pk == first.pk
        assert at_once(1, lambda _number: claim(first.pk)) == [[]]
    assert claim(first.pk)


# --- a time after the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", sorted(FINAL))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_message_holds_its_key_for_a_time_after_its_end_whatever_that_was(where: State, policy: str) -> None:
    old = ended(3590, where, key="k", unique="1h")
    before = snapshot(old)
    if policy == "keep":
        kept = later(key="k", unique="1h", on_conflict=policy)
        assert (kept.pk, kept.existed, kept.state) == (old, True, where)
    else:
        with pytest.raises(KeyConflict, match=f"message {old} .* for 1 h after its end"):
            later(key="k", unique="1h", on_conflict=policy)
    assert snapshot(old) == before


@pytest.mark.parametrize(("unique", "seconds"), [("live", 0), ("scheduled", 0), ("1h", 3601)])
@pytest.mark.parametrize("where", sorted(FINAL))
def test_the_key_is_free_when_the_message_or_its_time_after_the_end_is_over(
    where: State, unique: str, seconds: float
) -> None:
    old = ended(seconds, where, key="k", unique=unique)
    new = later(key="k", unique=unique)
    assert (new.pk != old, new.existed) == (True, False)
    assert state(old) == where
    assert holders() == [new.pk]


def test_a_message_that_fails_and_runs_again_holds_its_key_on() -> None:
    row = claimed(key="k", unique="1h")
    assert fail(row.id)
    assert claim(row.id)
    assert succeed(row.id, 2)
    assert later(key="k", on_conflict="keep").pk == row.id


# --- under the key of its own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_handler_schedules_the_next_message_under_its_own_key(policy: str, unique: str) -> None:
    last = claimed(key="k", unique=unique)
    for _turn in range(3):
        new = step(last.id, unique=unique, on_conflict=policy)
        assert (new.pk > last.id, new.existed) == (True, False)
        assert holders() == [new.pk]
        assert succeed(last.id)
        (last,) = claim(new.pk)
    assert Message.objects.filter(state__in=LIVE).count() == 1


def fare(pk: int, fate: str) -> None:
    """Bring a message that is due to its fate."""
    if fate == "cancelled":
        assert cancel_message(pk)
    elif fate != "scheduled":
        assert claim(pk)
    if fate == "crashed":
        lose(pk)
    elif fate in ("consumed", "purged"):
        assert succeed(pk)
    elif fate == "dead":
        assert fail(pk, dead=True)
    if fate == "purged":
        purge_ids("default", [pk])


@pytest.mark.parametrize(("unique", "then"), [("live", "1h"), ("scheduled", "live")])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fate", ["scheduled", "running", "crashed", "consumed", "dead", "cancelled", "purged"])
def test_a_handler_that_runs_again_finds_its_step_whatever_became_of_it(
    fate: str, policy: str, unique: str, then: str
) -> None:
    first = claimed(key="k", unique=unique)
    second = step(first.id, unique=then)
    lose(first.id)
    fare(second.pk, fate)
    assert claim(first.id)
    found = step(first.id, unique=unique, on_conflict=policy)
    # A step that is purged cannot be returned: the message itself is.
    assert (found.pk, found.existed) == (first.id if fate == "purged" else second.pk, True)
    assert succeed(first.id, 2)
    assert Message.objects.count() == (1 if fate == "purged" else 2)


def test_a_delivery_that_lost_its_lease_schedules_the_next_message_too() -> None:
    # Its success would be accepted, and the chain would end.
    first = claimed(key="k")
    lose(first.id)
    new = step(first.id)
    assert new.pk != first.id
    assert succeed(first.id)
    assert claim(first.id) == []
    assert claim(new.pk)


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("come_back", ["retry", "release", "crash"])
def test_a_message_that_waits_again_keeps_no_later_step_of_its_chain_out(
    come_back: str, policy: str, unique: str
) -> None:
    first = claimed(key="k", unique=unique)
    second = step(first.id, unique=unique)
    if come_back == "crash":
        lose(first.id)
    else:
        assert fail(first.id, counts=come_back == "retry")
    assert claim(second.pk)
    third = step(second.pk, [3], unique=unique, on_conflict=policy)
    assert (third.existed, third.pk > second.pk, third.payload) == (False, True, [3])
    assert holders() == [third.pk]
    assert succeed(second.pk)
    # The first one runs again, and finds its own step, which is over.
    assert claim(first.id)
    found = step(first.id, [2], unique=unique, on_conflict=policy)
    assert (found.pk, found.existed, found.state, found.payload) == (second.pk, True, State.CONSUMED, None)
    assert holders() == [third.pk]
    assert Message.objects.count() == 3


def test_a_handler_that_runs_again_changes_its_own_step_and_no_later_one() -> None:
    first = claimed(key="k")
    second = step(first.id, 2, make=later)
    assert fail(first.id)
    assert claim(first.id)
    assert step(first.id, 20, make=later, on_conflict="replace").pk == second.pk
    assert message(second.pk).payload == 20
    assert fail(first.id, 2)
    reschedule_message(second.pk, due_at=ago())
    assert claim(second.pk)
    third = step(second.pk, 3, make=later)
    # The second waits for a retry, and the third has the key.
    assert fail(second.pk)
    assert claim(first.id)
    assert step(first.id, 200, make=later, on_conflict="replace").pk == second.pk
    assert (message(second.pk).payload, message(third.pk).payload) == (20, 3)
    assert holders() == [third.pk]


def test_a_message_that_scheduled_its_next_one_keeps_no_other_out_while_it_waits_again() -> None:
    first = claimed(key="k", unique="scheduled")
    second = step(first.id, unique="scheduled")
    assert fail(first.id)
    with pytest.raises(KeyConflict, match=f"message {second.pk}"):
        later(key="k", unique="scheduled")
    assert claim(second.pk)
    other = later(key="k", unique="scheduled")
    assert not other.existed
    # That one is the next of both.
    assert step(second.pk, make=later, unique="scheduled").pk == other.pk
    assert fail(second.pk)
    assert holders() == [other.pk]
    assert cancel_message(other.pk)
    assert not later(key="k", unique="scheduled").existed


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_a_handler_schedules_beside_another_message_that_waits_for_its_retry(unique: str) -> None:
    # Whatever becomes of that one, the chain of this one goes on.
    stranger = claimed(key="k", unique="scheduled")
    first = due(key="k", unique=unique)
    assert fail(stranger.id)
    assert claim(first.pk)
    second = step(first.pk, unique=unique)
    assert not second.existed
    assert holders() == [second.pk]


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_a_requeued_message_schedules_a_next_one_anew(unique: str) -> None:
    first = claimed(key="k", unique=unique)
    second = step(first.id, make=later, unique=unique)
    assert fail(first.id, dead=True)
    assert cancel_message(second.pk)
    unguarded(Message).filter(pk=second.pk).update(key_for=None)
    assert requeue_message(first.id)
    assert claim(first.id)
    third = step(first.id, make=later, unique=unique)
    assert (third.existed, third.pk > second.pk) == (False, True)
    assert holders() == [third.pk]


def test_a_finished_message_that_gave_its_key_to_the_next_one_is_purged() -> None:
    first = claimed(key="k", unique="1h")
    second = step(first.id, unique="1h")
    assert succeed(first.id)
    assert claim(second.pk)
    assert succeed(second.pk)
    assert list(finished("default", FINAL, 0).values_list("pk", flat=True)) == [first.id]


@committed
@pytest.mark.parametrize("unique", ["live", "scheduled"])
def test_a_step_whose_transaction_is_rolled_back_is_not_the_next_one(unique: str) -> None:
    first = claimed(key="k", unique=unique)
    with pytest.raises(RuntimeError), transaction.atomic(), own_run(first.id):
        due(key="k", unique=unique)
        raise RuntimeError
    assert holders() == ([first.id] if unique == "live" else [])
    assert fail(first.id)
    assert claim(first.id)
    with transaction.atomic():
        second = step(first.id, unique=unique)
    assert not second.existed
    assert holders() == [second.pk]


@committed
@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_deliveries_of_one_message_at_once_schedule_one_next_message(unique: str) -> None:
    first = claimed(key="k", unique=unique)

    def call(number: int) -> Message:
        return step(first.id, make=later, payload=number, unique=unique)

    rows = raced(call)
    assert len(rows) == 8
    assert len({row.pk for row in rows} - {first.id}) == 1
    assert sum(not row.existed for row in rows) == 1
    assert Message.objects.count() == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_a_message_that_was_asked_to_stop_has_no_next_one_until_it_is_requeued(unique: str, policy: OnConflict) -> None:
    first = claimed(key="k", unique=unique)
    assert cancel_message(first.id).verdict == Verdict.REQUESTED
    row = step(first.id, unique=unique, on_conflict=policy)
    assert (row.pk, row.existed) == (first.id, True)
    with own_run(first.id):
        [row] = schedule_messages([{"topic": TOPIC, "key": "k", "on_conflict": policy}])
    assert (row.pk, row.existed) == (first.id, True)
    assert fail(first.id)
    assert step(first.id, unique=unique).pk == first.id
    assert (state(first.id), Message.objects.count()) == (State.CANCELLED, 1)
    assert requeue_message(first.id)
    assert claim(first.id)
    assert not step(first.id, unique=unique).existed


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_a_crashed_delivery_of_a_cancelled_message_goes_on_with_no_chain(unique: str) -> None:
    first = claimed(key="k", unique=unique)
    lose(first.id)
    assert cancel_message(topic=TOPIC, key="k").verdict == Verdict.OUTCOME_UNKNOWN
    assert step(first.id, unique=unique).pk == first.id
    assert Message.objects.count() == 1


def test_another_key_and_another_topic_are_not_the_handlers_own() -> None:
    row, other = claimed(key="k"), claimed(key="j")
    with own_run(row.id):
        with pytest.raises(KeyConflict, match=f"message {other.id}"):
            due(key="j")
        schedule_message("record.other", key="k")
        with pytest.raises(KeyConflict):
            schedule_message("record.other", key="k")
    with pytest.raises(KeyConflict, match=f"message {row.id}"):
        due(key="k")


# --- actions ----------------------------------------------------------------------------------------------------------


def test_a_key_names_the_message_that_holds_it() -> None:
    first = claimed(key="k", unique="scheduled")
    assert cancel_message(topic=TOPIC, key="k").id == first.id
    second = later(key="k", unique="scheduled")
    assert reschedule_message(topic=TOPIC, key="k", delay="1h").id == second.pk
    assert cancel_message(topic=TOPIC, key="k").id == second.pk
    assert cancel_message(topic=TOPIC, key="k").id == first.id
    assert succeed(first.id)
    assert not cancel_message(topic=TOPIC, key="k")


def test_a_key_names_the_live_message_and_not_one_that_holds_it_after_its_end() -> None:
    ended(60, key="k", unique="1h")
    assert cancel_message(topic=TOPIC, key="k").verdict == Verdict.NOT_FOUND


def test_a_requeue_by_key_passes_over_a_running_message_that_freed_the_key() -> None:
    dead = bring(State.DEAD, key="k", unique="scheduled")
    running = claimed(key="k", unique="scheduled")
    answer = requeue_message(topic=TOPIC, key="k")
    assert (answer.id, answer.verdict) == (dead, Verdict.REQUEUED)
    assert holders() == [dead]
    assert (requeue_message(topic=TOPIC, key="k").id, state(running.id)) == (dead, State.RUNNING)


def test_a_requeued_message_holds_its_key_as_a_new_one_does() -> None:
    row = claimed(key="k", unique="scheduled")
    assert fail(row.id, dead=True)
    assert requeue_message(row.id)
    assert holders() == [row.id]
    with pytest.raises(KeyConflict, match=f"message {row.id}"):
        later(key="k", unique="scheduled")
    assert claim(row.id)
    assert holders() == []
    assert not later(key="k", unique="scheduled").existed


@pytest.mark.parametrize("unique", ["live", "scheduled"])
def test_a_message_that_gave_its_key_to_the_next_one_has_it_again_after_a_requeue(unique: str) -> None:
    first = claimed(key="k", unique=unique)
    new = step(first.id, make=later)
    assert fail(first.id, dead=True)
    assert cancel_message(new.pk)
    assert requeue_message(first.id)
    assert holders() == [first.id]
    assert Message.objects.get(pk=first.id).unique == unique
    assert claim(first.id)
    assert holders() == ([first.id] if unique == "live" else [])


def test_a_requeue_passes_over_a_message_that_holds_the_key_no_more() -> None:
    dead = bring(State.DEAD, key="k")
    other = bring(State.CONSUMED, key="k", unique="1h")
    unguarded(Message).filter(pk=other).update(finished_at=ago(7200))
    assert foresee_requeue(Message.objects.filter(pk=dead)) == {Verdict.REQUEUED: 1}
    assert [answer.verdict for answer in map(requeue_message, (dead, other))] == [Verdict.REQUEUED, Verdict.TOO_LATE]


@pytest.mark.parametrize("unique", ["live", "scheduled", "retry"])
def test_a_requeue_is_refused_unless_the_other_message_with_its_key_can_start_no_more(
    unique: str, django_capture_on_commit_callbacks: Any
) -> None:
    dead = bring(State.DEAD, key="k")
    if unique == "retry":
        stale = claimed(key="k", unique="scheduled", expires="1h").id
        assert fail(stale)
    else:
        stale = due(key="k", unique=unique, expires="1h").pk
    assert foresee_requeue(Message.objects.filter(pk=dead)) == {Verdict.KEY_TAKEN: 1}
    assert requeue_message(dead).verdict == Verdict.KEY_TAKEN
    assert (state(dead), state(stale)) == (State.DEAD, State.SCHEDULED)
    unguarded(Message).filter(pk=stale).update(expires_at=ago(1))
    assert foresee_requeue(Message.objects.filter(pk=dead)) == {Verdict.REQUEUED: 1}
    with heard(message_expired) as expired, django_capture_on_commit_callbacks(execute=True):
        assert requeue_message(dead).verdict == Verdict.REQUEUED
    assert (state(dead), state(stale)) == (State.SCHEDULED, State.EXPIRED)
    assert [arguments["message_id"] for arguments in expired] == [stale]


@committed
@pytest.mark.usefixtures("puts_are_flushed")
def test_redis_forgets_a_message_that_expires_to_free_its_key(redis_client: redis.Redis) -> None:
    redis_client.hset(keys("delayq", "default").meta, "horizon", 2**46)
    stale = due(key="k", expires="1h").pk
    assert held(redis_client) == {stale}
    unguarded(Message).filter(pk=stale).update(expires_at=ago(1))
    fresh = due(key="k").pk
    assert state(stale) == State.EXPIRED
    assert held(redis_client) == {fresh}


def test_a_requeue_is_refused_while_another_message_holds_the_key_after_its_end() -> None:
    dead = bring(State.DEAD, key="k")
    ended(60, key="k", unique="1h")
    assert foresee_requeue(Message.objects.filter(pk=dead)) == {Verdict.KEY_TAKEN: 1}
    assert requeue_message(dead).verdict == Verdict.KEY_TAKEN
    assert state(dead) == State.DEAD


def test_a_message_that_holds_its_key_after_its_end_is_requeued() -> None:
    dead = ended(60, State.DEAD, key="k", unique="1h")
    assert foresee_requeue(Message.objects.filter(pk=dead)) == {Verdict.REQUEUED: 1}
    assert requeue_message(topic=TOPIC, key="k").verdict == Verdict.REQUEUED
    assert moves(dead)[-1] == "dead>scheduled"


# --- many at once -----------------------------------------------------------------------------------------------------


def raced(call: Callable[[int], Message]) -> list[Message]:
    rows = [row for row in at_once(8, call) if not isinstance(row, KeyConflict)]
    assert [row for row in rows if isinstance(row, BaseException)] == []
    return rows  # type: ignore[return-value]


@committed
@pytest.mark.parametrize(
    ("unique", "policy"), [*[("scheduled", policy) for policy in POLICIES], ("1h", "keep"), ("1h", "error")]
)
def test_eight_threads_schedule_one_message_when_the_key_is_free(unique: str, policy: str) -> None:
    """Beside the running one, or when the time after its end is over."""
    old = claimed(key="k", unique=unique).id if unique == "scheduled" else ended(3601, key="k", unique=unique)
    rows = raced(lambda number: later(key="k", payload=[number], unique=unique, on_conflict=policy))
    assert sum(not row.existed for row in rows) == 1
    assert len({row.pk for row in rows} - {old}) == 1
    assert Message.objects.count() == 2


@committed
def test_of_eight_threads_that_publish_and_run_at_once_one_has_its_effect() -> None:
    def publish(number: int) -> Message:
        row = due(key="k", unique="1h", on_conflict="keep")
        if claim(row.pk):
            assert succeed(row.pk)
        return row

    rows = raced(publish)
    assert len({row.pk for row in rows}) == 1
    assert sum(not row.existed for row in rows) == 1


@committed
def test_messages_with_every_unique_in_a_race_never_have_two_that_were_not_begun() -> None:
    seen: list[int] = []

    def call(number: int) -> None:
        unique = ("scheduled", "live", "10ms", "scheduled")[number % 4]
        for turn in range(5):
            row = due(key="k", unique=unique, on_conflict=("keep", "debounce")[turn % 2] if number % 4 == 3 else "keep")
            seen.append(Message.objects.filter(key="k", state=State.SCHEDULED, deliveries=0).count())
            if number == 7:
                cancel_message(row.pk)
            for run in claim(row.pk):
                if turn % 2:
                    fail(run.id, run.deliveries)
                else:
                    succeed(run.id, run.deliveries)

    answers = at_once(8, call)
    assert [row for row in answers if row is not None and not isinstance(row, KeyConflict)] == []
    assert max(seen) <= 1
    for row in Message.objects.all():
        assert row.transitions.count() == row.moves


@committed
def test_a_handler_and_others_at_once_schedule_one_next_message() -> None:
    first = claimed(key="k")

    def call(number: int) -> Message:
        if number:
            return later(key="k", payload=number, on_conflict="keep")
        return step(first.id, make=later, payload=number)

    rows = raced(call)
    new = rows[0]
    assert new.pk != first.id
    assert {row.pk for row in rows} <= {first.id, new.pk}
    assert Message.objects.count() == 2


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"key": "k"}, {"key": "k", "unique": "scheduled"}])
@pytest.mark.postgresql
def test_a_message_is_scheduled_with_one_statement(options: dict[str, Any]) -> None:
    later(key="first")
    assert count_statements(lambda: later(**options)) == 1


@pytest.mark.postgresql
def test_the_messages_of_a_key_are_found_by_an_index_that_holds_no_other_finished_one() -> None:
    from django_delayq.models.messages import HOLDS_KEY, WAITS_AGAIN

    schedule_messages([{"topic": TOPIC}] * 3_000)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE delayq_message SET key = 'k', state = 'consumed', finished_at = due_at")
        cursor.execute("ANALYZE delayq_message")
    rows = Message.objects.filter(topic=TOPIC, key="k").order_by()
    assert "delayq_held_key" in rows.filter(HOLDS_KEY).explain()
    for condition in (WAITS_AGAIN, HOLDS_KEY, WAITS_AGAIN):
        found = rows.filter(condition).explain(analyze=True)
        assert "Seq Scan" not in found
        assert "Rows Removed by Filter" not in found
    assert "delayq_key" in rows.filter(state__in=sorted(LIVE)).explain()
