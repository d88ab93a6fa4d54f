"""A topic and key have one live message at most, however many callers schedule at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import (
    KeyConflict,
    OnConflict,
    Verdict,
    cancel_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import held_keys, reads, transitions
from django_delayq.record.sql.rows import Failure
from tests.support.claims import DB, needs_row_locks
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.steps import TOPIC, at_once, claim, claimed, fail, later, log, lose, message, moves, state, succeed
from tests.support.together import Together
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

T = TypeVar("T")

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def test_no_error_shows_the_key() -> None:
    later(key="s3cret")
    with pytest.raises(KeyConflict) as caught:
        later(key="s3cret")
    assert "s3cret" not in str(caught.value)


def test_a_key_belongs_to_its_topic() -> None:
    later(key="k")
    schedule_message("record.other", key="k")
    later(key="K")
    later()
    later()
    assert Message.objects.count() == 5


def test_replace_gives_the_old_message_everything_new() -> None:
    first = later(key="k", payload=1, priority=1, expires="1h", retry=["4m"], headers={"h": 1}, timeout=3)
    new = {"payload": 2, "priority": 9, "queue": "slow", "max_attempts": 5, "lease": 9}
    second = later(key="k", delay="2h", expires="2h", on_conflict="replace", **new)
    assert (second.pk, second.existed) == (first.pk, True)
    row = message(first.pk)
    assert {name: getattr(row, name) for name in new} == new
    assert (row.headers, row.retry, row.timeout) == ({}, None, None)
    assert row.due_at - first.due_at > timedelta(hours=1)
    assert row.expires_at == row.due_at + timedelta(hours=2)
    assert moves(first.pk) == ["scheduled", "scheduled>scheduled"]
    last = log(first.pk)[-1]
    assert last.reason == "replaced"


def test_replace_leaves_nothing_of_the_attempts_of_the_old_content() -> None:
    id_ = claimed(key="k").id
    fail(id_)
    assert (message(id_).attempts, message(id_).error) == (1, "it broke")
    assert later(key="k", on_conflict="replace").pk == id_
    assert (message(id_).attempts, message(id_).error) == (0, "")


def test_debounce_pushes_the_due_time_out_and_keeps_the_rest() -> None:
    first = later(key="k", payload=1, priority=1, expires="1h")
    second = later(key="k", payload=2, priority=2, delay="20m", on_conflict=OnConflict.DEBOUNCE)
    assert (second.pk, second.payload, second.priority, second.existed) == (first.pk, 1, 1, True)
    assert second.due_at - first.due_at >= timedelta(minutes=10)
    assert second.expires_at == second.due_at + timedelta(hours=1)
    # It never becomes due earlier.
    third = later(key="k", delay="1m", on_conflict="debounce")
    assert third.due_at == second.due_at == message(first.pk).due_at


def test_a_running_message_is_kept() -> None:
    row = claimed(key="k")
    kept = later(key="k", on_conflict="keep")
    assert (kept.pk, kept.state, kept.existed) == (row.id, State.RUNNING, True)


def test_a_message_that_may_still_succeed_can_be_neither_replaced_nor_debounced_nor_merged() -> None:
    row = claimed(payload={"v": 1}, key="k")
    lose(row.id)
    for policy in ("replace", "debounce", "merge", "merge_debounce"):
        with pytest.raises(KeyConflict):
            later({"v": 2}, key="k", on_conflict=policy)
    assert succeed(row.id)
    assert (state(row.id), message(row.id).payload) == (State.CONSUMED, {"v": 1})


def test_a_conflict_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        later(key="k")
        for policy in OnConflict:
            try:
                later(key="k", on_conflict=policy)
            except KeyConflict:
                assert policy == "error"
        later()
    assert Message.objects.count() == 2


# --- many at once -----------------------------------------------------------------------------------------------------


def keyed(keys: Iterable[str], **options: Any) -> list[Any]:
    return [{"topic": TOPIC, "key": key, "delay": "1h", **options} for key in keys]


def test_the_log_of_many_retried_messages_is_read_in_parts() -> None:
    keys, choice = [*map(str, range(1_002))], {"expires": "2h", "on_conflict": "debounce"}
    running = claim(*[row.pk for row in schedule_messages(keyed(keys, delay=0, **choice))])
    hour = timedelta(hours=1)
    transitions.fail(DB, [Failure(row.id, row.deliveries, "worker:a", delay=hour) for row in running])
    with CaptureQueriesContext(connection) as captured:
        again = schedule_messages(keyed(keys, delay="3h", **choice))
    assert {row.expires_at - row.due_at for row in again if row.expires_at} == {2 * hour}
    assert len([query for query in captured if 'FROM "delayq_transition"' in query["sql"]]) == 2


@committed
def test_callers_with_the_same_keys_in_opposite_order_do_not_deadlock() -> None:
    needs_row_locks()
    names = [f"k{number}" for number in range(30)]
    barrier = threading.Barrier(2)

    def schedule(number: int) -> None:
        for turn in range(10):
            barrier.wait(60)
            keys = names if number else names[::-1]
            schedule_messages([{"topic": f"t.{turn}", "key": key, "on_conflict": "keep"} for key in keys])

    assert at_once(2, schedule) == [None, None]
    assert Message.objects.count() == 300


@committed
def test_callers_on_sqlite_with_its_default_transaction_mode_wait_for_each_other() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("needs SQLite")
    options = connections.settings[DB]["OPTIONS"]
    mode = options.pop("transaction_mode")
    connections.close_all()

    def work(number: int) -> None:
        for turn in range(15):
            key = f"{number}-{turn}"
            schedule_message("t.ok", key=key, delay=60)
            assert cancel_message(topic="t.ok", key=key)

    try:
        assert at_once(3, work) == [None] * 3
    finally:
        connections.close_all()
        options["transaction_mode"] = mode


@committed
@pytest.mark.postgresql("needs COPY")
def test_messages_with_free_keys_travel_together() -> None:
    taken = schedule_message(TOPIC, key="k7", delay="1h")
    keys = [f"k{number}" for number in range(50)]
    found = schedule_messages([{"topic": TOPIC}, *keyed(keys, on_conflict="keep"), {"topic": TOPIC}])
    assert [message.key for message in found] == [None, *keys, None]
    assert [message.pk for message in found if message.existed] == [taken.pk]
    with connection.cursor() as cursor:
        # PostgreSQL numbers the statements of a transaction in the rows that they write.
        rows = "FROM delayq_message WHERE key IS NOT NULL AND id <> %s"
        cursor.execute(f"SELECT count(DISTINCT cmin::text) {rows}", [taken.pk])
        assert cursor.fetchone() == (1,)


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_messages_that_are_kept_are_read_together(unique: str) -> None:
    keys = [f"k{number}" for number in range(30)]
    taken = schedule_messages(keyed(keys, unique=unique, payload={"v": 1}))
    assert run_message(taken[0].pk)
    if unique == "1h":
        cancel_message(taken[1].pk)
    found: list[Message] = []

    def again(some: list[str]) -> None:
        found[:] = schedule_messages(keyed(some, unique=unique, on_conflict="keep"))

    assert count_statements(lambda: again(keys)) == count_statements(lambda: again(keys[:2]))
    again([*keys, keys[0]])
    assert [message.pk for message in found] == [message.pk for message in (*taken, taken[0])]
    assert {message.existed for message in found} == {True}
    assert [message.payload for message in found] == [{"v": 1}] * 31
    assert Message.objects.count() == 30


@pytest.mark.parametrize("on_conflict", ["replace", "debounce", "merge", "merge_debounce"])
def test_messages_that_are_changed_are_changed_together(on_conflict: str) -> None:
    keys = [f"k{number}" for number in range(30)]
    taken = schedule_messages(keyed(keys, payload={"old": 1}))
    found: list[Message] = []

    def again(some: list[str]) -> None:
        given = keyed(some, on_conflict=on_conflict)
        news: Any = [{**new, "payload": {"new": new["key"]}, "delay": "2h"} for new in given]
        found[:] = schedule_messages(news)

    assert count_statements(lambda: again(keys[2:])) == count_statements(lambda: again(keys[:2]))
    again(keys)
    assert [message.pk for message in found] == [message.pk for message in taken]
    for kept, key in zip(found, keys, strict=True):
        old = {} if on_conflict == "replace" else {"old": 1}
        new = {} if on_conflict == "debounce" else {"new": key}
        assert (kept.payload, kept.existed, kept.key) == ({**old, **new}, True, key)
        assert (kept.due_at - taken[0].due_at > timedelta(minutes=50)) == (on_conflict != "merge")
        assert kept.moves == log(kept.pk)[-1].number == 3


def test_a_key_that_one_call_keeps_and_another_one_replaces_is_taken_in_turn() -> None:
    old = schedule_message(TOPIC, 1, key="a", delay="1h")
    keep, replacing = keyed("a", on_conflict="keep"), keyed("a", on_conflict="replace", payload=2)
    found = schedule_messages([*keep, *replacing, *keep])
    assert [(message.pk, message.payload) for message in found] == [(old.pk, 1), (old.pk, 2), (old.pk, 2)]


def test_of_many_that_are_to_be_kept_those_whose_time_is_over_make_way() -> None:
    over = schedule_messages(keyed(["a", "b"], unique="1h"))
    late = schedule_messages([{"topic": TOPIC, "key": "c", "delay": 0, "expires": "1ms"}])
    kept = schedule_messages(keyed(["d"]))
    cancel_message(Message.objects.filter(pk__in=[message.pk for message in over]))
    unguarded(Message).filter(pk=over[0].pk).update(finished_at=timezone.now() - timedelta(hours=2))
    eventually(lambda: late[0].is_expired(reads.now(DB)), "the end of its time")
    found = schedule_messages(keyed(["a", "b", "c", "d"], on_conflict="keep"))
    assert [message.existed for message in found] == [False, True, False, True]
    assert [found[1].pk, found[3].pk] == [over[1].pk, kept[0].pk]


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_what_a_message_of_many_holds_its_key_for_is_stored(unique: str) -> None:
    texts = ["a", "b\\c", "ä", "\\N"]
    one = schedule_message(TOPIC, key="one", unique=unique, delay="1h")
    many = schedule_messages(keyed(texts, unique=unique))
    assert [each.key for each in many] == texts
    for each in many:
        stored = Message.objects.get(pk=each.pk)
        assert (stored.key, stored.key_deliveries, stored.key_for) == (each.key, one.key_deliveries, one.key_for)


def test_a_key_that_comes_twice_in_one_call_meets_itself() -> None:
    with pytest.raises(KeyConflict):
        schedule_messages(keyed(["a", "b", "a"]))
    assert not Message.objects.exists()
    one, two, again = schedule_messages(keyed(["a", "b", "a"], on_conflict="keep"))
    assert (again.pk, again.existed, two.existed) == (one.pk, True, False)


@committed
@pytest.mark.parametrize("on_conflict", ["replace", "debounce", "merge"])
@pytest.mark.parametrize(
    ("act", "verdict"),
    [(cancel_message, Verdict.CANCELLED), (partial(reschedule_message, delay="2h"), Verdict.RESCHEDULED)],
    ids=["cancel", "reschedule"],
)
@pytest.mark.parametrize("goes_first", ["the action", "the call"])
def test_bulk_calls_lock_messages_in_one_order(
    on_conflict: str, act: Callable[[Any], Any], verdict: Verdict, goes_first: str
) -> None:
    needs_row_locks()
    # In the order of the keys these are the other way round than in that of the ids.
    first, second = schedule_message(TOPIC, key="b", delay="1h"), schedule_message(TOPIC, key="a", delay="1h")

    def waits(number: int) -> bool:
        return waiting_for_locks() == number

    both: dict[str, Callable[[], Any]] = {
        "the action": lambda: act(Message.objects.filter(topic=TOPIC)),
        "the call": lambda: schedule_messages(keyed("ab", on_conflict=on_conflict)),
    }
    with ThreadPoolExecutor(2) as pool:
        # Who waits holds what it has locked before, and the first to come gets the first message.
        with unfinished(lambda: Message.objects.select_for_update().get(pk=first.pk)):
            started = {}
            for number, who in enumerate(sorted(both, key=lambda who: who != goes_first), 1):
                started[who] = pool.submit(closing(both[who]))
                eventually(partial(waits, number), f"{who} waits")
        assert started["the action"].result(PATIENCE) == {verdict: 2}
        assert {message.key for message in started["the call"].result(PATIENCE)} == {"a", "b"}
    assert second.key == "a"


def waiting_for_locks() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
        return int(cursor.fetchone()[0])


def closing(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that closes the connections of its thread after the call."""

    def run() -> T:
        try:
            return call()
        finally:
            connections.close_all()

    return run


@pytest.mark.postgresql("needs row locks")
def test_bulk_calls_that_meet_a_message_just_made_do_not_deadlock(
    together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, met = held_keys.is_over, threading.Event()

    def is_over_when_the_other_call_waits(*arguments: Any) -> Any:
        if not met.is_set():
            met.set()
            eventually(waits_for_a_lock, "the second call waits")
        return is_over(*arguments)

    def second() -> list[Message]:
        eventually(waits_for_a_lock, "the first call waits for the message with the key b")
        go.set()
        assert met.wait(PATIENCE)
        return schedule_messages(keyed("ab", on_conflict="debounce"))

    monkeypatch.setattr(held_keys, "is_over", is_over_when_the_other_call_waits)
    with unfinished(lambda: later(key="b")) as go:
        one, other = together(lambda: schedule_messages(keyed("ab", on_conflict="debounce")), second)
    assert [message.pk for message in one] == [message.pk for message in other]
