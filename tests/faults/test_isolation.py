"""REPEATABLE READ and SERIALIZABLE, by the OPTIONS of the database and by the server, and transactions that collide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import psycopg
import pytest
from django.db import OperationalError, close_old_connections, connection, connections, transaction

from django_delayq import (
    OnConflict,
    cancel_message,
    pause_queue,
    reschedule_message,
    resume_queue,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.exceptions import KeyConflict
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.models.messages import Lease
from django_delayq.record.sql.sessions import conflict_in, own_transaction
from django_delayq.recurring import create_schedule
from django_delayq.signals import message_scheduled
from testproject.servers import PostgresServer
from tests.app.models import Effect
from tests.settings import at_isolation
from tests.support.chains import ENDS, hand_over, while_it_waits
from tests.support.processes import Gate, Start
from tests.support.receivers import receiving
from tests.support.record_of import (
    effects_per_message,
    is_past,
    log_of,
    once_each,
    states,
    wait_past_the_lease,
    wait_until,
    wait_until_all,
)
from tests.support.steps import TOPIC, claim, claimed, due, later, message, succeed
from tests.support.together import Together
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import eventually

T = TypeVar("T")
NEW: Any = {"topic": "t.ok", "delay": "1h"}

pytestmark = pytest.mark.postgresql
# Both are one case for the package; the server refuses more at the higher one.
EVERY_LEVEL = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"], indirect=True)


@pytest.fixture(params=["serializable"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> Iterator[str]:
    """A level of isolation for the workers and for the test's own transactions and statements."""
    monkeypatch.setenv("DELAYQ_TEST_ISOLATION", request.param)
    options: dict[str, Any] = connections.settings["default"]["OPTIONS"]
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options | at_isolation(request.param))
    connections.close_all()
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        assert cursor.fetchone() == (request.param,)
    with connection.execute_wrapper(_repeat_reads):
        yield str(request.param)
    connections.close_all()


def level() -> str:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return str(cursor.fetchone()[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: schedule_message(**NEW),
        lambda: schedule_messages([NEW]),
        lambda: create_schedule("s", "t.ok", every="1h"),
    ],
    ids=["one", "many", "schedule"],
)
def test_a_receiver_runs_at_the_projects_level(isolation: str, call: Callable[[], object]) -> None:
    levels: list[str] = []
    with receiving(lambda **_facts: levels.append(level()), message_scheduled):
        call()
    assert levels == [isolation]


def test_a_dead_connection_is_replaced_where_the_project_asks_for_a_health_check(
    isolation: str, monkeypatch: pytest.MonkeyPatch, postgres_server: PostgresServer
) -> None:
    for name, value in (("CONN_HEALTH_CHECKS", True), ("CONN_MAX_AGE", None)):
        monkeypatch.setitem(connections.settings["default"], name, value)
    connections.close_all()

    def begin_a_request_with_a_dead_connection() -> None:
        schedule_message(**NEW)
        pid = connection.connection.info.backend_pid
        with psycopg.connect(postgres_server.url, autocommit=True) as other:
            assert other.execute("SELECT pg_terminate_backend(%s, 60000)", [pid]).fetchone() == (True,)
        close_old_connections()

    begin_a_request_with_a_dead_connection()
    assert schedule_message(**NEW).pk
    begin_a_request_with_a_dead_connection()
    with own_transaction("default"):
        assert level() == "read committed"


