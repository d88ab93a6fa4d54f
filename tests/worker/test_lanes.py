"""The room for messages of two kinds: those whose handlers run in threads, and those whose handlers run on the loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.broker import index
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.run.event_loop import EventLoop
from tests.support.assembled import Assemble
from tests.support.claims import DB

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("loaded", "puts_are_flushed")]

SYNC, ASYNC = "t.ok", "t.async"


def held(parts: Parts) -> list[str]:
    return sorted(delivery.topic for delivery in parts.pool.held())


def scheduled() -> set[int]:
    return set(Message.objects.filter(state=State.SCHEDULED).values_list("pk", flat=True))


def ready() -> set[int]:
    """Return the ids in Redis."""
    broker = index(DB)
    assert broker is not None
    return {pk for some in broker.ids("default") for pk in some}


def turn(parts: Parts) -> None:
    """Make turns until the consumer would wait for something."""
    while parts.consumer.turn() == 0:
        pass


@pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])
def test_no_more_messages_of_a_kind_are_claimed_than_there_is_room_for(assembled: Assemble, with_redis: bool) -> None:
    parts = assembled(2, tasks=5, redis=with_redis)
    for topic in [SYNC] * 8 + [ASYNC] * 8:
        schedule_message(topic)
    for _ in range(12):
        turn(parts)
        counts = held(parts).count(SYNC), held(parts).count(ASYNC)
        assert counts[0] <= 2
        assert counts[1] <= 5
    assert counts == (2, 5)
    if with_redis:
        assert ready() == scheduled()


@pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])
@pytest.mark.parametrize(("full", "other"), [(SYNC, ASYNC), (ASYNC, SYNC)], ids=["threads full", "loop full"])
def test_a_full_lane_does_not_hold_up_the_other_one(
    assembled: Assemble, full: str, other: str, with_redis: bool
) -> None:
    parts = assembled(3, tasks=3, redis=with_redis)
    for _ in range(5):
        schedule_message(full)
    for _ in range(4):
        turn(parts)
    assert held(parts) == [full] * 3
    schedule_message(other)
    turn(parts)
    assert held(parts) == sorted([full] * 3 + [other])


@pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])
def test_a_place_that_becomes_free_amid_a_turn_is_kept_for_the_higher_queue(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch, with_redis: bool
) -> None:
    parts = assembled(1, tasks=5, queues=("high", "low"), redis=with_redis)
    schedule_message(SYNC, queue="high")
    turn(parts)
    high, low = schedule_message(SYNC, queue="high"), schedule_message(SYNC, queue="low")
    beside = schedule_message(ASYNC, queue="low")
    learn = parts.consumer._learn

    def free(*arguments: Any) -> None:
        # The step of the higher queue is over.
        (delivery,) = parts.pool.threads.held.all()
        parts.pool.threads.held.remove(delivery)
        monkeypatch.setattr(parts.consumer, "_learn", learn)
        learn(*arguments)

    monkeypatch.setattr(parts.consumer, "_learn", free)
    parts.consumer.turn()
    assert {delivery.id for delivery in parts.pool.held()} <= {beside.pk}
    turn(parts)
    turn(parts)
    assert {delivery.id for delivery in parts.pool.held()} == {high.pk, beside.pk}
    assert scheduled() == {low.pk}


def test_a_lost_reply_while_ids_stand_aside_orphans_no_claim(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assembled(1, tasks=5)
    schedule_message(SYNC)
    turn(parts)
    waiting, beside = schedule_message(SYNC), schedule_message(ASYNC)
    broker = parts.brokers.current()
    stand_aside = broker.stand_aside

    def lose(queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        stand_aside(queue, tickets)
        raise BrokerUnavailable("the reply is lost")

    monkeypatch.setattr(broker, "stand_aside", lose)
    turn(parts)
    assert parts.brokers.current() is parts.brokers.database
    assert held(parts) == sorted([SYNC, ASYNC])
    assert beside.pk in {delivery.id for delivery in parts.pool.held()}
    assert scheduled() == {waiting.pk}


def test_ids_for_a_full_lane_are_taken_once(assembled: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assembled(1, tasks=20)
    for _ in range(60):
        schedule_message(SYNC)
    taken: list[int] = []
    broker = parts.brokers.current()
    stand_aside = broker.stand_aside

    def count(queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        taken.extend(ticket.id for some in tickets.values() for ticket in some)
        stand_aside(queue, tickets)

    monkeypatch.setattr(broker, "stand_aside", count)
    for _ in range(10):
        turn(parts)
    assert held(parts) == [SYNC]
    assert sorted(taken) == sorted(scheduled())
    assert ready() == scheduled()


def test_a_process_takes_as_many_ids_as_its_last_messages_suggest(assembled: Assemble) -> None:
    parts = assembled(4, tasks=100)
    assert isinstance(parts.pool.loop, EventLoop)
    # A loop that has shown that it can.
    parts.pool.loop._taken_on = 100
    only = parts.consumer.wanted
    only.see()
    for _ in range(60):
        only.learn([ASYNC] * 5)
    assert only.ids == 100
    assert only.usual == only.lanes[1:]
    for _ in range(60):
        only.learn([SYNC] * 5)
    assert only.ids == 4
    assert only.usual == only.lanes[:1]
    for _ in range(60):
        only.learn([SYNC, ASYNC])
    assert only.ids in (7, 8)
    assert only.usual == only.lanes


def test_a_consumer_is_woken_when_the_full_lane_has_room_again(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assembled(1, tasks=5)
    woken: list[float] = []
    schedule_message(SYNC)
    turn(parts)
    monkeypatch.setattr(parts.brokers, "wake", lambda: woken.append(time.monotonic()))
    parts.consumer.on_freed()
    assert not woken
    parts.pool.threads.held.remove(parts.pool.held()[0])
    parts.consumer.on_freed()
    assert len(woken) == 1
