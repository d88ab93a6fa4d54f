"""Paused queues: no message starts in them or is lost, and the messages go on by themselves afterwards."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.utils import timezone

from django_delayq import (
    InvalidMessage,
    apause_queue,
    aresume_queue,
    cancel_message,
    pause_queue,
    resume_queue,
    schedule_message,
    schedule_messages,
)
from django_delayq.api import pausing
from django_delayq.broker.keys import keys
from django_delayq.core import actors, in_tests
from django_delayq.core.states import State
from django_delayq.models import Message, Queue, Transition
from django_delayq.record import reads, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.claim.tuning import Tuning
from tests.support.assembled import Assemble
from tests.support.in_redis import calls
from tests.support.limits import Declare
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, log_of, once_each, states, wait_until
from tests.support.steps import ago, until_due
from tests.support.transactions import unfinished
from tests.support.workers import PATIENCE, eventually
from tests.worker.bench import redis_of

pytestmark = pytest.mark.django_db(transaction=True)

DB = "default"
QUEUE = "mail"
BOTH = pytest.mark.usefixtures("timed_by")


def due(number: int = 1, *, priority: int = 0, topic: str = "t.effect", queue: str = QUEUE) -> list[Message]:
    """Schedule messages that are due already."""
    payload = {"seconds": 0.02}
    return schedule_messages(
        {"topic": topic, "payload": payload, "queue": queue, "priority": priority, "due_at": ago(1)}
        for _ in range(number)
    )


def claim(*messages: Message) -> set[int]:
    tickets = [Ticket(message.pk) for message in messages]
    return {row.id for row in transitions.claim(DB, tickets, {"t.effect": 60.0}, "w")}


def passer_by(queue: str = "other") -> None:
    """Schedule a message in another queue and wait for its end: the workers have made a turn since then."""
    wait_until(schedule_message("t.ok", queue=queue), State.CONSUMED)


def starts_after(when: datetime) -> list[int]:
    rows = Transition.objects.filter(to_state=State.RUNNING, at__gt=when, message__queue=QUEUE)
    return list(rows.order_by("at").values_list("message_id", flat=True))


# --- the actions ------------------------------------------------------------------------------------------------------


def test_a_paused_queue_gives_nothing_away_and_another_does() -> None:
    (held,), (free,) = due(), due(queue="other")
    pause_queue(QUEUE)

    assert until_due(QUEUE, ["t.effect"]) is None
    assert statements(DB).due(QUEUE, ["t.effect"], 10) == []
    assert claim(held, free) == {free.pk}

    assert resume_queue(QUEUE)
    assert (until_due(QUEUE, ["t.effect"]) or 0) < 0
    assert [ticket.id for ticket in statements(DB).due(QUEUE, ["t.effect"], 10)] == [held.pk]
    assert claim(held) == {held.pk}


def test_a_pause_shows_its_author_reason_beginning_and_end() -> None:
    before = reads.now(DB)
    with actors.acting_as("user:anna"):
        queue = pause_queue(QUEUE, duration="30m", reason="the mail server moves\x00")
    assert (queue.paused_by, queue.reason) == ("user:anna", "the mail server moves\ufffd")
    assert before <= queue.paused_at <= reads.now(DB)
    assert queue.resumes_at == queue.paused_at + timedelta(minutes=30)
    assert pausing.paused(DB) == {QUEUE: queue}


def test_pausing_again_changes_the_end_and_the_reason_but_not_since_when() -> None:
    first = pause_queue(QUEUE, duration="1h", reason="one")
    again = pause_queue(QUEUE, reason="two")
    assert (again.paused_at, again.resumes_at, again.reason) == (first.paused_at, None, "two")
    assert Queue.objects.count() == 1


def test_a_pause_that_is_over_has_no_effect_and_another_one_begins_anew() -> None:
    Queue.objects.create(name=QUEUE, paused_at=ago(100), resumes_at=ago(1), reason="old")
    (message,) = due()
    assert pausing.paused(DB) == {}
    assert not resume_queue(QUEUE)
    Queue.objects.create(name=QUEUE, paused_at=ago(100), resumes_at=ago(1), reason="old")
    assert claim(message) == {message.pk}
    assert pause_queue(QUEUE).paused_at > ago(50)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("no such {name}", {}, "queue"),
        (QUEUE, {"until": ago(-60), "duration": 60}, "not both"),
        (QUEUE, {"until": datetime(2100, 1, 1)}, "time zone"),  # noqa: DTZ001
        (QUEUE, {"duration": 0}, "over already"),
        (QUEUE, {"duration": -1}, "duration must be between 0"),
        (QUEUE, {"duration": "soon"}, "duration"),
    ],
)
def test_an_impossible_pause_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        pause_queue(name, **options)
    assert not Queue.objects.exists()


def test_async_code_can_pause_and_resume() -> None:
    queue = async_to_sync(apause_queue)(QUEUE, reason="why")
    assert (queue.name, queue.reason) == (QUEUE, "why")
    assert [async_to_sync(aresume_queue)(QUEUE) for _ in range(2)] == [True, False]


def test_a_pause_that_is_rolled_back_has_no_effect() -> None:
    with transaction.atomic():
        pause_queue(QUEUE)
        transaction.set_rollback(True)
    assert not pausing.paused(DB)


def test_a_paused_message_can_be_cancelled_and_expires() -> None:
    pause_queue(QUEUE)
    (cancelled,) = due()
    assert cancel_message(cancelled)
    late = schedule_message("t.effect", queue=QUEUE, due_at=ago(30), expires=1)
    assert [moved.id for moved in transitions.expire(DB, actor="reaper")] == [late.pk]


# --- claims that are under way ----------------------------------------------------------------------------------------


@pytest.mark.postgresql("needs claims side by side")
def test_a_pause_returns_when_the_claims_that_do_not_know_of_it_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = due()
    with unfinished(lambda: claim(message)) as go:
        seen: list[str] = []
        original = statements("default").claims_under_way

        def count_and_release() -> set[str]:
            found = original()
            seen.append(Message.objects.get(pk=message.pk).state)
            if len(seen) == 3:
                go.set()
            return found

        monkeypatch.setattr(statements("default"), "claims_under_way", count_and_release)
        pausing.pause(DB, QUEUE, patience=PATIENCE)
    assert seen[:3] == [State.SCHEDULED] * 3
    assert Message.objects.get(pk=message.pk).state == State.RUNNING


@pytest.mark.postgresql("needs claims side by side")
def test_a_pause_does_not_wait_for_ever() -> None:
    (message,) = due()
    with unfinished(lambda: claim(message)):
        pausing.pause(DB, QUEUE, patience=0.05)
        assert pausing.paused(DB)


# --- workers ----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_pause_under_load_holds_from_its_return_on(start: Start) -> None:
    messages = due(300, topic="t.sleep")
    start("--queue", QUEUE, "--queue", "other", "--threads", "2", "--processes", "2")
    eventually(lambda: states()[State.CONSUMED] >= 20, "some are consumed")
    pause_queue(QUEUE)
    paused = reads.now(DB)
    urgent = due(5, priority=50, topic="t.sleep")
    passer_by()
    eventually(lambda: states()[State.RUNNING] == 0, "what runs ends")
    passer_by()
    left = states()[State.SCHEDULED]
    assert left >= 5
    assert starts_after(paused) == []

    resume_queue(QUEUE)
    eventually(lambda: states()[State.SCHEDULED] == 0 and states()[State.RUNNING] == 0, "all are consumed")
    assert effects_per_message() == once_each([*messages, *urgent])
    # Each process takes a handful at a time, and the one with the urgent ones may stand still before it claims them.
    # Without their priority, they would be the last.
    first = starts_after(paused)
    assert len(first) == left
    assert {message.pk for message in urgent} <= set(first[: max(16, left // 2)])


@BOTH
def test_running_messages_go_on_in_a_paused_queue_and_retries_wait_until_its_end(start: Start, gate: Gate) -> None:
    start("--queue", QUEUE, "--queue", "other")
    (gate.folder / "fail-1").touch()
    message = schedule_message("t.gate", gate.payload, queue=QUEUE)
    eventually(gate.begun, "it begins")
    pause_queue(QUEUE)
    gate.open()
    wait_until(message, State.SCHEDULED)
    # Its retry falls due in 0.05 s.
    eventually(lambda: timezone.now() > Message.objects.get(pk=message.pk).due_at, "the retry is due")
    passer_by()
    passer_by()
    assert wait_until(message, State.SCHEDULED).deliveries == 1
    resume_queue(QUEUE)
    assert wait_until(message, State.CONSUMED).deliveries == 2
    # Another pause ends by itself.
    queue = pause_queue(QUEUE, duration=1.5)
    assert queue.resumes_at is not None
    later = due(10)
    for one in later:
        assert log_of(wait_until(one, State.CONSUMED))[1].at >= queue.resumes_at


def test_a_worker_that_is_killed_during_a_pause_costs_nothing(start: Start) -> None:
    pause_queue(QUEUE)
    first = start("--queue", QUEUE, "--queue", "other")
    messages = due(30)
    passer_by()
    first.kill()
    start("--queue", QUEUE, "--queue", "other")
    passer_by()
    assert states()[State.SCHEDULED] == 30
    resume_queue(QUEUE)
    eventually(lambda: states() == {State.CONSUMED: 32}, "all are consumed")
    assert effects_per_message() == once_each(messages)


def test_a_worker_says_which_queues_are_paused_at_its_start_and_later(start: Start) -> None:
    pause_queue(QUEUE, reason="the provider is down")
    worker = start("--queue", QUEUE, "--queue", "other", "--processes", "1")
    told = r"The queue mail is paused until it is resumed, by process:\S+: the provider is down"
    worker.wait_for(f"{told}: its messages wait")
    pause_queue("other", duration="1h")
    due(1, queue="other")
    worker.wait_for("The queue other is paused until 20")
    resume_queue("other")
    worker.wait_for("The queue other is paused no more")


def test_a_worker_without_redis_says_which_queues_are_paused(
    assembled: Assemble, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Tuning(idle_wait=0.0, pause_check_interval=0.0)
    consumer = assembled(1, queues=(QUEUE,), redis=False, tuning=tuning).consumer
    due()
    for act in (pause_queue, resume_queue):
        act(QUEUE)
        for _ in range(2):
            consumer.run_round()
    told = [record.getMessage() for record in caplog.records if record.name == "django_delayq"]
    assert [line.partition(",")[0] for line in told if "is paused" in line] == [
        "The queue mail is paused until it is resumed",
        "The queue mail is paused no more: its messages start",
    ]


# --- a consumer that knows --------------------------------------------------------------------------------------------


@pytest.fixture
def consumer(loaded: None, puts_are_flushed: None, assembled: Assemble) -> Consumer:
    """A consumer of two queues with Redis; a test makes its turns."""
    return assembled(threads=4, queues=(QUEUE, "other")).consumer


def test_a_consumer_that_knows_of_a_pause_takes_nothing_and_waits(
    consumer: Consumer, redis_client: redis.Redis
) -> None:
    consumer.tuning.pause_check_interval = 600.0
    pause_queue(QUEUE)
    due(20)
    ready = keys("delayq", QUEUE).ready
    consumer.run_round()
    assert redis_client.zcard(ready) == 20
    calls(redis_client)
    waits = [consumer.run_round() for _ in range(50)]
    assert all(1.0 < wait <= 600.0 for wait in waits)
    # One for the other queue in each turn.
    assert calls(redis_client) == 50
    assert redis_client.zcard(ready) == 20


def test_an_id_that_is_put_back_keeps_its_rank(consumer: Consumer, redis_client: redis.Redis) -> None:
    pause_queue(QUEUE)
    due(3)
    (best,), (worst,) = due(priority=90), due(priority=-90)
    redis_broker = consumer.brokers.redis
    assert redis_broker is not None
    ready = keys("delayq", QUEUE).ready
    redis_broker.promote(QUEUE)
    before = redis_client.zrange(ready, 0, -1, withscores=True)
    consumer.run_round()
    assert redis_client.zrange(ready, 0, -1, withscores=True) == before
    assert (int(before[0][0]), int(before[-1][0])) == (best.pk, worst.pk)


def test_a_consumer_with_nothing_but_paused_queues_waits_too(consumer: Consumer) -> None:
    for queue in (QUEUE, "other"):
        pause_queue(queue)
        due(2, queue=queue)
    consumer.run_round()
    assert 0 < consumer.run_round() <= 1.0
    assert consumer.pauses.served == ()
    consumer.stop()
    consumer.wake_ups.wait(30.0)


@pytest.mark.postgresql("a claim and a pause are written at the same moment")
@pytest.mark.usefixtures("loaded", "puts_are_flushed")
def test_a_place_that_a_pause_left_unused_is_free_after_it(
    assembled: Assemble, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is paused when the worker has chosen, in its claim, who has the place. No look helps."""
    declare("l.one", limit=1)
    tuning = Tuning(look_interval=10 * PATIENCE, pause_check_interval=0.0)
    worker = assembled(2, queues=(QUEUE,), tuning=tuning)
    first, _second = due(2, topic="l.one")
    redis_of(worker.brokers).flush()

    def pause() -> None:
        pausing.pause(DB, QUEUE, patience=0.0)
        connections.close_all()

    def pause_meanwhile(place: str) -> None:
        if place == "before_limited_claim":
            monkeypatch.setattr(in_tests, "failpoint", None)
            thread = threading.Thread(target=pause)
            thread.start()
            thread.join()

    monkeypatch.setattr(in_tests, "failpoint", pause_meanwhile)
    worker.consumer.run_round()
    assert resume_queue(QUEUE)
    for _ in range(3):
        worker.consumer.run_round()
    assert [delivery.id for delivery in worker.pool.held()] == [first.pk]
