"""The consumer: what it claims, in which order, within which limits, what runs alone, and when it comes back."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import redis
from django.utils import timezone

from django_delayq import (
    MessageDict,
    cancel_message,
    handler,
    pause_queue,
    resume_queue,
    schedule_message,
    schedule_messages,
)
from django_delayq.broker.base import IDS_PER_CALL, Taken
from django_delayq.broker.keys import RANKS, keys
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message, Transition
from django_delayq.models.messages import Place
from django_delayq.project import registry
from django_delayq.record import reads
from django_delayq.record.sql.rows import ROWS_PASSED, Ticket
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.claim.queues import QueueFinder
from django_delayq.worker.claim.tuning import Tuning
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run.recorder import LeaseRenewer
from django_delayq.worker.run.run_tuning import RunTuning
from django_delayq.worker.shared.shared_state import ProcessLock
from django_delayq.worker.upkeep.janitor import Janitor
from django_delayq.worker.upkeep.loader import Loader
from tests.app.models import Effect
from tests.support.assembled import Assemble, drain
from tests.support.claims import DB, claimed, state
from tests.support.forks import forked
from tests.support.limits import Declare, admit, states, succeed
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE, eventually
from tests.worker.bench import held, redis_of, running, suspect

pytestmark = pytest.mark.django_db(transaction=True)


def test_claimed_messages_run_although_redis_goes_away_while_the_rest_is_put_back(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, early = schedule_message("t.ok"), schedule_message("t.ok", delay=60)
    now_tenths = int((time.time() + 0.01) * SECOND)
    taken = Taken([Ticket(message.pk, now_tenths) for message in (ready, early)])
    redis = redis_of(parts.brokers)
    monkeypatch.setattr(redis, "take", lambda *_asked, **_how: taken)
    monkeypatch.setattr(redis, "put", Mock(side_effect=BrokerUnavailable))
    parts.consumer.run_round()
    assert held(parts) == [ready.pk]
    assert parts.brokers.current() is parts.brokers.database


def test_a_message_that_falls_due_while_others_are_claimed_is_not_slept_through(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_after_answer(ago: float) -> float:
        answer = Taken(next_due=1.5, at=time.monotonic() - ago)
        monkeypatch.setattr(redis_of(parts.brokers), "take", lambda *_asked, **_how: answer)
        return parts.consumer.run_round()

    assert wait_after_answer(ago=1.0) <= 0.5
    assert wait_after_answer(ago=60.0) == 0.0


def test_a_worker_whose_lease_renewals_get_no_answer_claims_nothing(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes wait behind them: the same thread writes both."""
    answers = threading.Event()

    def wait(_renewer: LeaseRenewer) -> float:
        assert answers.wait(PATIENCE)
        return 60.0

    monkeypatch.setattr(LeaseRenewer, "tick", wait)
    parts = assembled(redis=False, tuning=Tuning(longest_behind=0.05))
    eventually(lambda: parts.recorder.behind > 0.05, "a renewal waits")
    message = schedule_message("t.ok")
    parts.consumer.run_round()
    assert state(message) == State.SCHEDULED
    answers.set()
    eventually(lambda: not parts.recorder.behind, "the renewal has its answer")
    parts.consumer.run_round()
    assert state(message) == State.RUNNING


def test_a_consumer_that_may_deliver_no_more_does_not_ask_again_and_again(assembled: Assemble) -> None:
    consumer = assembled(redis=False, max_messages=1).consumer
    schedule_messages([{"topic": "t.ok"}] * 3)
    consumer.run_round()
    assert len(consumer.pool.held()) == 1
    consumer.pool.threads._all_slots = 3
    assert not consumer._may_go_on()
    assert consumer.run_round() > 0.5


