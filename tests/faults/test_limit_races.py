"""Processes that admit at the same moment never let more begin than a limit allows, and do not deadlock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import admission, transitions
from django_delayq.record.sql import limit_statements, statements
from django_delayq.record.sql.rows import Success
from django_delayq.record.sql.sessions import lock_timeout
from tests.support import limits_oracle as oracle
from tests.support.limits import DB, Declare, admit, fail, states
from tests.support.rows import unguarded
from tests.support.steps import at_once
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

THREADS = 6


def due(number: int, **options: Any) -> list[Message]:
    past = timezone.now() - timedelta(seconds=1)
    return [schedule_message("l.one", due_at=past, **options) for _ in range(number)]


def answers(found: list[Any]) -> list[Any]:
    errors = [one for one in found if isinstance(one, BaseException)]
    assert not errors, errors
    return found


def may_pause() -> None:
    """Let this transaction pause: on a busy machine others take longer than a limit lets it."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")


def test_processes_that_admit_at_once_keep_to_the_limit_together(declare: Declare) -> None:
    declare("l.one", limit=2)
    for _round in range(5):
        made = due(2 * THREADS, limit_key=f"round-{_round}")
        parts = [made[number::THREADS] for number in range(THREADS)]
        begun = answers(at_once(THREADS, lambda number: admit(*parts[number])))  # noqa: B023  at once
        assert sum(map(len, begun)) == 2
        assert sorted(states(*made)) == [State.RUNNING] * 2 + [State.SCHEDULED] * (2 * THREADS - 2)
        for pk in (pk for some in begun for pk in some):
            assert transitions.succeed(DB, [Success(pk, 1, "worker:w")])
        # A place that becomes free is given on once, to the next in the line.
        left = [message for message in made if states(message) == [State.SCHEDULED]]
        begun = answers(at_once(THREADS, lambda number: admit(*left)))  # noqa: B023  at once
        assert sorted(pk for some in begun for pk in some) == [message.pk for message in left[:2]]


def test_deliveries_under_two_limits_deadlock_in_no_order(declare: Declare, queue_limits: Any) -> None:
    declare("l.one", limit=2)
    queue_limits(default={"limit": 3})

    def work(number: int) -> None:
        for _round in range(6):
            made = due(2, limit_key=f"c-{number % 2}")
            begun = admit(*Message.objects.filter(state=State.SCHEDULED), *made)
            for pk in begun:
                transitions.succeed(DB, [Success(pk, 1, "worker:w")])
            admission.tidy(DB)

    answers(at_once(THREADS, work))
    assert oracle.faults(admission.limits_of) == []


@pytest.mark.postgresql("one process writes at a time")
def test_a_claim_counts_what_others_have_committed_whatever_the_level_of_the_session(declare: Declare) -> None:
    declare("l.one", limit=2)
    made = due(2 * THREADS)

    def step(number: int) -> list[int]:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_isolation = 'serializable'")
        connection.connection.delayq_session = None
        return admit(*made[number::THREADS])

    begun = answers(at_once(THREADS, step))
    assert sum(map(len, begun)) == 2


@pytest.mark.postgresql("needs row locks")
def test_a_message_that_is_locked_is_left_for_the_next_time(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = due(2)
    with unfinished(lambda: Message.objects.select_for_update().get(pk=first.pk)):
        assert admit(first, second) == [second.pk]
    assert states(first, second) == [State.SCHEDULED, State.RUNNING]


def replace(message: Message) -> None:
    unguarded(Message).filter(pk=message.pk).update(limit_key="b")


@pytest.mark.parametrize(
    ("runs", "meanwhile"),
    [(False, replace), (True, partial(fail, delay=timedelta(0)))],
    ids=["that is replaced meanwhile", "that was running a moment ago"],
)
def test_a_message_that_changes_meanwhile_is_left_for_the_next_time(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, runs: bool, meanwhile: Callable[[Message], None]
) -> None:
    declare("l.one", limit=1)
    (message,) = due(1, limit_key="a")
    assert not runs or admit(message) == [message.pk]
    kind = type(statements(DB))
    facts = kind.facts

    def read_and_change(self: Any, ids: Any) -> Any:
        found = facts(self, ids)
        meanwhile(message)
        return found

    monkeypatch.setattr(kind, "facts", read_and_change)
    assert admit(message) == []
    assert states(message) == [State.SCHEDULED]


@pytest.mark.postgresql("one process writes at a time")
def test_claims_of_one_transaction_deadlock_in_no_order(declare: Declare) -> None:
    topics = ["l.one", "l.both"]
    for topic in topics:
        declare(topic, limit=5)
    made = {topic: [schedule_message(topic) for _ in range(2)] for topic in topics}
    begun_by: set[int] = set()

    def turn(number: int) -> list[int]:
        """Claim as a worker without Redis does, from one queue after another."""
        begun: list[int] = []
        with transitions.exclusively(DB):
            for topic in topics if number else reversed(topics):
                begun += admit(made[topic][number])
                may_pause()
                begun_by.add(number)
                eventually(lambda: len(begun_by) == 2 or waits_for_a_lock(), "the other one is here too, or waits")
        return begun

    assert sum(map(len, answers(at_once(2, turn)))) == 4


@pytest.mark.postgresql("one process writes at a time")
def test_a_limit_that_is_being_looked_at_keeps_only_its_own_messages_waiting(declare: Declare) -> None:
    declare("l.one", limit=1)
    (limited,) = due(1)
    free = schedule_message("l.free")

    def look() -> None:
        limit_statements(DB).lock({"topic l.one"})
        may_pause()

    with unfinished(look), lock_timeout(50):
        assert admit(free) == [free.pk]
        with pytest.raises(OperationalError):
            admit(limited)
    assert admit(limited) == [limited.pk]
