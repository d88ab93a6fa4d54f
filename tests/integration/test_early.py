"""What is claimed a moment before it falls due: it begins on time, and never before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from django_delayq import cancel_message, pause_queue, registry, reschedule_message, schedule_message, transitions
from django_delayq.broker.base import Entry
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import RedisBroker
from django_delayq.clock import SECOND, to_tenths
from django_delayq.extensions import WorkerExtensions
from django_delayq.models import Message, Transition
from django_delayq.outcomes import Release
from django_delayq.sql.rows import Ticket
from django_delayq.states import State
from django_delayq.verdicts import Verdict
from django_delayq.worker import claim_ahead
from django_delayq.worker.broker_switch import Source
from django_delayq.worker.budget import Budget
from django_delayq.worker.claim_ahead import ClaimAhead
from django_delayq.worker.consumer import Consumer
from django_delayq.worker.delivery import Delivery
from django_delayq.worker.pool import Pool
from django_delayq.worker.recorder import Recorder
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = QUEUE = "default"
# A thousand times what it is, so that nothing depends on how long the test takes. Seconds.
MOST = 10.0


@pytest.fixture(autouse=True)
def in_slow_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_ahead, "MOST", MOST)


@pytest.fixture
def consumer(redis_client: redis.Redis, recorder: Recorder) -> Iterator[Consumer]:
    """One whose threads have not begun. It looks as far ahead as it may."""
    source = Source(DB, registry.handlers)
    made = Consumer(
        DB,
        source,
        Pool(3, recorder, "w", lambda: None),
        lambda: (QUEUE,),
        "w",
        Budget(None),
        5.0,
        WorkerExtensions(DB, "w"),
    )
    made.claim_ahead.learn(MOST)
    yield made
    source.close()


def in_an_hour(consumer: Consumer, number: int = 1) -> list[Message]:
    """Messages that fall due together, and are known to Redis."""
    first = schedule_message("t.ok", delay=timedelta(hours=1))
    messages = [first, *(schedule_message("t.ok", due=first.due_at) for _number in range(1, number))]
    broker = consumer.source.redis
    assert isinstance(broker, RedisBroker)
    places = keys("delayq", QUEUE)
    broker.client.hset(places.meta, "horizon", to_tenths(first.due_at) + 3600 * SECOND)
    broker.put(QUEUE, [Entry.at(message.pk, message.due_at, message.priority) for message in messages])
    return messages


def so_long_before(consumer: Consumer, message: Message, seconds: float) -> None:
    assert isinstance(consumer.source.redis, RedisBroker)
    consumer.source.redis.now = to_tenths(message.due_at) - int(seconds * SECOND)


def place(consumer: Consumer, message: Message) -> float | None:
    """Its place among the delayed."""
    assert isinstance(consumer.source.redis, RedisBroker)
    return consumer.source.redis.client.zscore(keys("delayq", QUEUE).delayed, str(message.pk))


def claimed_early(consumer: Consumer) -> Message:
    """A message that falls due in eight seconds."""
    (message,) = in_an_hour(consumer)
    so_long_before(consumer, message, 8)
    consumer.turn()
    return message


def states(messages: list[Message]) -> list[str]:
    found = dict(Message.objects.values_list("pk", "state"))
    return [found[message.pk] for message in messages]


def test_a_message_is_claimed_a_moment_before_it_falls_due_and_waits(consumer: Consumer) -> None:
    message = claimed_early(consumer)
    (held,) = consumer.pool.held()
    assert (held.id, states([message])) == (message.pk, [State.RUNNING])
    assert held.due_mono - held.claimed_mono == pytest.approx(8)
    assert held.lateness == 0
    row = Transition.objects.get(message_id=message.pk, to_state=State.RUNNING)
    assert row.at < message.due_at == row.ready_at


def test_nothing_is_claimed_more_than_that_before_it_falls_due(consumer: Consumer) -> None:
    messages = in_an_hour(consumer)
    so_long_before(consumer, messages[0], MOST + 0.0001)
    assert consumer.turn() > 0.4
    assert (consumer.pool.held(), states(messages)) == ([], [State.SCHEDULED])


def test_it_comes_back_when_it_is_time_for_a_claim(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer.pauses.queues = lambda: ("other", QUEUE)
    messages = in_an_hour(consumer)
    so_long_before(consumer, messages[0], MOST + 0.0001)
    monkeypatch.setattr("django_delayq.worker.consumer.LOOK", 100.0)
    monkeypatch.setattr("django_delayq.worker.consumer.MOST_LOOK", 100.0)
    assert 0 < consumer.turn() <= MOST / 2 + 0.0001


def test_who_has_claimed_nothing_yet_leaves_what_is_early_to_others(consumer: Consumer) -> None:
    consumer.claim_ahead = ClaimAhead()
    messages = in_an_hour(consumer)
    so_long_before(consumer, messages[0], 0.001)
    consumer.turn()
    assert states(messages) == [State.SCHEDULED]


def test_who_does_not_know_a_topic_leaves_what_is_early_to_others(consumer: Consumer) -> None:
    messages = in_an_hour(consumer)
    Message.objects.filter(pk=messages[0].pk).update(topic="t.of_another")
    so_long_before(consumer, messages[0], 4)
    consumer.turn()
    # It has met it now.
    later = in_an_hour(consumer)
    so_long_before(consumer, later[0], 4)
    assert consumer.turn() > 0.4
    assert states(later) == [State.SCHEDULED]


def test_what_was_taken_early_in_a_paused_queue_is_put_back_where_it_was(consumer: Consumer) -> None:
    (message,) = in_an_hour(consumer)
    consumer.pauses.look()
    pause_queue(QUEUE)
    so_long_before(consumer, message, 4)
    consumer.turn()
    assert states([message]) == [State.SCHEDULED]
    assert place(consumer, message) == pytest.approx(to_tenths(message.due_at), abs=1)


def test_what_is_claimed_early_and_given_back_falls_due_no_earlier(consumer: Consumer) -> None:
    """It is to run alone, and another process runs one alone: it makes way for a moment."""
    message = claimed_early(consumer)
    (held,) = consumer.pool.held()
    consumer.pool.recorder.submit(held, Release("makes way", timedelta(milliseconds=1)), "worker:w")
    consumer.pool.recorder.flush(5)
    row = Message.objects.get(pk=message.pk)
    assert (row.state, row.due_at) == (State.SCHEDULED, message.due_at)


def test_who_delivers_by_query_sleeps_until_something_is_due(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "until_due", lambda *arguments: 4.0)
    monkeypatch.setattr(consumer.source, "redis", None)
    assert consumer.turn() > 0.4


def test_no_more_are_claimed_early_than_there_is_room_for(consumer: Consumer) -> None:
    messages = in_an_hour(consumer, 5)
    so_long_before(consumer, messages[0], 4)
    assert consumer.turn() > 0.4
    assert sorted(states(messages)) == [State.RUNNING] * 3 + [State.SCHEDULED] * 2
    # It does not come back before the others are due, or it would come back without end.
    assert consumer.turn() > 0.4


def test_who_may_take_nothing_takes_nothing_early(consumer: Consumer) -> None:
    consumer.budget = Budget(0)
    messages = in_an_hour(consumer)
    so_long_before(consumer, messages[0], 4)
    assert consumer.turn() > 0.4
    assert states(messages) == [State.SCHEDULED]


def test_a_row_that_is_due_later_than_redis_believes_is_not_claimed_early(consumer: Consumer) -> None:
    (message,) = in_an_hour(consumer)
    later = message.due_at + timedelta(seconds=1)
    Message.objects.filter(pk=message.pk).update(due_at=later)
    so_long_before(consumer, message, 4)
    consumer.turn()
    assert (consumer.pool.held(), states([message])) == ([], [State.SCHEDULED])
    assert place(consumer, message) == pytest.approx(to_tenths(later), abs=1)


def test_what_is_claimed_early_runs_already_for_who_cancels_or_reschedules(consumer: Consumer) -> None:
    message = claimed_early(consumer)
    assert reschedule_message(message, delay=60).verdict == Verdict.TOO_LATE
    assert cancel_message(message).verdict == Verdict.REQUESTED


# --- in the threads ---------------------------------------------------------------------------------------------------


def claimed(until: float, **options: Any) -> Delivery:
    """A message that falls due so many seconds after it was claimed."""
    message = schedule_message("t.ok", **options)
    handler = registry.handlers()["t.ok"]
    (row,) = transitions.claim(DB, [Ticket(message.pk)], {"t.ok": handler.lease}, "w")
    return Delivery(row, handler, DB, until=until)


@pytest.fixture
def pool(recorder: Recorder) -> Iterator[Pool]:
    made = Pool(1, recorder, "w", lambda: None)
    made.start()
    yield made
    made.stop()


def begins(delivery: Delivery) -> Callable[[], bool]:
    return lambda: Message.objects.get(pk=delivery.id).state == State.CONSUMED


def test_a_handler_does_not_begin_before_its_message_is_due(pool: Pool) -> None:
    delivery = claimed(until=0.25)
    pool.submit([delivery])
    eventually(begins(delivery), "the end of the delivery")
    assert delivery.started_mono >= delivery.claimed_mono + 0.25


def test_what_waits_for_its_time_keeps_nobody_else_waiting(pool: Pool) -> None:
    early, due = claimed(until=60), claimed(until=0)
    pool.submit([early, due])
    eventually(begins(due), "the end of the delivery")
    assert not early.started_mono
    assert pool.busy


def test_of_what_falls_due_together_the_best_begins_first(pool: Pool) -> None:
    low, high = claimed(until=60), claimed(until=60, priority=9)
    low.due_mono = high.due_mono = time.monotonic() + 0.3
    pool.submit([low, high])
    eventually(begins(low), "the end of both")
    assert high.due_mono <= high.started_mono < low.started_mono


def test_what_is_due_earlier_than_all_others_is_not_slept_through(pool: Pool) -> None:
    late, early = claimed(until=600), claimed(until=0.2)
    pool.submit([late])
    waiters: Any = pool._due_timer._changed.__dict__["_waiters"]
    eventually(lambda: bool(waiters), "the alarm sleeps")
    pool.submit([early])
    eventually(begins(early), "the end of the delivery")
    assert early.started_mono >= early.due_mono


def test_what_becomes_due_in_the_moment_of_a_shutdown_is_given_back_too(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1, recorder, "w", lambda: None)
    delivery = claimed(until=60)
    pool.submit([delivery])

    def ring_first() -> list[Delivery]:
        pool._waiting.put(delivery)
        return []

    monkeypatch.setattr(pool._due_timer, "clear", ring_first)
    pool.drain()
    assert not pool.busy


def test_what_waits_for_its_time_is_given_back_at_a_shutdown(pool: Pool) -> None:
    delivery = claimed(until=60)
    pool.submit([delivery])
    pool.drain()
    assert not pool.busy
    pool.recorder.flush(5)
    row = Transition.objects.filter(message_id=delivery.id).latest("number")
    assert (row.to_state, row.reason) == (State.SCHEDULED, "shutdown")
    assert not delivery.started_mono


# --- how long before --------------------------------------------------------------------------------------------------


def test_the_lead_is_as_long_as_a_claim_takes_and_what_it_varies_by() -> None:
    claim_ahead = ClaimAhead()
    claim_ahead.learn(1.0)
    assert claim_ahead.lead == pytest.approx(3.0)
    for _turn in range(1000):
        claim_ahead.learn(0.001)
    assert claim_ahead.lead == pytest.approx(0.001, abs=0.0001)
    steady = claim_ahead.lead
    claim_ahead.learn(0.002)
    assert claim_ahead.lead > steady + 0.0005


def test_late_is_what_begins_after_its_time_even_if_it_was_claimed_before() -> None:
    delivery = claimed(until=2)
    assert delivery.lateness == 0
    delivery.started_mono = delivery.due_mono + 0.75
    assert delivery.lateness == pytest.approx(0.75)


def test_the_lead_has_a_limit_however_slow_a_claim_was() -> None:
    claim_ahead = ClaimAhead()
    claim_ahead.learn(60.0)
    assert claim_ahead.lead == MOST / 2
    assert claim_ahead.reach == MOST
