"""Claiming ahead: a message that is claimed a moment before its due time begins on time, and never before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_delayq import pause_queue, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.clock import SECOND, ceil_tenth, to_tenths
from django_delayq.core.outcomes import Release
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.claim.consumer import Consumer, due_in
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.pool import ClaimAhead, Pool
from django_delayq.worker.run.run_tuning import RunTuning
from tests.support.assembled import Assemble
from tests.support.claims import last_move, state
from tests.support.clocks import stopped_at
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE, eventually
from tests.worker.bench import redis_of, running

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

DB = QUEUE = "default"
USUAL = RunTuning()
# So much longer than usual that nothing depends on how long the test takes. Seconds.
CLAIM_AHEAD = 10.0


@pytest.fixture
def consumer(loaded: None, assembled: Assemble) -> Consumer:
    """A consumer with room for three messages, which asks in the middle of the time in which it may claim them."""
    # Nothing has run here, so handlers count as slow.
    tuning = RunTuning(claim_ahead=CLAIM_AHEAD, claim_ahead_limited=CLAIM_AHEAD, together=CLAIM_AHEAD / 2)
    return assembled(threads=3, run_tuning=tuning).consumer


def due_soon(consumer: Consumer, seconds: float, number: int = 1, topic: str = "t.ok") -> list[Message]:
    """Schedule messages that fall due together so many seconds from now, which is when the broker's clock stops."""
    due_at = ceil_tenth(reads.now(DB) + timedelta(seconds=seconds))
    messages = schedule_messages([{"topic": topic, "due_at": due_at}] * number)
    redis_of(consumer.brokers).now = stopped_at(to_tenths(due_at) - int(seconds * SECOND))
    return messages


def place(consumer: Consumer, message: Message) -> float | None:
    """Return the score of a message among the delayed."""
    return redis_of(consumer.brokers).client.zscore(keys("delayq", QUEUE).delayed, str(message.pk))


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "by a process whose clock is ahead"])
def test_a_message_is_claimed_a_moment_before_it_falls_due_and_waits_for_the_records_clock(
    consumer: Consumer, is_ahead: bool
) -> None:
    (message,) = due_soon(consumer, 8)
    if is_ahead:
        redis_of(consumer.brokers).now = stopped_at(to_tenths(message.due_at) + SECOND)
    consumer.run_round()
    (held,) = consumer.pool.held()
    assert (held.id, held.lateness, state(message)) == (message.pk, 0, State.RUNNING)
    row = last_move(message)
    assert row.at < message.due_at
    assert is_ahead or row.ready_at == message.due_at
    left = (message.due_at - row.at).total_seconds()
    assert held.claimed_mono + left <= held.due_mono <= time.monotonic() + left


def test_no_message_is_claimed_earlier_than_the_setting_allows_and_the_consumer_comes_back_in_time(
    consumer: Consumer,
) -> None:
    consumer.tuning.idle_wait = 100.0
    consumer.pauses.queues = lambda: ("other", QUEUE)
    (message,) = due_soon(consumer, CLAIM_AHEAD + 0.0001)
    assert 0.4 < consumer.run_round() <= CLAIM_AHEAD / 2 + 0.0001
    assert (consumer.pool.held(), state(message)) == ([], State.SCHEDULED)


def test_a_consumer_that_lacks_a_handler_claims_nothing_ahead_once_it_knows(consumer: Consumer) -> None:
    due_soon(consumer, 4, topic="t.of_another")
    consumer.run_round()
    (later,) = due_soon(consumer, 4)
    assert consumer.run_round() > 0.4
    assert state(later) == State.SCHEDULED


def test_an_id_taken_ahead_in_a_paused_queue_is_put_back_where_it_was(consumer: Consumer) -> None:
    consumer.pauses.check()
    pause_queue(QUEUE)
    (message,) = due_soon(consumer, 4)
    consumer.run_round()
    assert state(message) == State.SCHEDULED
    assert place(consumer, message) == pytest.approx(to_tenths(message.due_at), abs=1)


