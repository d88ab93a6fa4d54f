"""The success of a transactional handler, which is committed with its transaction in one request."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Claimed, Success
from tests.app.models import Effect
from tests.support.rows import unguarded
from tests.support.steps import claim, due, lose, state

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql("commits by a request of its own")]

ACTOR = "worker:w/3"


class Undone(Exception):
    """The end of a transaction whose success was refused."""


def delivered(**options: Any) -> Claimed:
    (row,) = claim(due(**options).pk, worker="w")
    return row


def run(row: Claimed, *, thread: int | None = 3, result: str | None = None) -> bool:
    """Do what a transactional handler and its worker do. Return whether its success was recorded."""
    try:
        with transaction.atomic(durable=True):
            statements("default").begin()
            Effect.objects.create(message_id=row.id, delivery=row.deliveries)
            success = Success(row.id, row.deliveries, "worker:w" if thread is None else ACTOR, result)
            if not transitions.commit_success("default", success, thread):
                raise Undone
    except Undone:
        return False
    return True


def effects() -> int:
    return Effect.objects.count()


def test_a_success_is_committed_with_the_effect_and_its_row_is_that_of_any_success() -> None:
    # The first statement of a session asks how it is; from the second on the commit is one request.
    rows = [delivered() for _ in range(3)]
    assert [run(row) for row in rows] == [True] * 3
    others = [delivered() for _ in range(3)]
    transitions.succeed("default", [Success(row.id, row.deliveries, ACTOR) for row in others])
    names = [field.attname for field in Message._meta.concrete_fields]
    varying = {"id", "due_at", "created_at", "finished_at", "claimed_at", "ready_at"}
    told = [[getattr(Message.objects.get(pk=row.id), name) for name in names if name not in varying] for row in rows]
    assert told == [
        [getattr(Message.objects.get(pk=row.id), name) for name in names if name not in varying] for row in others
    ]
    assert effects() == 3
    assert {move.actor for move in Transition.objects.filter(message=rows[-1].id, to_state="consumed")} == {ACTOR}


def test_the_transaction_is_over_when_the_success_is_recorded() -> None:
    """Another session sees the effect before the block has ended: no round trip is left for the commit."""
    run(delivered())
    row = delivered()
    with transaction.atomic(durable=True):
        statements("default").begin()
        assert connection.connection.info.transaction_status.name == "INTRANS"
        assert transitions.commit_success("default", Success(row.id, row.deliveries, ACTOR), 3)
        assert connection.connection.info.transaction_status.name == "IDLE"
    assert state(row.id) == State.CONSUMED


def test_what_waits_for_the_commit_is_called_once() -> None:
    called: list[int] = []
    for _ in range(2):
        row = delivered()
        with transaction.atomic(durable=True):
            statements("default").begin()
            transaction.on_commit(partial(called.append, row.id))
            transitions.commit_success("default", Success(row.id, row.deliveries, ACTOR), 3)
            assert row.id not in called
    assert len(called) == len(set(called)) == 2


@pytest.mark.parametrize("end", [State.CANCELLED, State.DEAD, State.CONSUMED])
def test_a_success_that_finds_no_live_message_commits_nothing(end: State) -> None:
    run(delivered())
    row = delivered()
    unguarded(Message).filter(pk=row.id).update(state=end, leased_until=None, finished_at=row.due_at)
    assert not run(row)
    assert effects() == 1
    assert state(row.id) == end


@pytest.mark.parametrize("warm", [0, 2])
def test_a_success_of_a_lost_delivery_is_taken_while_the_message_is_live(warm: int) -> None:
    for _ in range(warm):
        run(delivered())
    waits, runs = delivered(), delivered()
    lose(waits.id)
    lose(runs.id)
    claim(runs.id, worker="other")
    assert [run(waits), run(runs)] == [True, True]
    assert [state(waits.id), state(runs.id)] == [State.CONSUMED] * 2
    assert effects() == warm + 2


def test_a_constraint_that_is_checked_at_the_commit_undoes_effect_and_success() -> None:
    run(delivered())
    row = delivered()
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    try:
        with pytest.raises(IntegrityError, match="late_id_key"), transaction.atomic(durable=True):
            statements("default").begin()
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO late VALUES (1), (1)")
            transitions.commit_success("default", Success(row.id, row.deliveries, ACTOR), 3)
        assert state(row.id) == State.RUNNING
        assert run(row)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE late")


@pytest.mark.parametrize("forget", ["DEALLOCATE ALL", "DISCARD PLANS", "DEALLOCATE delayq_success"])
def test_a_session_that_forgets_what_was_prepared_costs_no_success(forget: str) -> None:
    for _ in range(2):
        run(delivered())
    with connection.cursor() as cursor:
        cursor.execute(forget)
    assert [run(delivered()) for _ in range(3)] == [True] * 3
    assert effects() == 5


def test_a_result_and_another_actor_are_recorded_too() -> None:
    run(delivered())
    kept, named = delivered(), delivered()
    assert run(kept, result='{"a": 1}')
    assert run(named, thread=None)
    assert Message.objects.get(pk=kept.id).result == {"a": 1}
    assert Transition.objects.get(message=named.id, to_state="consumed").actor == "worker:w"


def test_an_error_that_the_handler_swallowed_is_not_committed() -> None:
    run(delivered())
    row = delivered()
    with pytest.raises(Exception, match="current transaction is aborted"), transaction.atomic(durable=True):
        statements("default").begin()
        with pytest.raises(Exception, match="division by zero"):
            connection.connection.execute("SELECT 1 / 0")
        transitions.commit_success("default", Success(row.id, row.deliveries, ACTOR), 3)
    assert state(row.id) == State.RUNNING


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_the_transaction_has_the_level_that_the_project_chose(level: str) -> None:
    import psycopg

    run(delivered())
    raw = connection.connection
    raw.isolation_level = psycopg.IsolationLevel[level]
    try:
        row = delivered()
        with transaction.atomic(durable=True):
            statements("default").begin()
            with connection.cursor() as cursor:
                cursor.execute("SHOW transaction_isolation")
                assert cursor.fetchone()[0].replace(" ", "_").upper() == level
            assert transitions.commit_success("default", Success(row.id, row.deliveries, ACTOR), 3)
    finally:
        raw.isolation_level = None
    assert state(row.id) == State.CONSUMED
