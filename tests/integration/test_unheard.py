"""A claim that is committed and whose answer is lost: nobody runs it, and it need not wait for its lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import redis
from django.db import OperationalError, connections
from pytest_django import DjangoAssertNumQueries

from django_delayq import cancel_message, registry, schedule_message, transitions
from django_delayq.broker.base import Entry
from django_delayq.exceptions import BrokerUnavailable
from django_delayq.extensions import WorkerExtensions
from django_delayq.models import Message
from django_delayq.sql.rows import Claimed
from django_delayq.states import State
from django_delayq.verdicts import Verdict
from django_delayq.worker.broker_switch import Source
from django_delayq.worker.budget import Budget
from django_delayq.worker.consumer import Consumer
from django_delayq.worker.delivery import Delivery
from django_delayq.worker.pool import Pool
from django_delayq.worker.recorder import Recorder
from tests.record_of import log_of
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = QUEUE = "default"
LOST = "the answer to its claim was lost"

Cut = Callable[[], None]


@pytest.fixture(params=["redis", "query"])
def consumer(request: pytest.FixtureRequest, redis_client: redis.Redis, recorder: Recorder) -> Iterator[Consumer]:
    """One whose threads have not begun."""
    source = Source(DB, registry.handlers, redis=request.param == "redis")
    if (there := source.redis) is not None:
        there.load(QUEUE, ahead=600, worker="t", lease=10, identity="t", server=there.server(), lost=True)
    yield Consumer(
        DB,
        source,
        Pool(3, recorder, "w", lambda: None),
        lambda: (QUEUE,),
        "w",
        Budget(None),
        5.0,
        WorkerExtensions(DB, "w"),
    )
    source.close()


@pytest.fixture
def cut(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Break the connection to the database as soon as the next claim is committed."""

    def lose() -> None:
        monkeypatch.undo()
        connections[DB].close()
        raise OperationalError("the connection was cut")

    def claim(*given: Any, **named: Any) -> list[Claimed]:
        really(*given, **named)
        lose()
        return []

    @contextmanager
    def exclusively() -> Iterator[None]:
        with held():
            yield
        lose()

    really, held = transitions.claim, consumer.source.database.exclusively

    def arm() -> None:
        if consumer.source.redis is None:
            # The claim is committed with the look for what is due.
            monkeypatch.setattr(consumer.source.database, "exclusively", exclusively)
        else:
            monkeypatch.setattr(transitions, "claim", claim)

    return arm


def due_message(consumer: Consumer) -> Message:
    message = schedule_message("t.ok")
    tell(consumer, message)
    return message


def tell(consumer: Consumer, message: Message) -> None:
    if consumer.source.redis is not None:
        consumer.source.redis.put(QUEUE, [Entry.at(message.pk, message.due_at, message.priority)])


def orphaned_claims(consumer: Consumer, cut: Cut) -> Message:
    """A message that is claimed, and its worker does not know it."""
    message = due_message(consumer)
    cut()
    with pytest.raises(OperationalError, match="cut"):
        consumer.turn()
    message.refresh_from_db()
    assert (message.state, message.worker) == (State.RUNNING, "w")
    assert message.pk not in {delivery.id for delivery in consumer.pool.held()}
    return message