@pytest.mark.usefixtures("loaded", "puts_are_flushed")
def test_a_worker_with_a_backlog_claims_again_when_half_of_what_it_held_has_run(assembled: Assemble) -> None:
    """A claim takes about as long for one message as for fifty."""
    may_end = threading.Semaphore(0)
    handler("t.step")(lambda message: may_end.acquire() and None)
    run_tuning = RunTuning(queued_time=1000.0, longest_queued=1000.0)
    parts = assembled(tuning=Tuning(longest_unheard=2 * PATIENCE), run_tuning=run_tuning)
    # One runs, and twenty wait.
    parts.pool.threads._mean = 50.0
    schedule_messages([{"topic": "t.step"}] * 100)
    with running(parts.pool, parts.consumer):
        eventually(lambda: len(held(parts)) == 21, "the first claim")
        may_end.release(10)
        eventually(lambda: len(held(parts)) == 11, "the end of ten, and no other claim")
        may_end.release()
        eventually(lambda: len(held(parts)) > 20, "the second claim")
        may_end.release(100)


# --- messages that run alone ------------------------------------------------------------------------------------------


def test_a_message_that_is_to_run_alone_waits_longer_each_time(assembled: Assemble) -> None:
    """Otherwise a process that is always busy with handlers of a minute would never run it."""
    parts = assembled(threads=2, redis=False)
    consumer, recorder = parts.consumer, parts.recorder
    (busy,) = claimed("t.ok")
    consumer.pool.threads.held.add([busy])
    message = suspect()
    waits = []
    for _time in range(3):
        consumer.run_round()
        assert consumer.pool.recorder.held.isolated is not None
        waits.append(consumer.isolation.seconds_left)
        assert consumer.run_round() <= waits[-1]
        consumer.isolation._wait_ends = 0.0
        consumer.run_round()
        assert recorder.flush(PATIENCE)
        assert Message.objects.get(pk=message.pk).due_at > reads.now(DB)
        unguarded(Message).filter(pk=message.pk).update(due_at=message.due_at)
    assert [round(seconds / consumer.pool.tuning.isolation_wait) for seconds in waits] == [1, 2, 4]
    consumer.pool.threads.held.remove(busy)
    with running(consumer.pool):
        consumer.run_round()
        consumer.run_round()
        eventually(lambda: state(message) == State.CONSUMED, "it runs alone")


def test_messages_that_make_way_for_one_that_runs_alone_are_soon_there_when_it_ends(assembled: Assemble) -> None:
    """However often they were put off before."""
    lock, began = ProcessLock(), time.monotonic()
    with forked(lock.acquire):
        parts = assembled(threads=20, redis=False, isolation_lock=lock)
        messages = [suspect() for _ in range(20)]
        unguarded(Message).update(deliveries=9, reported=7)
        parts.consumer.run_round()
        assert parts.recorder.flush(PATIENCE)
        rows = Transition.objects.filter(message__in=messages, reason="is to run alone")
        delays = [(row.due_at - row.at).total_seconds() for row in rows]
        assert len(delays) == len(messages)
        # A fifth of a second for each of them, so that there is one in each tenth; longer while that one runs for long.
        assert max(delays) < 0.1 + max(len(messages) / 5, (time.monotonic() - began) / 4)


def test_a_message_that_is_cancelled_while_it_waits_to_run_alone_does_not_run(assembled: Assemble) -> None:
    parts = assembled(threads=2, redis=False)
    parts.pool.threads.held.add(claimed("t.ok"))
    message = suspect("t.effect")
    parts.consumer.run_round()
    waiting = parts.recorder.held.isolated
    assert waiting is not None
    cancel_message(message)
    eventually(lambda: waiting.cancel_requested, "the worker knows")
    parts.consumer.run_round()
    assert parts.recorder.flush(60)
    assert state(message) == State.CANCELLED
    assert not Effect.objects.exists()


def test_a_process_whose_last_message_runs_alone_has_no_successor(assembled: Assemble) -> None:
    for most, has_successor in ((1, False), (2, True)):
        parts = assembled(threads=2, redis=False, max_messages=most)
        message = suspect()
        parts.consumer.run_round()
        assert held(parts) == [message.pk]
        assert bool(parts.pool.shared.suspect_since) == has_successor