def _repeat_reads(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Repeat what the test reads outside of a transaction and the server refuses: workers change what it reads."""
    if sql.startswith("SELECT") and not connection.in_atomic_block:
        return repeated(lambda: execute(sql, params, many, context))
    return execute(sql, params, many, context)


def rows(number: int) -> list[int]:
    return [Effect.objects.create(message_id=0, delivery=0).pk for _ in range(number)]


def counts(pks: list[int]) -> list[int]:
    return list(Effect.objects.filter(pk__in=pks).order_by("pk").values_list("delivery", flat=True))


def repeated(act: Callable[[], T]) -> T:
    """Call a function whose transaction may meet another one, until it does not: callers at these levels have to."""
    while True:
        try:
            return act()
        except OperationalError as error:
            if conflict_in(error) is None:
                raise


def test_a_transactional_handler_that_outlasts_its_lease_succeeds_or_is_cancelled_at_once(
    start: Start, isolation: str, gate: Gate
) -> None:
    start("--processes", "2", "--threads", "2")
    message, cancelled = (gate.running("t.short_lease_tx") for _ in range(2))
    for _ in range(2):
        wait_past_the_lease(message)
        eventually(lambda: not is_past(message.lease_ends_at), "the lease is renewed")  # type: ignore[arg-type]
    assert Lease.objects.filter(message_id=message.pk, delivery=1).exists()
    assert cancel_message(cancelled).state == State.RUNNING
    gate.open()
    wait_until(message, State.CONSUMED)
    wait_until(cancelled, State.CANCELLED)
    assert [(one.deliveries, one.attempts) for one in (message, cancelled)] == [(1, 0), (1, 0)]
    # A cancel request takes the effects back.
    assert effects_per_message() == {message.pk: 1}


@EVERY_LEVEL
def test_work_of_all_kinds_is_done_once_and_nothing_complains(start: Start, isolation: str) -> None:
    workers = [start("--processes", "2", "--threads", "4"), start("--threads", "4")]
    messages: list[Message] = []

    def schedule(number: int) -> list[Message]:
        with transaction.atomic():
            plain = schedule_message("t.tx", number)
            keyed = schedule_message("t.effect", key=f"k{number}", delay="1h")
            with pytest.raises(KeyConflict):
                schedule_message("t.effect", key=f"k{number}")
            assert schedule_message("t.effect", key=f"k{number}", delay=0, on_conflict="replace") == keyed
        return [plain, keyed]

    for number in range(40):
        messages += repeated(partial(schedule, number))
        gone = schedule_message("t.effect", delay="1h")
        assert reschedule_message(gone, delay="2h")
        assert cancel_message(gone)
    messages += [schedule_message("t.second_time"), schedule_message("t.async")]
    eventually(lambda: states() == {State.CONSUMED: 82, State.CANCELLED: 40}, "all are delivered")
    assert effects_per_message() == once_each(messages)
    assert Message.objects.exclude(attempts=0).count() == 1
    for worker in workers:
        assert worker.count("is tried again|failed and|claims nothing|wait for the database") == 0


def test_a_pause_holds_from_its_commit_on(start: Start, isolation: str) -> None:
    start("--threads", "4")
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    pause_queue("default")
    held = schedule_message("t.ok")
    served = schedule_message("t.queued")
    wait_until(served, State.CONSUMED)
    held.refresh_from_db()
    assert held.state == State.SCHEDULED
    resume_queue("default")
    wait_until(held, State.CONSUMED)


@EVERY_LEVEL
@pytest.mark.parametrize("end", ["waits for a retry", "has crashed"])
def test_a_key_that_is_handed_over_while_a_call_waits_means_the_next_message(
    together: Together, isolation: str, end: str
) -> None:
    first = claimed(key="k").id

    def then() -> None:
        hand_over(first)
        ENDS[end](first)

    answer = while_it_waits(together, first, lambda: cancel_message(topic=TOPIC, key="k"), then)
    assert (answer.id, answer.verdict) == (message(first).next_id, Verdict.CANCELLED)
    first = due(key="k").pk

    def run() -> None:
        assert claim(first)
        then()

    found = while_it_waits(together, first, lambda: later(key="k", on_conflict="replace"), run)
    assert (found.pk, found.existed) == (message(first).next_id, True)


@EVERY_LEVEL
@pytest.mark.parametrize(
    "act",
    [
        lambda: cancel_message(topic=TOPIC, key="k"),
        *(partial(later, key="k", unique="scheduled", on_conflict=policy) for policy in OnConflict),
    ],
    ids=["cancel", *OnConflict],
)
def test_a_transaction_that_began_before_a_key_was_handed_over_has_to_be_repeated(
    together: Together, isolation: str, act: Callable[[], Any]
) -> None:
    first = claimed(key="k").id
    with transaction.atomic():
        assert message(first).next_id is None
        [following] = together(lambda: hand_over(first, unique="scheduled"))
        with pytest.raises(OperationalError) as caught:
            act()
        assert conflict_in(caught.value)
        transaction.set_rollback(True)
    assert message(following.pk).moves == 1
    with contextlib.suppress(KeyConflict), transaction.atomic():
        found = act()
        assert getattr(found, "pk", found.id) == following.pk


@pytest.mark.parametrize("runs", [False, True], ids=["reschedule", "success"])
def test_a_move_that_waited_for_a_row_decides_by_what_the_row_holds_now(isolation: str, runs: bool) -> None:
    pk = claimed().id if runs else schedule_message("t.ok", delay="1h").pk

    def move() -> object:
        try:
            return succeed(pk) if runs else reschedule_message(pk, delay="2h").verdict
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool, unfinished(lambda: cancel_message(pk)) as go:
        answer = pool.submit(move)
        eventually(waits_for_a_lock, "the second move waits for the row")
        go.set()
        assert answer.result(90) == (True if runs else Verdict.TOO_LATE)


def test_a_serialization_failure_costs_no_attempt(start: Start, isolation: str, gate: Gate) -> None:
    start("--threads", "2")
    shared = rows(1)
    messages = [schedule_message("t.collide", {**gate.payload, "rows": shared}) for _ in range(2)]
    eventually(lambda: gate.how_many_began() == 2, "both have seen the row")
    gate.open()
    for one in messages:
        wait_until(one, State.CONSUMED)
        assert one.attempts == 0
    assert counts(shared) == [2]
    (loser,) = [message for message in messages if message.deliveries == 2]
    assert "SerializationFailure" in log_of(loser)[2].reason


@pytest.mark.parametrize("uncounted", [0, 60])
def test_a_deadlock_of_transactional_handlers_costs_no_attempt(start: Start, gate: Gate, uncounted: int) -> None:
    # Deliveries that cost no attempt for another reason do not count as conflicts.
    start("--threads", "2")
    one, other = rows(2)
    messages = [
        schedule_message("t.deadlock", {**gate.payload, "rows": order, "uncounted": uncounted})
        for order in ([one, other], [other, one])
    ]
    eventually(lambda: gate.how_many_began() == 2, "each has changed one row")
    gate.open()
    wait_until_all(State.CONSUMED, 2)
    assert counts([one, other]) == [2, 2]
    assert not Message.objects.exclude(attempts=0).exists()
    assert sorted(Message.objects.values_list("deliveries", flat=True)) == [uncounted + 1, uncounted + 2]
    (loser,) = Message.objects.filter(deliveries=uncounted + 2)
    assert "DeadlockDetected" in log_of(loser)[-3].reason
    assert messages


@EVERY_LEVEL
@pytest.mark.parametrize("unique", ["scheduled", "1h"])
def test_of_many_callers_one_gets_the_key_at_every_level(isolation: str, unique: str) -> None:
    """Each caller's transaction has read before it schedules, so that it does not see what the others commit."""

    def publish(number: int) -> tuple[int, bool]:
        def act() -> tuple[int, bool]:
            with transaction.atomic():
                assert Message.objects.count() >= 0
                message = schedule_message("t.never", number, key="k", unique=unique, on_conflict="keep", delay="1h")
                return message.pk, message.existed

        try:
            return repeated(act)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(publish, range(6)))
    assert len({pk for pk, _existed in answers}) == 1
    assert sum(not existed for _pk, existed in answers) == 1


def test_a_key_that_a_message_took_and_kept_after_its_end_is_not_taken_by_an_older_snapshot(isolation: str) -> None:
    def publish() -> bool:
        return schedule_message("t.never", key="k", unique="1h", on_conflict="keep", delay="1h").existed

    with ThreadPoolExecutor(1) as other, transaction.atomic():
        assert Message.objects.count() == 0
        for act in (publish, lambda: bool(cancel_message(topic="t.never", key="k")), connections.close_all):
            other.submit(act).result(90)
        # The other message came and went after this transaction's snapshot.
        with pytest.raises(OperationalError) as caught:
            publish()
        assert conflict_in(caught.value) is not None
        transaction.set_rollback(True)
    assert publish()
    assert Message.objects.count() == 1
