"""Many messages with keys are requeued together, and no two live messages ever have one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_delayq import (
    Verdict,
    cancel_message,
    requeue_message,
    schedule_messages,
)
from django_delayq.api.actions import REQUEUE
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.claims import needs_row_locks
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.steps import TOPIC, ago, at_once, bring, claimed, later, moves, state
from tests.support.transactions import unfinished
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

# What is asked of both numbers of messages is the same.
FEW, MANY = 20, 300


def keyed(keys: Iterable[Any], **options: Any) -> list[Any]:
    return [{"topic": TOPIC, "key": key, "delay": "1h", **options} for key in keys]


def ended(keys: Iterable[Any], **options: Any) -> list[int]:
    """Schedule a message with each of these keys and cancel it; return the ids."""
    ids = [row.pk for row in schedule_messages(keyed(keys, **options))]
    assert cancel_message(Message.objects.filter(pk__in=ids)) == {Verdict.CANCELLED: len(ids)}
    return ids


def requeue(ids: list[int], **options: Any) -> Counter[Verdict]:
    return requeue_message(Message.objects.filter(pk__in=ids), **options)


def names(number: int) -> list[str]:
    return [f"{number}.{place:03}" for place in range(number)]


def waiting_keys() -> list[str]:
    waiting = Message.objects.filter(state=State.SCHEDULED, key__isnull=False)
    return [row.key or "" for row in waiting.order_by("key")]


def counted(ids: list[int], verdict: Verdict, **options: Any) -> int:
    """Requeue messages, all of which get this verdict; return the number of statements."""
    found: list[Counter[Verdict]] = []
    number = count_statements(lambda: found.append(requeue(ids, **options)))
    assert found == [{verdict: len(ids)}]
    return number


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
def test_keys_cost_a_requeue_the_same_few_statements_for_few_and_for_many(unique: str) -> None:
    extra = [
        counted(ended(names(number), unique=unique), Verdict.REQUEUED)
        - counted(ended([None] * number), Verdict.REQUEUED)
        for number in (FEW, MANY)
    ]
    assert extra[0] == extra[1] <= 2


@pytest.mark.postgresql("elsewhere a statement writes a few rows of the log")
@pytest.mark.parametrize(
    ("options", "over", "verdict"),
    [
        ({"unique": "1h"}, {}, Verdict.KEY_TAKEN),
        ({"unique": "1h"}, {"finished_at": ago(7200)}, Verdict.REQUEUED),
        ({}, {}, Verdict.KEY_TAKEN),
        ({"expires": "1h"}, {"expires_at": ago(1)}, Verdict.REQUEUED),
    ],
    ids=["held after the end", "held no longer", "waiting", "expired"],
)
def test_keys_of_others_cost_a_requeue_the_same_statements_for_few_and_for_many(
    options: dict[str, Any], over: dict[str, Any], verdict: Verdict
) -> None:
    numbers = []
    for number in (FEW, MANY):
        dead, keys = ended(names(number)), names(number)
        if "unique" in options:
            others = ended(keys, **options)
        else:
            others = [row.pk for row in schedule_messages(keyed(keys, **options))]
        if over:
            unguarded(Message).filter(pk__in=others).update(**over)
        numbers.append(counted(dead, verdict))
    assert numbers[0] == numbers[1] < 30


@pytest.mark.postgresql("elsewhere a statement writes a few rows of the log")
def test_due_times_of_their_own_cost_the_same_statements_for_few_and_for_many() -> None:
    few, many = (ended([None] * number) for number in (FEW, MANY))
    assert counted(few, Verdict.REQUEUED, delay=0, spread="1h") == counted(many, Verdict.REQUEUED, delay=0, spread="1h")
    assert len(set(Message.objects.filter(pk__in=many).values_list("due_at", flat=True))) == MANY


def test_each_of_many_gets_the_answer_that_it_would_get_alone() -> None:
    first, free = ended(["twice", "free"])
    second, taken, runs, held = ended(["twice", "taken", "runs", "held"])
    later(key="taken")
    claimed(key="runs")
    ended(["held"], unique="1h")
    plain, over, gone = bring(State.DEAD), bring(State.CONSUMED), max(Message.objects.values_list("pk", flat=True)) + 9
    ids = [first, free, second, taken, runs, held, plain, over, gone]
    requeued = [first, free, plain]
    answers = REQUEUE.apply("default", ids, reason="why")
    assert [answer.id for answer in answers] == ids
    expected = dict.fromkeys(requeued, Verdict.REQUEUED) | {over: Verdict.TOO_LATE, gone: Verdict.NOT_FOUND}
    assert [answer.verdict for answer in answers] == [expected.get(pk, Verdict.KEY_TAKEN) for pk in ids]
    assert [pk for pk in ids[:-1] if moves(pk)[-1].endswith(">scheduled")] == requeued


def test_a_message_that_holds_its_key_after_its_end_keeps_out_an_earlier_one() -> None:
    (early,) = ended(["k"])
    (holder,) = ended(["k"], unique="1h")
    assert requeue([early, holder]) == {Verdict.KEY_TAKEN: 1, Verdict.REQUEUED: 1}
    assert (state(early), state(holder)) == (State.CANCELLED, State.SCHEDULED)


# --- races ------------------------------------------------------------------------------------------------------------


def begun(pool: ThreadPoolExecutor, ids: list[int], waiting: int) -> Future[Counter[Verdict]]:
    """Begin a requeue in a thread, and return when this number of sessions waits for a lock."""

    def run() -> Counter[Verdict]:
        try:
            return requeue(ids)
        finally:
            connections.close_all()

    future = pool.submit(run)
    eventually(partial(is_waiting, waiting), "the requeue waits")
    return future


def is_waiting(number: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0] == number)


@committed
def test_a_message_that_is_scheduled_meanwhile_keeps_out_one_of_many() -> None:
    needs_row_locks()
    ids = ended(names(FEW))
    with ThreadPoolExecutor(1) as pool:
        with unfinished(lambda: later(key=f"{FEW}.007")):
            future = begun(pool, ids, 1)
        assert future.result(PATIENCE) == {Verdict.REQUEUED: FEW - 1, Verdict.KEY_TAKEN: 1}
    assert state(ids[7]) == State.CANCELLED


@committed
def test_two_that_requeue_the_same_keys_in_opposite_order_do_not_deadlock() -> None:
    needs_row_locks()
    # By their ids the keys are in opposite order.
    one, other = ([pk for key in keys for pk in ended([key])] for keys in ("axb", "bya"))

    def schedule_in_vain() -> None:
        schedule_messages(keyed("xy"))
        transaction.set_rollback(True)

    with ThreadPoolExecutor(2) as pool:
        # Each has taken the first of its keys and waits for the second, which is free in the end.
        with unfinished(schedule_in_vain):
            futures = [begun(pool, ids, waiting) for waiting, ids in enumerate((one, other), 1)]
        counts = sum((future.result(PATIENCE) for future in futures), Counter[Verdict]())
    assert counts == {Verdict.REQUEUED: 4, Verdict.KEY_TAKEN: 2}
    assert waiting_keys() == ["a", "b", "x", "y"]


@committed
def test_one_message_has_a_key_however_many_requeue_and_schedule_at_once() -> None:
    keys = names(FEW)
    generations = [ended(keys) for _ in range(3)]

    def schedule() -> None:
        for key in reversed(keys):
            later(key=key, on_conflict="keep")

    def schedule_together() -> None:
        schedule_messages(keyed(keys, on_conflict="keep"))

    calls: list[Callable[[], object]] = [partial(requeue, ids) for ids in generations]
    calls += [schedule, schedule_together]
    answers = at_once(len(calls), lambda number: calls[number]())
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    for answer in answers[:3]:
        assert isinstance(answer, Counter)
        assert answer[Verdict.REQUEUED] + answer[Verdict.KEY_TAKEN] == FEW
    assert waiting_keys() == keys
