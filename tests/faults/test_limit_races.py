"""Processes that admit and promote at the same moment never let more begin than a limit allows, and forget nobody."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import admission, transitions
from django_delayq.record.sql import limit_statements
from django_delayq.record.sql.rows import Success, Ticket
from django_delayq.record.sql.sessions import lock_timeout
from tests.support import limits_oracle as oracle
from tests.support.limits import DB, LEASES, Declare, fail, promote, states, succeed
from tests.support.steps import at_once
from tests.support.transactions import unfinished

pytestmark = pytest.mark.django_db(transaction=True)

THREADS = 6


def due(number: int, **options: Any) -> list[Message]:
    past = timezone.now() - timedelta(seconds=1)
    return [schedule_message("l.one", due_at=past, **options) for _ in range(number)]


def admit(messages: list[Message]) -> list[int]:
    claimed = admission.claim(DB, [Ticket(message.pk) for message in messages], LEASES, "w").claimed
    return [row.id for row in claimed]


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
        begun = answers(at_once(THREADS, lambda number: admit(parts[number])))  # noqa: B023  at once
        assert sum(map(len, begun)) == 2
        assert sorted(states(*made)) == [State.LIMITED] * (2 * THREADS - 2) + [State.RUNNING] * 2


def test_processes_that_take_the_same_messages_begin_each_once(declare: Declare) -> None:
    declare("l.one", limit=3)
    made = due(6)
    begun = answers(at_once(THREADS, lambda number: admit(made)))
    assert sorted(pk for some in begun for pk in some) == [message.pk for message in made[:3]]


def test_a_message_that_becomes_limited_while_its_place_becomes_free_is_promoted(declare: Declare) -> None:
    declare("l.one", limit=1)
    for _round in range(10):
        first, second = due(2, limit_key=f"round-{_round}")
        assert admit([first]) == [first.pk]

        def step(number: int, ending: Message = first, new: Message = second, key: int = _round) -> object:
            if number:
                return admit([new])
            succeed(ending)
            return promote(f"topic l.one key round-{key}")

        answers(at_once(2, step))
        assert Message.objects.get(pk=second.pk).state != State.LIMITED


def test_processes_that_promote_at_once_fill_each_place_once(declare: Declare) -> None:
    declare("l.one", limit=2)
    made = due(10)
    admit(made)
    for message in made[:2]:
        succeed(message)
    found = answers(at_once(THREADS, lambda number: promote("topic l.one")))
    assert sorted(pk for some in found for pk in some) == [made[2].pk, made[3].pk]


def test_deliveries_under_two_limits_deadlock_in_no_order(
    declare: Declare, queue_limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare("l.one", limit=2)
    queue_limits(default={"limit": 3})

    def work(number: int) -> None:
        for _round in range(6):
            made = due(2, limit_key=f"c-{number % 2}")
            begun = admit([*Message.objects.filter(state=State.SCHEDULED), *made])
            for pk in begun:
                transitions.succeed(DB, [Success(pk, 1, "worker:w")])
            names = admission.names_of(DB, begun) | {"queue default", "topic l.one key c-0"}
            admission.promote(DB, names, "worker:w")
            admission.tidy(DB)

    answers(at_once(THREADS, work))
    assert oracle.faults(admission.limits_of) == []


def test_a_message_that_is_locked_is_left_for_the_next_time(declare: Declare) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs row locks")
    declare("l.one", limit=1)
    first, second = due(2)
    with unfinished(lambda: Message.objects.select_for_update().get(pk=first.pk)):
        assert admit([first, second]) == [second.pk]
    assert states(first, second) == [State.SCHEDULED, State.RUNNING]


@pytest.mark.parametrize(
    ("sql", "terms"),
    [
        ("COUNTS", {"longest": 12.0}),
        ("WAITING", {"rooms": [1], "full": ["queue full"]}),
        ("DROP_PLACES", {}),
        ("LINES", {"after": "", "limit": 5}),
    ],
)
def test_lines_are_read_along_their_index_although_nothing_was_limited_before(
    declare: Declare, sql: str, terms: dict[str, Any]
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("asks PostgreSQL's planner")
    from django_delayq.record.sql import postgresql_limited as postgresql_limits

    declare("l.one", limit=1)
    made = due(20)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
        admit(made)
        with transaction.atomic():
            # The table is small.
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute(f"EXPLAIN {getattr(postgresql_limits, sql)}", {"names": ["topic l.one"], **terms})
            plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "delayq_limited on" in plan, plan
    assert "delayq_limited_due" not in plan, plan


def test_a_process_that_freezes_does_not_keep_a_limit() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("one process writes at a time")
    with transaction.atomic(), connection.cursor() as cursor:
        limit_statements(DB).lock({"topic l.one"})
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("5s",)


def test_a_message_that_is_replaced_meanwhile_is_left_for_the_next_time(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare("l.one", limit=1)
    (message,) = due(1, limit_key="a")
    statements = limit_statements(DB)
    topics_of = type(statements).topics_of

    def read_and_replace(self: Any, ids: Any) -> Any:
        found = topics_of(self, ids)
        Message._base_manager.filter(pk=message.pk).update(limit_key="b")
        return found

    monkeypatch.setattr(type(statements), "topics_of", read_and_replace)
    assert admit([message]) == []
    assert states(message) == [State.SCHEDULED]


def test_a_message_that_was_running_a_moment_ago_is_left_for_the_next_time(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare("l.one", limit=1)
    (message,) = due(1)
    assert admit([message]) == [message.pk]
    statements = type(limit_statements(DB))
    topics_of = statements.topics_of

    def read_and_fail(self: Any, ids: Any) -> Any:
        found = topics_of(self, ids)
        fail(message, delay=timedelta(0))
        return found

    monkeypatch.setattr(statements, "topics_of", read_and_fail)
    assert admit([message]) == []
    assert states(message) == [State.SCHEDULED]


def test_claims_of_one_transaction_deadlock_in_no_order(declare: Declare) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("one process writes at a time")
    topics = ["l.one", "l.both"]
    for topic in topics:
        declare(topic, limit=5)
    made = {topic: [schedule_message(topic) for _ in range(2)] for topic in topics}
    met = threading.Barrier(2)

    def turn(number: int) -> list[int]:
        """Claim as a worker without Redis does, from one queue after another."""
        begun: list[int] = []
        with transitions.exclusively(DB):
            for topic in topics if number else reversed(topics):
                begun += admit([made[topic][number]])
                may_pause()
                # The other one waits for the end of this transaction, or both are here.
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.wait(0.2)
        return begun

    assert sum(map(len, answers(at_once(2, turn)))) == 4


def test_promotions_under_two_limits_deadlock_in_no_order(
    declare: Declare, queue_limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("one process writes at a time")
    declare("l.one", limit=1)
    queue_limits(default={"limit": 1})
    made = due(2)
    lines = ["topic l.one", "queue default"]
    # Each has places of its first delivery under both limits, and waits for one of them.
    for message in made:
        assert admit([message]) == [message.pk]
        fail(message)
    for message, line in zip(made, lines, strict=True):
        Message._base_manager.filter(pk=message.pk).update(state=State.LIMITED, limited_by=line)
    statements = type(limit_statements(DB))
    waiting, met, came = statements.waiting, threading.Barrier(2), threading.local()

    def wait_for_the_other(self: Any, *terms: Any) -> Any:
        if not getattr(came, "yes", False):
            came.yes = True
            may_pause()
            met.wait(60)
        return waiting(self, *terms)

    monkeypatch.setattr(statements, "waiting", wait_for_the_other)
    answers(at_once(2, lambda number: promote(lines[number])))


def test_a_limit_that_is_being_looked_at_keeps_only_its_own_messages_waiting(declare: Declare) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("one process writes at a time")
    declare("l.one", limit=1)
    (limited,) = due(1)
    free = schedule_message("l.free")

    def look() -> None:
        limit_statements(DB).lock({"topic l.one"})
        may_pause()

    with unfinished(look), lock_timeout(50):
        assert admit([free]) == [free.pk]
        with pytest.raises(OperationalError):
            admit([limited])
    assert admit([limited]) == [limited.pk]