def test_an_async_handler_runs_alone_when_neither_a_thread_nor_the_loop_is_busy(assembled: Assemble) -> None:
    parts = assembled(threads=2, tasks=5, redis=False)
    consumer, (threads, loop) = parts.consumer, parts.pool.lanes
    for lane, topic in ((threads, "t.ok"), (loop, "t.async")):
        lane.held.add(claimed(topic))
    message = suspect("t.async")
    with running(parts.pool):
        consumer.run_round()
        for lane in (threads, loop):
            consumer.run_round()
            assert parts.recorder.held.isolated is not None
            (busy,) = lane.held.all()
            lane.held.remove(busy)
        consumer.run_round()
        assert parts.recorder.flush(60)
    assert state(message) == State.CONSUMED
    assert Transition.objects.get(message=message, to_state=State.CONSUMED).actor == "worker:w/async"


def test_a_message_that_is_to_run_alone_runs_with_once_although_no_more_may_be_delivered() -> None:
    message = suspect()
    assert drain(Options(DB, threads=2, max_messages=1)) == 1
    assert state(message) == State.CONSUMED


def test_a_process_that_was_replaced_takes_nothing(assembled: Assemble) -> None:
    parts = assembled(threads=2, redis=False)
    schedule_message("t.ok")
    parts.pool.shared.replaced = True
    parts.consumer.run_round()
    assert parts.pool.held() == []


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(declare: Declare) -> list[Message]:
    """Three messages of which one may run at a time; the first one does."""
    declare("l.one", limit=1)
    made = [schedule_message("l.one") for _ in range(3)]
    assert admit(*made) == [made[0].pk]
    return made


def test_a_run_with_once_goes_on_with_a_long_line(declare: Declare) -> None:
    """The look that went past the line may have begun while the limit was full, and ended when nothing ran."""
    declare("l.one", limit=1)
    schedule_messages([{"topic": "l.one"}] * (ROWS_PASSED + 1000))
    assert drain(Options(DB, threads=2, max_messages=50)) == 50


def test_a_run_with_once_ends_when_nothing_could_begin(three: list[Message]) -> None:
    assert drain(Options(DB, threads=1)) == 0
    assert states(*three) == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]


def test_without_redis_a_limit_is_tried_as_soon_as_the_record_has_room(declare: Declare, assembled: Assemble) -> None:
    """The worker never hears that the first delivery has ended: its lease was lost, for example."""
    declare("l.one", limit=1)
    worker = assembled(4, name="worker", redis=False)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    worker.consumer.run_round()
    assert held(worker) == [first.pk]
    worker.pool.threads.held.remove(worker.pool.held()[0])
    succeed(first)
    worker.consumer.run_round()
    assert held(worker) == [second.pk]
    assert states(third) == [State.SCHEDULED]


def test_the_janitor_deletes_places_that_are_free(three: list[Message]) -> None:
    succeed(three[0])
    assert Place.objects.exists()
    Janitor(DB).tick()
    assert not Place.objects.exists()


# --- order, and the queues that are found -----------------------------------------------------------------------------


def overdue(count: int) -> list[int]:
    """Schedule messages, each overdue longer than the one before. Return their ids, the longest overdue first."""
    now = timezone.now()
    messages: list[MessageDict] = [
        {"topic": "t.effect", "due_at": now - timedelta(milliseconds=10 * number)} for number in range(1, count + 1)
    ]
    ids = [message.pk for message in schedule_messages(messages)]
    return ids[::-1]


@pytest.mark.parametrize("broker", ["redis", "database"])
@pytest.mark.parametrize("paused", [False, True], ids=["", "after a pause"])
def test_an_overdue_backlog_runs_longest_overdue_first(
    redis_client: redis.Redis, assembled: Assemble, broker: str, paused: bool
) -> None:
    ids = overdue(120)
    if paused:
        pause_queue("default")
    parts = assembled(threads=1, redis=broker == "redis")
    if parts.brokers.redis is not None:
        Loader("default", parts.brokers, "w").tick()
        assert parts.brokers.redis.sizes(["default"])["default"].ready == len(ids)
    if paused:
        parts.consumer.run_round()
        resume_queue("default")

    def all_consumed() -> bool:
        parts.consumer.run_round()
        return not Message.objects.exclude(state=State.CONSUMED).exists()

    with running(parts.pool):
        eventually(all_consumed)
    assert list(Effect.objects.order_by("id").values_list("message_id", flat=True)) == ids


