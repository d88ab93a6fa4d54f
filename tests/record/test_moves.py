"""The record makes exactly the moves of the table, and logs each of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from itertools import product
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Q

from django_delayq import cancel_message, requeue_message, reschedule_message, run_message
from django_delayq.core.actors import acting_as
from django_delayq.core.exceptions import InvalidTransition
from django_delayq.core.states import MOVES, State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message, Transition
from django_delayq.models.messages import LogRow
from django_delayq.record import crashes, transitions
from django_delayq.record.sql.moves import Decision, move
from django_delayq.record.sql.rows import Success
from tests.support.rows import unguarded
from tests.support.steps import ago, bring, claim, due, fail, log, lose, message, moves, snapshot, succeed

pytestmark = pytest.mark.django_db

S, R, CON, D, CAN, E = (
    State.SCHEDULED,
    State.RUNNING,
    State.CONSUMED,
    State.DEAD,
    State.CANCELLED,
    State.EXPIRED,
)


class Undo(Exception):
    """An exception that rolls a transaction back."""


def lost() -> int:
    """Make a message that is scheduled again after a crashed delivery."""
    id_ = bring(R)
    lose(id_)
    return id_


def doomed() -> int:
    """Make a message that is running with a requested cancel."""
    id_ = bring(R)
    assert transitions.cancel("default", [id_])[0].verdict == Verdict.REQUESTED
    return id_


def expiring() -> int:
    return due(due_at=ago(30), expires=1).pk


Prepare = Callable[[], int]
Act = Callable[[int], object]

# The way to make each move: the preparation, and the call that makes the move.
WAYS: dict[tuple[State | None, State], tuple[Prepare, Act]] = {
    (S, S): (lambda: bring(S), lambda id_: reschedule_message(id_, delay=60)),
    (S, R): (lambda: bring(S), claim),
    (S, CAN): (lambda: bring(S), cancel_message),
    (S, E): (expiring, lambda id_: transitions.expire("default", actor="janitor")),
    (S, D): (lambda: bring(S), lambda id_: transitions.give_up("default", [id_], reason="why")),
    (S, CON): (lost, succeed),
    (R, CON): (lambda: bring(R), succeed),
    (R, S): (lambda: bring(R), fail),
    (R, D): (lambda: bring(R), lambda id_: fail(id_, dead=True)),
    (R, CAN): (doomed, fail),
    (R, R): (lambda: bring(R), cancel_message),
    (D, S): (lambda: bring(D), requeue_message),
    (E, S): (lambda: bring(E), requeue_message),
    (CAN, S): (lambda: bring(CAN), requeue_message),
}


def name(pair: tuple[State | None, State]) -> str:
    return " to ".join("nothing" if state is None else state.value for state in pair)


PAIRS = pytest.mark.parametrize("pair", WAYS, ids=name)


def test_every_move_but_the_first_has_a_way_to_be_made() -> None:
    assert WAYS.keys() | {(None, S)} == MOVES.keys()


@PAIRS
def test_a_move_writes_one_log_row_with_its_states_or_is_rolled_back_with_it(pair: tuple[State, State]) -> None:
    prepare, act = WAYS[pair]
    id_ = prepare()
    before, rows = message(id_), snapshot(id_)
    assert before.state == pair[0]
    with pytest.raises(Undo), transaction.atomic():
        act(id_)
        assert snapshot(id_) != rows
        raise Undo
    assert snapshot(id_) == rows
    act(id_)
    after = message(id_)
    assert after.state == pair[1]
    assert (after.worker == "") == (after.state != R)
    assert after.moves == before.moves + 1
    row = after.transitions.last()
    assert row is not None
    assert (row.from_state, row.to_state, row.number) == (*pair, after.moves)
    assert row.at >= before.created_at
    assert row.due_at == after.due_at
    assert row.delivery == after.deliveries
    assert row.actor
    assert after.transitions.count() == after.moves
    assert snapshot(id_)[1][:-1] == rows[1]


ILLEGAL = [pair for pair in product(State, State) if pair not in MOVES]


@pytest.mark.parametrize("pair", ILLEGAL, ids=name)
def test_a_move_outside_the_table_is_refused(pair: tuple[State, State]) -> None:
    id_ = bring(pair[0])
    before = snapshot(id_)
    with pytest.raises(InvalidTransition, match=f"{pair[0]} → {pair[1]}"):
        move("default", Q(pk=id_), lambda message, now: Decision(pair[1]), actor="test")
    assert snapshot(id_) == before


@pytest.mark.parametrize("where", [CON, D, CAN, E])
def test_no_report_of_a_delivery_changes_a_finished_message(where: State) -> None:
    id_ = bring(where)
    before = snapshot(id_)
    for delivery in (0, 1, 2):
        assert not succeed(id_, delivery)
        assert not fail(id_, delivery)
        assert not fail(id_, delivery, dead=True)
    assert claim(id_) == []
    assert snapshot(id_) == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(
    connection.features.has_select_for_update, reason="the rows are locked: nobody can move them in between"
)
@pytest.mark.parametrize("is_within", [False, True], ids=["its own transaction", "a transaction of the caller"])
def test_a_move_of_another_process_in_between_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, *, is_within: bool
) -> None:
    id_ = bring(S)
    # Then a transaction of the caller locks nothing before it writes.
    monkeypatch.delitem(connection.settings_dict["OPTIONS"], "transaction_mode")
    connection.close()

    def decide(row: Message, now: Any) -> Decision:
        other = sqlite3.connect(connection.settings_dict["NAME"], timeout=0)
        with closing(other), suppress(sqlite3.OperationalError), other:
            other.execute("UPDATE delayq_message SET moves = 99 WHERE id = ?", [id_])
        return Decision(CAN)

    with suppress(OperationalError), transaction.atomic() if is_within else nullcontext():
        move("default", Q(pk=id_), decide, actor="test")
    connection.close()
    assert (message(id_).state, message(id_).moves) in ((S, 99), (CAN, 2))
    assert len(log(id_)) == (1 if message(id_).state == S else 2)
    assert is_within or message(id_).state == CAN


def test_a_usual_life_has_its_log_in_the_row_of_the_message() -> None:
    id_ = due().pk
    with acting_as("user:anna"):
        other = due().pk
    claimed_at = claim(id_, worker="a")[0].claimed_at
    transitions.succeed("default", [Success(id_, 1, "worker:a/3")])
    rows = message(id_).transitions.all()
    assert [row.actor for row in rows][1:] == ["worker:a", "worker:a/3"]
    assert [row.at for row in rows] == [message(id_).created_at, claimed_at, message(id_).finished_at]
    assert [row.actor for row in log(other)] == ["user:anna"]
    assert LogRow.objects.count() == (0 if connection.vendor == "postgresql" else 4)


def test_the_success_of_a_crashed_delivery_leaves_the_rows_of_the_next_one_as_they_are() -> None:
    id_ = lost()
    claim(id_, worker="b")
    logged = snapshot(id_)[1]
    assert succeed(id_, 1)
    rows = log(id_)
    assert snapshot(id_)[1][:-1] == logged
    assert [row.delivery for row in rows] == [0, 1, 1, 2, 1]
    assert rows[3].actor == "worker:b"


def test_a_claim_keeps_its_worker_when_its_delivery_is_marked_as_alone() -> None:
    ids = [bring(R) for _ in range(3)]
    logged = [snapshot(id_)[1] for id_ in ids]
    for id_ in ids:
        crashes.mark_alone("default", id_, 1, "a")
    assert [snapshot(id_)[1] for id_ in ids] == logged
    assert succeed(ids[0])
    assert fail(ids[1])
    lose(ids[2])
    assert [snapshot(id_)[1][:-1] for id_ in ids] == logged


def test_the_log_of_a_long_life_shows_every_move_in_order() -> None:
    id_ = due().pk
    claim(id_, worker="a")
    fail(id_, 1, error="first", traceback="where")
    reschedule_message(id_, due_at=ago(), reason="at once")
    claim(id_, worker="b")
    fail(id_, 2, dead=True, error="second")
    requeue_message(id_, reason="fixed")
    run_message(id_)
    unguarded(Message).filter(pk=id_).update(due_at=ago())
    claim(id_, worker="c")
    succeed(id_, 3)
    assert moves(id_) == [
        "scheduled",
        "scheduled>running",
        "running>scheduled",
        "scheduled>scheduled",
        "scheduled>running",
        "running>dead",
        "dead>scheduled",
        "scheduled>scheduled",
        "scheduled>running",
        "running>consumed",
    ]
    rows = list(message(id_).transitions.all())
    assert [row.delivery for row in rows] == [0, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [row.error for row in rows if row.error] == ["first", "second"]
    assert rows[2].traceback == "where"
    assert [row.reason for row in rows if row.reason] == ["at once", "fixed", "run now"]
    assert [row.actor for row in rows if row.to_state == R] == ["worker:a", "worker:b", "worker:c"]
    assert rows == sorted(rows, key=lambda row: row.at)


def test_a_row_that_was_copied_from_postgresql_can_be_moved_elsewhere() -> None:
    """Only the row of such a message has the first part of its log."""
    id_ = due().pk
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM delayq_log")
    unguarded(Message).filter(pk=id_).update(created_by="loaddata")
    assert transitions.cancel("default", [id_])[0].verdict == Verdict.CANCELLED
    logged = Transition.objects.filter(message_id=id_).order_by("number")
    assert [(row.number, row.to_state) for row in logged] == [(1, S), (2, CAN)]
    assert logged.values_list("actor", flat=True)[0] == "loaddata"
