"""drain(): runs what is due in the test's own thread and transaction, as a worker would."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import time_machine
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from django.dispatch import Signal

from django_delayq import (
    MessageCancelled,
    Reject,
    RetryLater,
    Verdict,
    acancel_message,
    cancel_message,
    handler,
    pause_queue,
    schedule_message,
    schedule_messages,
    signals,
)
from django_delayq.models import Message, Transition
from django_delayq.project.registry import Delivered
from django_delayq.testing import Delayq, Ran, UnknownTopic
from tests.app.models import Effect
from tests.support.receivers import heard, receiving
from tests.support.record_of import effects_per_message, log_of, path_of
from tests.support.statements import count_statements


def outcomes(ran: list[Ran]) -> list[tuple[str, str]]:
    return [(delivery.message.topic, delivery.outcome) for delivery in ran]


@pytest.mark.usefixtures("either_database")
def test_a_due_message_runs_in_the_thread_and_transaction_of_the_test(delayq: Delayq) -> None:
    seen = []

    @handler("d.here")
    def here(message: Delivered) -> None:
        seen.append((threading.get_ident(), connection.in_atomic_block, Effect.objects.count()))

    is_in_transaction = connection.in_atomic_block
    Effect.objects.create(message_id=0, delivery=0)
    message = schedule_message("d.here", {"order": 5})
    later = schedule_message("d.here", delay="1h")
    [ran] = delayq.drain()
    assert seen == [(threading.get_ident(), is_in_transaction, 1)]
    assert (ran.message.pk, ran.message.state, ran.attempt, ran.outcome, ran.error) == (
        *(message.pk, "consumed", 1, "consumed", None),
    )
    assert path_of(message) == ["scheduled", "running", "consumed"]
    assert log_of(message)[-1].actor.startswith("worker:testing/")
    assert path_of(later) == ["scheduled"]
    assert delayq.drain() == []


@pytest.mark.usefixtures("either_database")
def test_the_error_of_a_handler_is_raised_when_its_outcome_is_recorded(delayq: Delayq) -> None:
    failing = schedule_message("t.fail", priority=1, retry=["1m"])
    waiting = schedule_message("t.effect")
    with pytest.raises(RuntimeError, match="it never works") as caught:
        delayq.drain()
    assert caught.value.__notes__ == [
        f"The handler of t.fail #{failing.pk} raised this in attempt 1; the message is retried."
    ]
    failing.refresh_from_db()
    assert (failing.state, failing.attempts) == ("scheduled", 1)
    assert "it never works" in log_of(failing)[-1].traceback
    assert path_of(waiting) == ["scheduled"]
    assert outcomes(delayq.drain()) == [("t.effect", "consumed")]


@pytest.mark.usefixtures("either_database")
def test_every_outcome_and_error_is_returned_when_errors_are_not_raised(delayq: Delayq) -> None:
    schedule_messages({"topic": topic} for topic in ("t.fail", "t.reject", "t.exit", "t.later", "t.tx", "t.async"))
    ran = delayq.drain(raise_errors=False)
    assert outcomes(ran) == [
        ("t.fail", "retried"),
        ("t.reject", "dead"),
        ("t.exit", "dead"),
        ("t.later", "released"),
        ("t.tx", "consumed"),
        ("t.async", "consumed"),
    ]
    assert [type(delivery.error) for delivery in ran[:4]] == [RuntimeError, Reject, SystemExit, RetryLater]
    assert str(ran[0]) == f"t.fail #{ran[0].message.pk}, attempt 1, retried: RuntimeError: it never works"


@pytest.mark.usefixtures("either_database")
@pytest.mark.parametrize("raise_errors", [True, False])
def test_a_handler_that_stops_because_of_a_cancel_has_no_error(delayq: Delayq, raise_errors: bool) -> None:
    asked = []

    @handler("d.stop", retry=False)
    def stop(message: Delivered) -> None:
        message.raise_if_cancelled()
        asked.append(message.cancel_requested)
        assert cancel_message(message.id).verdict == Verdict.REQUESTED
        asked.append(message.cancel_requested)
        message.raise_if_cancelled()

    @handler("d.stop_async", retry=False)
    async def stop_async(message: Delivered) -> None:
        message.raise_if_cancelled()
        assert await acancel_message(message.id)
        await message.aextend("5m")
        message.raise_if_cancelled()

    @handler("d.reject")
    def reject(message: Delivered) -> None:
        assert cancel_message(message.id)
        raise Reject("not wanted")

    schedule_messages([{"topic": topic} for topic in ("d.stop", "d.stop_async", "d.reject")])
    ran = delayq.drain(raise_errors=raise_errors)
    assert outcomes(ran) == [("d.stop", "cancelled"), ("d.stop_async", "cancelled"), ("d.reject", "cancelled")]
    assert isinstance(ran[0].error, MessageCancelled)
    assert asked == [False, True]


@pytest.mark.usefixtures("either_database")
def test_a_changed_payload_is_seen_by_the_next_attempt_and_in_the_test(delayq: Delayq) -> None:
    @handler("d.pages")
    def read_a_page(message: Delivered) -> None:
        if message.payload["page"] < 3:
            raise RetryLater("5m", payload={"page": message.payload["page"] + 1})

    schedule_message("d.pages", {"page": 1})
    ran = delayq.drain("10m")
    assert outcomes(ran) == [("d.pages", "retried"), ("d.pages", "retried"), ("d.pages", "consumed")]
    assert [delivery.message.payload for delivery in ran] == [{"page": 2}, {"page": 3}, {"page": 3}]


@pytest.mark.django_db
def test_ctrl_c_in_a_handler_ends_the_test_also_when_errors_are_not_raised(delayq: Delayq) -> None:
    @handler("d.ctrl_c")
    def interrupt(message: Delivered) -> None:
        raise KeyboardInterrupt

    schedule_message("d.ctrl_c")
    with pytest.raises(KeyboardInterrupt):
        delayq.drain(raise_errors=False)


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_database")
def test_each_message_runs_at_its_own_time_on_the_way(delayq: Delayq) -> None:
    start = delayq.now
    minutes = []

    @handler("d.each", retry=["10m", "20m"])
    def fail_twice(message: Delivered) -> None:
        minutes.append((message.payload, round((delayq.now - start).total_seconds() / 60)))
        if message.payload == "retried" and message.attempt < 3:
            raise ValueError
        if message.payload == "chain" and minutes.count(("chain", 50)) == 0:
            schedule_message("d.each", "chain", delay="25m")

    schedule_message("d.each", "retried", delay="15m")
    schedule_message("d.each", "chain", delay="0s")
    schedule_message("d.each", "beyond", delay="2h")
    ran = delayq.drain("1h", raise_errors=False)
    assert minutes == [
        *[("chain", 0), ("retried", 15), ("retried", 25), ("chain", 25), ("retried", 45), ("chain", 50)],
    ]
    assert len(ran) == 6
    assert abs(delayq.now - start - timedelta(hours=1)) < timedelta(seconds=30)
    delayq.assert_scheduled("d.each", payload="beyond", due="1h", within="30s", count=1)


@pytest.mark.django_db
def test_the_clock_stands_still_during_a_drain(delayq: Delayq) -> None:
    """What is due a moment later must not run because a handler before it was slow."""
    with time_machine.travel(datetime.now(UTC), tick=False) as time:
        handler("d.slow")(lambda message: time.shift(3600))
        schedule_message("d.slow")
        soon = schedule_message("t.ok", delay="30m")
        assert outcomes(delayq.drain()) == [("d.slow", "consumed")]
        assert path_of(soon) == ["scheduled"]
        assert outcomes(delayq.drain()) == [("t.ok", "consumed")]


@pytest.mark.usefixtures("either_database")
def test_a_message_that_is_not_started_in_time_expires(delayq: Delayq) -> None:
    message = schedule_message("t.ok", delay="1h", expires="5m")
    with heard(signals.message_expired) as expired:
        delayq.travel("65m")
        assert delayq.drain() == []
    assert path_of(message) == ["scheduled", "expired"]
    assert [facts["message_id"] for facts in expired] == [message.pk]


@pytest.mark.usefixtures("either_database")
def test_a_paused_queue_waits_until_its_pause_ends(delayq: Delayq) -> None:
    schedule_message("t.queued")
    forever = schedule_message("t.ok", queue="closed")
    pause_queue("special", duration="1h")
    pause_queue("closed")
    assert delayq.drain("59m") == []
    [ran] = delayq.drain("5m")
    claim = Transition.objects.get(message=ran.message, to_state="running")
    assert claim.at - ran.message.due_at == pytest.approx(timedelta(hours=1), abs=timedelta(minutes=1))
    assert path_of(forever) == ["scheduled"]


# --- as in life -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_database")
def test_the_effects_of_a_failed_handler_are_undone_only_if_it_is_transactional(delayq: Delayq) -> None:
    kept, undone = schedule_message("t.fail"), schedule_message("t.fail_tx")
    assert outcomes(delayq.drain(raise_errors=False)) == [("t.fail", "retried"), ("t.fail_tx", "retried")]
    assert effects_per_message() == {kept.pk: 1}
    undone.refresh_from_db()
    assert undone.attempts == 1


@pytest.mark.usefixtures("either_database")
@pytest.mark.parametrize("is_transactional", [False, True])
def test_a_failed_statement_leaves_the_transaction_of_the_test_usable(delayq: Delayq, is_transactional: bool) -> None:
    @handler("d.duplicate", retry=False, transactional=is_transactional)
    def duplicate(message: Delivered) -> None:
        first = Effect.objects.create(message_id=1, delivery=1)
        Effect.objects.create(pk=first.pk, message_id=2, delivery=2)

    message = schedule_message("d.duplicate")
    with pytest.raises(IntegrityError):
        delayq.drain()
    assert path_of(message) == ["scheduled", "running", "dead"]
    Effect.objects.create(message_id=3, delivery=3)


@pytest.mark.usefixtures("either_database")
def test_signals_and_functions_on_commit_are_called_in_the_order_of_life(delayq: Delayq) -> None:
    told: list[str] = []

    def note(signal: Signal, topic: str, **facts: Any) -> None:
        told.append(f"{SIGNALS[signal]} {topic}")

    @handler("d.follow", transactional=True)
    def follow(message: Delivered) -> None:
        transaction.on_commit(lambda: told.append("on commit"))
        schedule_message("t.ok")

    with receiving(note, *SIGNALS):
        with transaction.atomic():
            transaction.on_commit(lambda: schedule_message("d.follow"))
        assert outcomes(delayq.drain()) == [("d.follow", "consumed"), ("t.ok", "consumed")]
    assert told == [
        *("scheduled d.follow", "delivered d.follow", "on commit", "scheduled t.ok", "succeeded d.follow"),
        *("delivered t.ok", "succeeded t.ok"),
    ]


SIGNALS = {
    signal: name[8:]
    for name, signal in vars(signals).items()
    if isinstance(signal, Signal) and name.startswith("message_")
}


@pytest.mark.django_db
def test_a_function_on_commit_is_called_once_by_a_capture_or_by_a_drain_inside_of_it(
    delayq: Delayq, django_capture_on_commit_callbacks: Any
) -> None:
    called: list[str] = []
    with django_capture_on_commit_callbacks(execute=True) as callbacks:
        transaction.on_commit(lambda: called.append("by the drain"))
        delayq.drain()
        transaction.on_commit(order)
    assert called == ["by the drain"]
    assert callbacks[-1] == order
    delayq.assert_scheduled("t.ok", count=1)
    assert outcomes(delayq.drain()) == [("t.ok", "consumed")]
    assert outcomes(delayq.drain()) == []


@pytest.mark.django_db
def test_a_captured_function_on_commit_is_called_by_the_test_or_by_the_drain(
    delayq: Delayq, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks() as callbacks:
        transaction.on_commit(order)
        transaction.on_commit(lambda: schedule_message("t.tx"))
    callbacks[0]()
    assert outcomes(delayq.drain()) == [("t.ok", "consumed"), ("t.tx", "consumed")]
    callbacks[1]()
    assert outcomes(delayq.drain()) == []


def order() -> None:
    schedule_message("t.ok", {"n": 5})


@pytest.mark.django_db
def test_only_the_named_queue_is_drained(delayq: Delayq) -> None:
    schedule_message("t.ok")
    schedule_message("t.queued")
    assert outcomes(delayq.drain(queue="special")) == [("t.queued", "consumed")]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_topic_without_a_handler_is_an_error_unless_another_project_handles_it(delayq: Delayq) -> None:
    schedule_message("t.efect")
    with pytest.raises(UnknownTopic, match=r"no handler receives the topic 't\.efect'; did you mean 't\.effect'"):
        delayq.drain()
    delayq.handled_elsewhere("t.efect")
    assert delayq.drain() == []


@pytest.mark.usefixtures("either_database")
@pytest.mark.parametrize("is_transactional", [False, True])
def test_a_message_costs_as_many_statements_after_many_others(delayq: Delayq, is_transactional: bool) -> None:
    called = []

    @handler("d.costs", transactional=is_transactional)
    def costs(message: Delivered) -> None:
        transaction.on_commit(lambda: called.append(message.id))

    def each(messages: int) -> int:
        """Return the statements for one message more, when so many are drained already."""
        schedule_messages([{"topic": "d.costs"}] * messages)
        delayq.drain()
        counts = []
        for number in (1, 2):
            schedule_messages([{"topic": "d.costs"}] * number)
            counts.append(count_statements(delayq.drain))
        return counts[1] - counts[0]

    first = each(1)
    assert each(50) == first
    assert len(called) == len({*called}) == 57
    if connection.vendor == "postgresql":
        assert first <= 12


@pytest.mark.postgresql("shows the state of the transaction")
@pytest.mark.django_db
def test_a_transactional_handler_ends_no_transaction_of_the_test(delayq: Delayq) -> None:
    # From the second statement on a session keeps what is prepared.
    for _ in range(3):
        schedule_message("t.tx")
        delayq.drain()
        assert connection.connection.info.transaction_status.name == "INTRANS"


@pytest.mark.usefixtures("either_database")
def test_a_drain_inside_of_a_transaction_of_the_test_is_refused(delayq: Delayq) -> None:
    message = schedule_message("t.ok")
    with pytest.raises(RuntimeError, match=r"inside of transaction\.atomic"), transaction.atomic():
        delayq.drain()
    assert path_of(message) == ["scheduled"]


def test_a_helper_that_is_not_entered_drains_nothing(delayq: Delayq) -> None:
    with pytest.raises(RuntimeError, match="context manager"):
        Delayq().drain()
    with Delayq(), pytest.raises(RuntimeError, match="the innermost one drains"):
        delayq.drain()


@pytest.mark.django_db
def test_a_handler_that_drains_is_refused(delayq: Delayq) -> None:
    @handler("d.nested")
    def nested(message: Delivered) -> None:
        delayq.drain()

    schedule_message("d.nested")
    with pytest.raises(RuntimeError, match="a handler cannot drain"):
        delayq.drain()


@pytest.mark.django_db
def test_a_message_that_schedules_itself_for_ever_ends_the_drain(delayq: Delayq) -> None:
    @handler("d.again")
    def again(message: Delivered) -> None:
        schedule_message("d.again")

    schedule_message("d.again")
    with pytest.raises(RuntimeError, match=r"made 3 deliveries, and more messages are due; the last was: d\.again"):
        delayq.drain(limit=3)
    assert Message.objects.filter(state="consumed").count() == 3


@pytest.mark.django_db
def test_a_limit_does_not_count_what_a_pause_holds_back(delayq: Delayq) -> None:
    schedule_message("t.ok")
    schedule_message("t.ok", queue="paused")
    pause_queue("paused")
    assert len(delayq.drain(limit=1)) == 1


@pytest.mark.django_db
def test_run_delayq_once_inside_of_a_transaction_names_the_testing_module() -> None:
    message = schedule_message("t.ok")
    with pytest.raises(CommandError, match=r"django_delayq\.testing: delayq\.drain") as caught:
        call_command("run_delayq", "--once", verbosity=0)
    assert caught.value.returncode == 2
    assert path_of(message) == ["scheduled"]


@pytest.mark.django_db(databases=["default", "other"])
def test_the_messages_of_another_database_have_a_helper_of_their_own(delayq: Delayq) -> None:
    schedule_message("t.ok", using="other", delay="1h")
    assert delayq.drain("2h") == []
    with Delayq(using="other") as other:
        [ran] = other.drain("1h")
    assert (ran.message._state.db, ran.outcome) == ("other", "consumed")


@pytest.mark.django_db
def test_a_message_that_a_test_has_delivered_is_waited_for(delayq: Delayq) -> None:
    waits = schedule_message("t.ok")
    delayq.drain()
    assert waits.wait(0).state == "consumed"
    assert async_to_sync(waits.await_end)(0) is waits