def test_it_is_given_back_and_delivered_as_soon_as_the_database_answers(
    consumer: Consumer, cut: Cut, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    message = orphaned_claims(consumer, cut)
    delivery = held_again(consumer, message)
    # No death is held against it.
    assert (delivery.id, delivery.deliveries, delivery.crashes) == (message.pk, 2, 0)
    story = [(row.to_state, row.reason, row.attempt) for row in log_of(message)]
    assert story[1:] == [(State.RUNNING, "", 1), (State.SCHEDULED, LOST, 1), (State.RUNNING, "", 2)]
    with django_assert_num_queries(0):
        consumer.orphaned_claims.give_back()


def test_what_it_does_know_of_it_keeps(consumer: Consumer, cut: Cut) -> None:
    held = due_message(consumer)
    consumer.turn()
    # Redis may name it a second time, and this be among the claims whose answer is lost.
    consumer.orphaned_claims.missed([held.pk])
    consumer.turn()
    held.refresh_from_db()
    assert (held.state, held.deliveries) == (State.RUNNING, 1)
    lost = orphaned_claims(consumer, cut)
    consumer.orphaned_claims.missed([held.pk])
    held_again(consumer, lost)
    assert {(delivery.id, delivery.deliveries) for delivery in consumer.pool.held()} == {(held.pk, 1), (lost.pk, 2)}


def test_what_others_hold_is_theirs(consumer: Consumer) -> None:
    message = due_message(consumer)
    other = Consumer(
        DB, consumer.source, consumer.pool, lambda: (QUEUE,), "w2", Budget(None), 5.0, WorkerExtensions(DB, "w")
    )
    other.turn()
    consumer.orphaned_claims.missed([message.pk])
    consumer.turn()
    message.refresh_from_db()
    assert (message.state, message.worker) == (State.RUNNING, "w2")


def test_a_claim_that_was_not_committed_leaves_no_trace(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    message = due_message(consumer)
    with monkeypatch.context() as broken, pytest.raises(OperationalError):
        broken.setattr(transitions, "claim", refuse)
        consumer.turn()
    tell(consumer, message)
    assert held_again(consumer, message).deliveries == 1


def test_it_is_remembered_for_as_long_as_the_database_is_away(
    consumer: Consumer, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = orphaned_claims(consumer, cut)
    for _turn in range(2):
        with monkeypatch.context() as broken, pytest.raises(OperationalError):
            broken.setattr(transitions, "release_orphaned", refuse)
            consumer.turn()
    assert held_again(consumer, message).deliveries == 2


def test_so_it_is_when_redis_is_away_too(consumer: Consumer, cut: Cut) -> None:
    if consumer.source.redis is None:
        pytest.skip("there is none")
    message = due_message(consumer)
    cut()

    def park(*_given: Any) -> NoReturn:
        raise BrokerUnavailable("no answer")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(consumer.source.redis, "park", park)
        consumer.turn()
    assert consumer.source.current() is consumer.source.database
    assert held_again(consumer, message).deliveries == 2


def test_a_worker_that_ends_then_gives_it_back_too(consumer: Consumer, cut: Cut) -> None:
    message = orphaned_claims(consumer, cut)
    consumer.stop()
    consumer.run()
    assert log_of(message)[-1].reason == LOST
    # Not "outcome unknown": nobody ran it.
    assert cancel_message(message).verdict == Verdict.CANCELLED


def test_a_worker_that_ends_without_a_database_leaves_it_to_its_lease(
    consumer: Consumer, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = orphaned_claims(consumer, cut)
    monkeypatch.setattr(transitions, "release_orphaned", refuse)
    consumer.stop()
    consumer.run()
    message.refresh_from_db()
    assert message.state == State.RUNNING


def test_one_that_is_to_be_cancelled_is(consumer: Consumer, cut: Cut) -> None:
    message = orphaned_claims(consumer, cut)
    assert cancel_message(message).verdict == Verdict.REQUESTED
    consumer.turn()
    message.refresh_from_db()
    assert (message.state, log_of(message)[-1].reason) == (State.CANCELLED, f"cancel requested; {LOST}")


def held_again(consumer: Consumer, message: Message) -> Delivery:
    """The delivery that turns come to. Redis may hear later of what was given back than it is asked."""

    def found() -> list[Delivery]:
        consumer.turn()
        return [delivery for delivery in consumer.pool.held() if delivery.id == message.pk]

    eventually(found, "it is delivered again")
    return found()[0]


def refuse(*_given: Any, **_named: Any) -> NoReturn:
    raise OperationalError("there is no database")