QUEUE = "default"


@pytest.fixture
def consumer(redis_client: redis.Redis, assembled: Assemble) -> Consumer:
    """A consumer whose threads do not run, so that it has room for four deliveries and no more."""
    return assembled(4).consumer


def test_the_most_urgent_message_does_not_wait_for_those_that_fell_due_before_it(
    consumer: Consumer, redis_client: redis.Redis
) -> None:
    places = keys("delayq", QUEUE)
    now_tenths = int(time.time() * SECOND)
    # Ids that the record does not know are dropped as they come.
    many = {str(number): now_tenths - 5 * SECOND + 100 / RANKS for number in range(1, IDS_PER_CALL * Tuning().catch_up)}
    urgent = IDS_PER_CALL * Tuning().catch_up
    redis_client.zadd(places.delayed, {**many, str(urgent): now_tenths - SECOND})
    assert consumer.brokers.redis is not None
    consumer.run_round()
    assert redis_client.zcard(places.delayed) == 0
    assert [ticket.id for ticket in consumer.brokers.redis.take(QUEUE, 1).tickets] == [urgent]


def test_ids_of_a_queue_that_others_serve_keep_no_urgent_message_waiting(
    consumer: Consumer, redis_client: redis.Redis
) -> None:
    schedule_message("t.ok", queue="of-others")
    redis_of(consumer.brokers).flush()
    places = keys("delayq", QUEUE)
    due_tenths = int((time.time() - 5) * SECOND)
    number = IDS_PER_CALL * Tuning().catch_up
    redis_client.zadd(places.delayed, {str(id_): due_tenths + 100 / RANKS for id_ in range(1, number + 1)})
    consumer.run_round()
    assert redis_client.zcard(places.delayed) == 0


def test_a_turn_makes_a_limited_number_ready(consumer: Consumer, redis_client: redis.Redis) -> None:
    places = keys("delayq", QUEUE)
    due_tenths = int((time.time() - 5) * SECOND)
    number = IDS_PER_CALL * (Tuning().catch_up + 3)
    redis_client.zadd(places.delayed, {str(id_): due_tenths + 100 / RANKS for id_ in range(1, number + 1)})
    consumer.run_round()
    assert redis_client.zcard(places.delayed) == IDS_PER_CALL * 2


def test_a_turn_makes_a_limited_number_ready_in_all_queues_together(
    redis_client: redis.Redis, assembled: Assemble
) -> None:
    queues, number = ("high", "low"), IDS_PER_CALL * (Tuning().catch_up + 3)
    due_tenths = int((time.time() - 5) * SECOND)
    for queue in queues:
        redis_client.zadd(
            keys("delayq", queue).delayed, {str(id_): due_tenths + 100 / RANKS for id_ in range(1, number + 1)}
        )
    assembled(4, queues=queues).consumer.run_round()
    left = sum(redis_client.zcard(keys("delayq", queue).delayed) for queue in queues)
    # Each queue is asked once; the other calls are shared.
    assert 2 * number - left <= IDS_PER_CALL * (Tuning().catch_up + 2)


def test_a_queue_that_runs_empty_is_still_served() -> None:
    message = schedule_message("t.ok", queue="found")
    queues = QueueFinder(DB)
    queues.tick()
    assert "found" in queues()
    cancel_message(message)
    queues.tick()
    assert "found" in queues()
    queues.tuning.remembered = 0.0
    queues.tick()
    assert "found" not in queues()


def test_the_first_message_of_a_new_queue_is_found_by_the_next_poll_without_redis(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other handlers of the tests have queues of their own, which the worker would know.
    monkeypatch.setattr(registry, "declared", {"t.ok": registry.handlers()["t.ok"]})
    parts = assembled(queues=(), redis=False)
    assert parts.queues() == ("default",)
    parts.consumer.run_round()
    message = schedule_message("t.ok", queue="never-used")
    parts.consumer.run_round()
    assert state(message) == State.RUNNING
