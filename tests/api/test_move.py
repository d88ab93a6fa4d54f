"""Messages that wait are moved to another queue, or to another priority."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from django_delayq import (
    InvalidMessage,
    Verdict,
    amove_message,
    cancel_message,
    move_message,
    pause_queue,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Ticket
from tests.support.claims import needs_row_locks
from tests.support.steps import LEASES, TOPIC, at_once, bring, claim, claimed, due, later, log, message, snapshot
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def claim_in(queue: str, pk: int) -> list[int]:
    return [row.id for row in transitions.claim("default", [Ticket(pk)], LEASES, "w", queue=queue)]


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ({"queue": "b"}, "queue default → b"),
        ({"priority": 7}, "priority 0 → 7"),
        ({"queue": "b", "priority": -100}, "queue default → b, priority 0 → -100"),
        ({"queue": "b", "priority": 0}, "queue default → b"),
    ],
)
def test_a_waiting_message_is_moved_and_keeps_the_rest(to: dict[str, Any], told: str) -> None:
    row = later({"n": 1}, key="k", expires="1h")
    before = message(row.pk)
    answer = move_message(row, **to, reason="busy")
    assert (answer.verdict, answer.state, bool(answer)) == (Verdict.MOVED, State.SCHEDULED, True)
    after = message(row.pk)
    changed = {"queue": "default", "priority": 0, **to}
    assert {name: getattr(after, name) for name in changed} == changed
    assert (after.due_at, after.expires_at, after.payload) == (before.due_at, before.expires_at, before.payload)
    assert log(row.pk)[-1].reason == f"{told}: busy"
    assert move_message(row, queue=after.queue, priority=after.priority).verdict == Verdict.MOVED
    assert message(row.pk).moves == 2


def test_by_id_by_key_and_as_a_selection() -> None:
    rows = [later(key=f"k{number}") for number in range(4)]
    assert move_message(rows[0].pk, queue="b")
    assert move_message(topic=TOPIC, key="k1", queue="b")
    assert move_message(Message.objects.filter(queue="default"), queue="b") == {Verdict.MOVED: 2}
    assert {row.queue for row in Message.objects.all()} == {"b"}
    assert move_message(10**9, queue="b").verdict == Verdict.NOT_FOUND
    assert move_message(topic=TOPIC, key="none", queue="b").verdict == Verdict.NOT_FOUND


@pytest.mark.parametrize("where", sorted({*State} - {State.SCHEDULED}))
def test_what_runs_or_has_ended_stays(where: State) -> None:
    pk = bring(where)
    before = snapshot(pk)
    answer = move_message(pk, queue="b", priority=5)
    assert (str(answer), bool(answer)) == (f"too late: {where.value}", False)
    assert snapshot(pk) == before


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ({}, "needs a queue, a priority, or both"),
        ({"queue": "a b"}, "queue"),
        ({"queue": ""}, "queue"),
        ({"priority": 101}, "priority must be a whole number from -100 to 100"),
        ({"priority": True}, "priority"),
    ],
)
def test_an_impossible_move_is_refused(to: dict[str, Any], words: str) -> None:
    row = later()
    with pytest.raises(InvalidMessage, match=words):
        move_message(row, **to)
    assert message(row.pk).moves == 1


def test_a_name_of_another_queue_is_told() -> None:
    with pytest.raises(TypeError, match=r"to \(write queue\)"):
        move_message(1, to="b")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"delay \(write reschedule_message\(\)\)"):
        move_message(1, queue="b", delay=5)  # type: ignore[call-overload]


def test_the_pause_of_the_new_queue_holds_it_and_that_of_the_old_one_no_more() -> None:
    pause_queue("b")
    row = due()
    move_message(row, queue="b")
    assert claim(row.pk) == []
    move_message(row, queue="c")
    pause_queue("default")
    assert claim_in("c", row.pk) == [row.pk]


def test_a_worker_of_the_old_queue_claims_it_no_more() -> None:
    row = due()
    move_message(row, queue="b")
    assert claim_in("default", row.pk) == []
    assert claim_in("b", row.pk) == [row.pk]


@committed
def test_async_code_moves() -> None:
    row = later()
    assert async_to_sync(amove_message)(row, queue="b").verdict == Verdict.MOVED
    assert message(row.pk).queue == "b"


# --- races ------------------------------------------------------------------------------------------------------------


@committed
@pytest.mark.parametrize("goes_first", ["the claim", "the move"])
def test_the_row_decides_between_a_claim_and_a_move(goes_first: str) -> None:
    needs_row_locks()
    pk, found = due().pk, []
    if goes_first == "the claim":
        with unfinished(lambda: claim_in("default", pk)) as go:
            waiting = threading.Thread(target=lambda: found.extend(at_once(1, lambda _n: move_message(pk, queue="b"))))
            waiting.start()
            eventually(waits_for_a_lock, "the move waits")
            go.set()
        waiting.join(PATIENCE)
        assert [str(answer) for answer in found] == ["too late: running"]
        assert message(pk).queue == "default"
        return
    with unfinished(lambda: move_message(pk, queue="b")):
        # A worker passes over a row that is locked.
        assert claim_in("default", pk) == []
    assert claim_in("default", pk) == []
    assert claim_in("b", pk) == [pk]


@committed
def test_of_a_claim_and_a_move_at_the_same_moment_one_is_done() -> None:
    pk = 0

    def act(number: int) -> Any:
        return claim_in("default", pk) if number else move_message(pk, queue="b")

    for _turn in range(20):
        pk = due().pk
        moved, taken = at_once(2, act)
        assert not isinstance(moved, BaseException)
        assert not isinstance(taken, BaseException)
        row = message(pk)
        assert (row.queue, row.state) == (("b", State.SCHEDULED) if moved else ("default", State.RUNNING))
        assert taken == ([] if moved else [pk])


@committed
def test_a_move_and_a_cancel_of_the_same_messages_do_not_deadlock() -> None:
    ids = [later().pk for _number in range(50)]
    rows = Message.objects.filter(pk__in=ids)
    answers = at_once(
        2, lambda number: cancel_message(rows) if number else move_message(rows.order_by("-pk"), queue="b")
    )
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert set(Message.objects.values_list("state", flat=True)) == {State.CANCELLED}
    assert claimed(queue="b").queue == "b"
