"""Programs take messages of pulled queues, and answer them by their receipts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections, transaction

from django_delayq import (
    InvalidMessage,
    Verdict,
    cancel_message,
    pause_queue,
    requeue_message,
    reschedule_message,
    resume_queue,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.pull import InvalidReceipt, Pulled, aack, ack, atake, extend, reject, release, retry, take
from django_delayq.signals import message_dead, message_delivered, message_retried, message_succeeded
from tests.pull.conftest import QUEUE, TOPIC, Declare, put
from tests.support.broken_statements import no_claims_of
from tests.support.receivers import heard
from tests.support.refused_threads import refused
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.steps import ago, at_once, log, message, moves, somebody_waits, state
from tests.support.workers import ROOT, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def one(**options: Any) -> Pulled:
    (found,) = take(QUEUE, **options)
    return found


def run_out(id_: int) -> None:
    """Let the lease of a message run out."""
    unguarded(Message).filter(pk=id_).update(leased_until=ago(5))


def taken_again() -> Pulled:
    return eventually(lambda: take(QUEUE))[0]


# --- take -------------------------------------------------------------------------------------------------------------


def test_a_message_is_taken_and_acknowledged() -> None:
    scheduled = put({"row": 1}, key="k", headers={"h": "1"}, priority=3)
    found = one()
    assert (found.id, found.topic, found.queue, found.key) == (scheduled.pk, TOPIC, QUEUE, "k")
    assert (found.payload, found.headers, found.priority) == ({"row": 1}, {"h": "1"}, 3)
    assert (found.due_at, found.attempt, found.attempts_left) == (scheduled.due_at, 1, 2)
    answer = ack(found.receipt, result={"rows": 7})
    assert answer
    assert (answer.id, answer.state, message(found.id).result) == (found.id, State.CONSUMED, {"rows": 7})
    assert moves(found.id) == ["scheduled", "scheduled>running", "running>consumed"]
    assert log(found.id)[1].actor.startswith("worker:pull:")
    assert log(found.id)[2].actor.startswith("process:")


def test_the_most_urgent_come_first_and_never_more_than_asked_for() -> None:
    ids = [put(due_at=ago(seconds), priority=priority).pk for seconds, priority in ((1, 0), (9, 0), (5, 7), (7, 0))]
    assert [found.id for found in take(QUEUE, max=3)] == [ids[2], ids[1], ids[3]]
    assert [found.id for found in take(QUEUE, max=3)] == [ids[0]]
    assert take(QUEUE, max=3) == []


def test_of_several_queues_those_of_the_first_come_first() -> None:
    last, first = put(queue="go.b", due_at=ago(9)), put(queue="go.a")
    assert [found.id for found in take(["go.a", "go.b"], max=5)] == [first.pk, last.pk]


def test_what_is_not_due_waits() -> None:
    put(due_at=None, delay="10m")
    assert take(QUEUE) == []


def test_a_queue_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="'other' is not pulled"):
        take("other")


@pytest.mark.parametrize(("name", "value"), [("max", 0), ("max", 1001), ("wait", -1), ("lease", "x")])
def test_impossible_arguments_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        take(QUEUE, **{name: value})


def test_two_takes_at_once_share_the_messages() -> None:
    ids = {put(number).pk for number in range(40)}
    taken = at_once(8, lambda _number: [found.id for found in take(QUEUE, max=10)])
    found = [pk for some in taken if isinstance(some, list) for pk in some]
    found += [each.id for each in take(QUEUE, max=40)]
    assert sorted(found) == sorted(ids)


def test_what_the_first_queue_gave_is_not_lost_when_the_next_one_fails() -> None:
    first, last = put(queue="go.a"), put(queue="go.b")
    with no_claims_of("go.b"):
        assert [found.id for found in take(["go.a", "go.b"], max=5)] == [first.pk]
        with pytest.raises(DatabaseError):
            take(["go.a", "go.b"])
        with pytest.raises(DatabaseError), transaction.atomic():
            put(queue="go.a")
            take(["go.a", "go.b"], max=5)
    assert [found.id for found in take(["go.a", "go.b"], max=5)] == [last.pk]


def test_a_take_in_a_transaction_ends_with_it() -> None:
    put()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert take(QUEUE)
        raise ZeroDivisionError
    assert take(QUEUE)


def test_a_rolled_back_answer_did_not_happen() -> None:
    put()
    found = one()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert ack(found.receipt)
        raise ZeroDivisionError
    assert state(found.id) == State.RUNNING
    assert ack(found.receipt)


def test_a_pause_an_expiry_a_cancel_and_a_new_due_time_keep_messages_from_being_taken() -> None:
    put()
    pause_queue(QUEUE)
    assert take(QUEUE) == []
    resume_queue(QUEUE)
    assert take(QUEUE)
    late = put(due_at=ago(30), expires=1)
    assert take(QUEUE) == []
    eventually(lambda: take(QUEUE) or state(late.pk) == State.EXPIRED)
    assert cancel_message(put().pk).verdict == Verdict.CANCELLED
    assert reschedule_message(put().pk, delay="1h")
    assert take(QUEUE) == []


def test_a_program_ends_no_message_of_a_queue_that_workers_serve() -> None:
    """The worker that does has Redis forget the id, and counts the end."""
    of_a_worker, ours = put(queue="mail", due_at=ago(30), expires=1), put(due_at=ago(30), expires=1)
    eventually(lambda: take(QUEUE) or state(ours.pk) == State.EXPIRED)
    assert state(of_a_worker.pk) == State.SCHEDULED


# --- answers ----------------------------------------------------------------------------------------------------------


def test_many_are_answered_in_one_statement() -> None:
    for number in range(20):
        put(number)
    receipts = [found.receipt for found in take(QUEUE, max=20)]
    answers = []
    number = count_statements(lambda: answers.extend(ack(receipts)))
    assert all(answers)
    assert len(answers) == 20
    if connections["default"].vendor == "postgresql":
        assert number == 1
    assert take(QUEUE, max=20) == []


def test_a_receipt_that_nobody_gave_is_refused() -> None:
    put()
    receipt = one().receipt
    texts: list[Any] = ["", "x", "\ud800:x", receipt[:-1], f"1{receipt}", None]
    for text in texts:
        with pytest.raises(InvalidReceipt):
            ack(text)


def test_a_receipt_of_another_database_is_refused() -> None:
    put()
    with pytest.raises(InvalidReceipt):
        ack(one().receipt, using="other")


def test_a_retry_comes_after_its_delay_and_the_last_attempt_is_dead() -> None:
    put()
    answer = retry(one().receipt, "1h", error="no room")
    assert (answer.done, answer.state) == (True, State.SCHEDULED)
    row = message(answer.id)
    assert row.due_at - row.created_at > timedelta(minutes=59)
    assert (row.attempts, log(row.pk)[-1].error) == (1, "no room")
    for attempt in (2, 3):
        reschedule_message(row.pk, delay=0)
        found = one()
        assert (found.attempt, found.attempts_left) == (attempt, 3 - attempt)
        answer = retry(found.receipt, 0)
    assert answer.state == State.DEAD


def test_answers_for_two_deliveries_of_a_message_hold_for_the_later_one() -> None:
    put()
    first = one()
    run_out(first.id)
    second = taken_again()
    receipts = [first.receipt, second.receipt, second.receipt]
    told = extend(receipts, "1h")
    assert [answer.done for answer in told] == [False, True, True]
    assert "delivery 2 has it now" in str(told[0])
    told = retry(receipts, "1h")
    assert [answer.done for answer in told] == [False, True, True]
    assert "it waits to be delivered again" in str(told[0])
    assert moves(first.id)[-1] == "running>scheduled"
    assert message(first.id).attempts == 1
    assert [answer.done for answer in ack(receipts)] == [True] * 3


def test_an_error_that_is_no_text_is_refused_in_words() -> None:
    put()
    found = one()
    with pytest.raises(InvalidMessage, match="error must be text, not ValueError"):
        retry(found.receipt, error=ValueError("no room"))  # type: ignore[call-overload]
    assert state(found.id) == State.RUNNING


def test_a_retry_without_a_delay_follows_the_policy_of_the_message() -> None:
    put(retry=["2h"])
    first = retry(one().receipt)
    assert message(first.id).due_at - message(first.id).created_at > timedelta(minutes=119)
    reschedule_message(first.id, delay=0)
    assert retry(one().receipt, "1h").state == State.DEAD


@pytest.mark.parametrize(("declared", "options", "attempts"), [
    ([QUEUE], {}, 3),
    ({QUEUE: {"max_attempts": 2}}, {}, 2),
    ({QUEUE: {"max_attempts": 2}}, {"max_attempts": 1}, 1),
    ({"exp*": {"max_attempts": 20}}, {}, 20),
    ({QUEUE: {"max_attempts": 2}}, {"retry": ["1s"] * 4}, 5),
    ({QUEUE: {"max_attempts": 2}}, {"retry": ["1s"] * 4, "max_attempts": 3}, 3),
])  # fmt: skip
def test_how_often_a_message_is_delivered(
    declare: Declare, declared: Any, options: dict[str, Any], attempts: int
) -> None:
    declare(declared)
    put(**options)
    assert one().attempts_left == attempts - 1


def test_a_rejected_message_is_dead() -> None:
    put()
    answer = reject(one().receipt, "no such table")
    assert (answer.state, log(answer.id)[-1].error) == (State.DEAD, "Reject: no such table")


def test_a_message_that_follows_a_death_is_scheduled() -> None:
    put(on_dead="exports.failed", max_attempts=1)
    put(on_dead="exports.failed")
    retry(one().receipt)
    reject(one().receipt, "why")
    put(on_dead="exports.failed", max_attempts=1)
    run_out(one().id)
    eventually(lambda: take("go.none") or Message.objects.filter(topic="exports.failed").count() == 3)


def test_a_released_message_costs_no_attempt() -> None:
    put()
    assert release(one().receipt).state == State.SCHEDULED
    assert one().attempt == 1


def test_an_extended_lease_outlives_the_first_one() -> None:
    put()
    found = one(lease=1)
    assert extend(found.receipt, "1h")
    run_out(found.id)
    assert state(found.id) == State.RUNNING
    answer = extend(found.receipt, "1m")
    assert not answer.cancel_requested
    assert cancel_message(found.id).verdict == Verdict.REQUESTED
    assert extend(found.receipt, "1m").cancel_requested
    assert retry(found.receipt).state == State.CANCELLED


def test_what_is_done_to_a_message_that_a_program_has() -> None:
    put()
    found = one()
    assert reschedule_message(found.id, delay="1h").verdict == Verdict.TOO_LATE
    pause_queue(QUEUE)
    assert extend(found.receipt, "1m")
    assert retry(found.receipt, 0)
    assert take(QUEUE) == []
    resume_queue(QUEUE)
    again = one()
    # A message that has begun in time does not expire while a program has it.
    unguarded(Message).filter(pk=found.id).update(expires_at=ago(5))
    assert release(again.receipt)
    eventually(lambda: take(QUEUE) or state(found.id) == State.EXPIRED)


# --- late and lost ----------------------------------------------------------------------------------------------------


def test_what_is_not_answered_comes_back_and_dies_in_the_end() -> None:
    put()
    for attempt in (1, 2, 3):
        found = taken_again()
        assert found.attempt == attempt
        run_out(found.id)
    eventually(lambda: take(QUEUE) or state(found.id) == State.DEAD)
    assert log(found.id)[-1].reason == "lease ran out; that was attempt 3, the last one"


def test_an_answer_of_a_late_puller() -> None:
    put()
    found = one()
    run_out(found.id)
    eventually(lambda: take("go.none") or state(found.id) == State.SCHEDULED)
    # A crashed delivery may still succeed.
    assert message(found.id).deliveries > message(found.id).reported
    for answer in (retry(found.receipt), release(found.receipt), reject(found.receipt, "x"), extend(found.receipt, 9)):
        assert not answer
        assert "it waits to be delivered again" in str(answer)
    second = one()
    refused = retry(found.receipt)
    assert not refused
    assert str(refused) == f"delivery 1 of message {found.id} is over: delivery 2 has it now"
    # Its effect has happened.
    assert ack(found.receipt)
    assert state(found.id) == State.CONSUMED
    late = extend(second.receipt, 9)
    assert not late
    assert str(late) == f"message {found.id} is consumed already"


def test_an_answer_that_got_lost_is_repeated() -> None:
    put()
    receipt = one().receipt
    assert ack(receipt)
    assert ack(receipt)
    assert ack([receipt, receipt]) == [ack(receipt)] * 2


def test_the_answer_to_a_message_that_is_gone() -> None:
    put()
    found = one()
    assert cancel_message(found.id)
    assert release(found.receipt).state == State.CANCELLED
    answer = ack(found.receipt)
    assert (answer.done, answer.state) == (False, State.CANCELLED)
    assert requeue_message(found.id)
    unguarded(Message).filter(pk=found.id).delete()
    assert str(ack(found.receipt)) == f"there is no message {found.id} any more"


# --- wait -------------------------------------------------------------------------------------------------------------


def test_a_take_waits_for_a_message_that_comes() -> None:
    found: list[Pulled] = []

    def wait() -> None:
        found.extend(take(QUEUE, wait="60s"))
        connections.close_all()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        eventually(somebody_waits)
        scheduled = put()
    finally:
        waiting.join(60)
    assert [each.id for each in found] == [scheduled.pk]


def test_a_take_waits_though_the_system_refused_a_thread_to_an_earlier_one() -> None:
    eventually(lambda: all(thread.name != "delayq-pull" for thread in threading.enumerate()), "nobody waits")
    with refused("delayq-pull"), pytest.raises(RuntimeError, match="can't start new thread"):
        take(QUEUE, wait="60s")
    found: list[Pulled] = []

    def wait() -> None:
        found.extend(take(QUEUE, wait="600s"))
        connections.close_all()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    eventually(somebody_waits)
    scheduled = put()
    waiting.join(60)
    assert [each.id for each in found] == [scheduled.pk]


def test_a_pause_lasts_while_a_take_waits() -> None:
    pause_queue(QUEUE)
    scheduled = put()
    assert take(QUEUE, wait=0.3) == []
    resuming = threading.Thread(target=resume_when_somebody_waits)
    resuming.start()
    try:
        assert one(wait="60s").id == scheduled.pk
    finally:
        resuming.join()


def resume_when_somebody_waits() -> None:
    eventually(somebody_waits)
    resume_queue(QUEUE)
    connections.close_all()


def test_a_take_waits_for_what_falls_due() -> None:
    scheduled = put(due_at=None, delay=0.4)
    assert one(wait="60s").id == scheduled.pk


def test_a_take_that_waits_in_vain_is_empty() -> None:
    assert take(QUEUE, wait=0.3) == []


def test_each_message_wakes_one_of_many() -> None:
    def wait(_number: int) -> list[int]:
        return [found.id for found in take(QUEUE, wait="60s")]

    ids: list[int] = []

    def publish() -> None:
        eventually(somebody_waits)
        ids.extend(put(number).pk for number in range(10))
        connections.close_all()

    publisher = threading.Thread(target=publish)
    publisher.start()
    taken = at_once(10, wait)
    publisher.join()
    assert sorted(pk for some in taken if isinstance(some, list) for pk in some) == sorted(ids)


def test_async_code_takes_waits_and_answers() -> None:
    scheduled = put(due_at=None, delay=0.3)

    @async_to_sync
    async def work() -> Any:
        (found,) = await atake(QUEUE, wait="60s")
        return found.id, (await aack(found.receipt)).done, await atake(QUEUE, wait=0.3)

    assert work() == (scheduled.pk, True, [])


def test_what_a_cancelled_call_claims_goes_back() -> None:
    scheduled = put()

    @async_to_sync
    async def give_up(seconds: float) -> list[Pulled]:
        with suppress(TimeoutError):
            return await asyncio.wait_for(atake(QUEUE), seconds)
        return []

    for number in range(40):
        for found in give_up(number / 10_000):
            release(found.receipt)
        scheduled.refresh_from_db()
        assert (scheduled.state, scheduled.attempts) == ("scheduled", 0)


@pytest.mark.django_db(transaction=False)
def test_a_take_waits_in_the_transaction_of_a_test() -> None:
    scheduled = put(due_at=None, delay=0.3)
    assert one(wait="60s").id == scheduled.pk


# --- who is told ------------------------------------------------------------------------------------------------------


def test_signals_are_sent() -> None:
    put()
    with heard(message_delivered, message_succeeded, message_retried, message_dead) as told:
        retry(one().receipt, 0, error="secret")
        ack(one().receipt)
        put()
        reject(one().receipt, "why")
    others = [{*each} - {"sender", "message_id", "topic", "queue", "using"} for each in told]
    delivered = {"delivery", "lateness"}
    assert others == [
        *(delivered, {"delivery", "due_at", "error"}, delivered, {"delivery", "runtime"}),
        *(delivered, {"delivery", "error"}),
    ]
    assert all(each["topic"] == TOPIC and each["queue"] == QUEUE for each in told)


def test_the_package_costs_nothing_until_it_is_used() -> None:
    code = "import sys, django_delayq.pull; print([m for m in sys.modules if m.startswith(('django.db', 'redis'))])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