def test_a_message_claimed_ahead_and_released_falls_due_no_earlier(consumer: Consumer) -> None:
    """It is to run alone while another process runs a message alone, and is put off for a moment."""
    (message,) = due_soon(consumer, 8)
    consumer.run_round()
    (held,) = consumer.pool.held()
    consumer.pool.recorder.submit(held, Release("makes way", timedelta(milliseconds=1)), "worker:w")
    assert consumer.pool.recorder.flush(PATIENCE)
    row = Message.objects.get(pk=message.pk)
    assert (row.state, row.due_at) == (State.SCHEDULED, message.due_at)


def test_a_consumer_that_delivers_by_query_sleeps_until_something_is_due(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule_message("t.ok", delay="1h")
    monkeypatch.setattr(consumer.brokers, "redis", None)
    assert consumer.run_round() > 0.4


def test_no_more_messages_are_claimed_ahead_than_there_is_room_for(consumer: Consumer) -> None:
    messages = due_soon(consumer, 4, 5)
    assert consumer.run_round() > 0.4
    assert sorted(map(state, messages)) == [State.RUNNING] * 3 + [State.SCHEDULED] * 2
    # The consumer does not come back before the others are due, or it would come back without end.
    assert consumer.run_round() > 0.4


def test_a_message_due_later_than_redis_believes_is_not_claimed_ahead(consumer: Consumer) -> None:
    (message,) = due_soon(consumer, 4)
    later = message.due_at + timedelta(seconds=1)
    unguarded(Message).filter(pk=message.pk).update(due_at=later)
    consumer.run_round()
    assert (consumer.pool.held(), state(message)) == ([], State.SCHEDULED)
    assert place(consumer, message) == pytest.approx(to_tenths(later), abs=1)


@pytest.mark.parametrize(
    ("until", "left", "took", "believed"),
    [(3.0, 2.9, 0.2, 3.0), (3.0, 3.1, 0.2, 3.3), (3.0, 2.0, 0.2, 2.2), (-5.0, 3.0, 0.5, 3.5), (5.0, -3.0, 0.5, -2.5)],
)
def test_redis_is_believed_within_the_bounds_of_the_records_clock(
    until: float, left: float, took: float, believed: float
) -> None:
    row = claimed(due_in=0).claimed
    row = row._replace(due_at=row.claimed_at + timedelta(seconds=left))
    assert due_in(row, until, took) == pytest.approx(believed)


# --- in the threads ---------------------------------------------------------------------------------------------------


def claimed(due_in: float, **options: Any) -> Delivery:
    """Claim a message ``due_in`` seconds before it falls due."""
    message = schedule_message("t.ok", **options)
    handler = registry.handlers()["t.ok"]
    (row,) = transitions.claim(DB, [Ticket(message.pk)], {"t.ok": handler.lease}, "w")
    return Delivery(row, handler, DB, due_in=due_in)


@pytest.fixture
def pool(assembled: Assemble) -> Iterator[Pool]:
    made = assembled(run_tuning=RunTuning(claim_ahead=CLAIM_AHEAD)).pool
    with running(made):
        yield made


def has_run(delivery: Delivery) -> Callable[[], bool]:
    return lambda: state(delivery) == State.CONSUMED


def test_a_delivery_that_waits_for_its_due_time_keeps_no_other_waiting_and_is_released_at_a_shutdown(
    pool: Pool,
) -> None:
    early, due = claimed(due_in=60), claimed(due_in=0)
    pool.submit([early, due])
    eventually(has_run(due), "the end of the delivery")
    assert (early.started_mono, pool.held()) == (0, [early])
    pool.release_unstarted()
    assert not pool.is_busy
    assert pool.recorder.flush(60)
    assert (last_move(early).to_state, last_move(early).reason) == (State.SCHEDULED, "shutdown")


def test_of_deliveries_due_together_the_greatest_priority_begins_first(pool: Pool) -> None:
    low, high = claimed(due_in=60), claimed(due_in=60, priority=9)
    low.due_mono = high.due_mono = time.monotonic() + 3.0
    pool.submit([low, high])
    eventually(has_run(low), "the end of both")
    assert high.due_mono <= high.started_mono < low.started_mono


def test_a_delivery_due_earlier_than_all_others_is_not_slept_through(pool: Pool) -> None:
    late, early = claimed(due_in=600), claimed(due_in=0.2)
    pool.submit([late])
    waiters: Any = pool.claim_ahead._changed.__dict__["_waiters"]
    eventually(lambda: bool(waiters), "the due timer sleeps")
    pool.submit([early])
    eventually(has_run(early), "the end of the delivery")
    assert early.started_mono >= early.due_mono


def test_a_delivery_that_falls_due_in_the_moment_of_a_shutdown_is_released(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = assembled(run_tuning=RunTuning(claim_ahead=CLAIM_AHEAD)).pool
    delivery = claimed(due_in=60)
    pool.submit([delivery])

    def begin_first() -> list[Delivery]:
        pool.threads.enqueue([delivery])
        return []

    monkeypatch.setattr(pool.claim_ahead, "release", begin_first)
    pool.release_unstarted()
    assert not pool.is_busy


def test_a_delivery_waits_for_a_thread_only_once_it_is_due(assembled: Assemble) -> None:
    pool = assembled(run_tuning=RunTuning(claim_ahead=CLAIM_AHEAD, longest_queued=300)).pool
    early, due = claimed(due_in=600), claimed(due_in=0)
    pool.submit([early, due])
    early.queued_mono -= 400
    pool.threads.release_queued()
    assert pool.held() == [early, due]
    due.queued_mono -= 400
    due.due_mono -= 400
    pool.threads.release_queued()
    assert pool.held() == [early]


# --- how far ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "quick", "reach", "lead"),
    [(10.0, True, 10.0, 9.995), (0.004, True, 0.004, 0.002), (0.5, False, 0.01, 0.005), (0.0, False, 0.0, 0.0)],
)
def test_the_lead_leaves_time_for_several_messages_and_slow_handlers_leave_threads_free(
    longest: float, quick: bool, reach: float, lead: float
) -> None:
    claim_ahead = ClaimAhead(longest, lambda delivery: None, USUAL)
    assert claim_ahead.reach(quick=quick) == reach
    assert claim_ahead.lead(quick=quick) == pytest.approx(lead)


def test_handlers_are_slow_until_they_turn_out_to_be_quick(assembled: Assemble) -> None:
    consumer = assembled(threads=2).consumer
    found = [consumer.wanted.are_quick]
    for mean in (USUAL.queued_time, 1.1 * USUAL.queued_time):
        consumer.pool.threads._mean = mean
        found.append(consumer.wanted.are_quick)
    assert found == [False, True, False]


def test_a_message_that_may_have_a_limit_has_its_place_only_a_moment_early(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assembled().consumer.claim_ahead.longest == 0.05
    monkeypatch.setattr("django_delayq.record.admission.any_declared", lambda: True)
    assert assembled().consumer.claim_ahead.longest == 0.01


def test_a_delivery_claimed_ahead_is_late_when_it_begins_after_its_due_time() -> None:
    delivery = claimed(due_in=60)
    assert delivery.lateness == 0
    delivery.started_mono = delivery.due_mono + 0.75
    assert delivery.lateness == pytest.approx(0.75)


# --- off --------------------------------------------------------------------------------------------------------------


def test_no_message_is_claimed_before_its_due_time_when_claiming_ahead_is_off(
    loaded: None, assembled: Assemble
) -> None:
    consumer = assembled(threads=3, run_tuning=RunTuning(claim_ahead=0.0)).consumer
    (message,) = due_soon(consumer, 0.0001)
    assert 0 <= consumer.run_round() <= 0.0001
    assert (consumer.pool.held(), state(message)) == ([], State.SCHEDULED)
    redis_of(consumer.brokers).now = stopped_at(to_tenths(message.due_at))
    eventually(lambda: reads.now(DB) >= message.due_at)
    consumer.run_round()
    (held,) = consumer.pool.held()
    assert held.due_mono <= held.claimed_mono
