"""Orphaned claims: committed, but their answer was lost. They never run, and need not wait for their lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connections
from pytest_django import DjangoAssertNumQueries

from django_delayq import cancel_message, schedule_message
from django_delayq.core import in_tests
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.record import crashes, transitions
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.run.delivery import Delivery
from tests.support.assembled import Assemble
from tests.support.claims import state
from tests.support.record_of import log_of
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = "default"
LOST = "the answer to its claim was lost"

Cut = Callable[[], None]
REFUSE = Mock(side_effect=OperationalError("there is no database"))


@pytest.fixture(params=["redis", "query"])
def consumer(request: pytest.FixtureRequest, loaded: None, puts_are_flushed: None, assembled: Assemble) -> Consumer:
    """A consumer with room for three messages."""
    return assembled(threads=3, redis=request.param == "redis").consumer


@pytest.fixture
def cut(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Break the connection to the database as soon as the next claim is committed."""

    def lose(place: str) -> None:
        if place == "after_claim":
            monkeypatch.undo()
            connections[DB].close()
            raise OperationalError("the connection was cut")

    @contextmanager
    def exclusively() -> Iterator[None]:
        with held():
            yield
        lose("after_claim")

    held = consumer.brokers.database.exclusively

    def arm() -> None:
        if consumer.brokers.redis is None:
            # The claim is committed together with the query for what is due.
            monkeypatch.setattr(consumer.brokers.database, "exclusively", exclusively)
        else:
            monkeypatch.setattr(in_tests, "failpoint", lose)

    return arm


def orphan(consumer: Consumer, cut: Cut) -> Message:
    """Have a message claimed without the worker knowing it."""
    message = schedule_message("t.ok")
    cut()
    with pytest.raises(OperationalError, match="cut"):
        consumer.run_round()
    message.refresh_from_db()
    assert (message.state, message.worker) == (State.RUNNING, "w")
    assert message.pk not in {delivery.id for delivery in consumer.pool.held()}
    return message


def test_an_orphaned_claim_is_released_and_delivered_as_soon_as_the_database_answers(
    consumer: Consumer, cut: Cut, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    message = orphan(consumer, cut)
    delivery = held_again(consumer, message)
    # It does not count as a crash.
    assert (delivery.id, delivery.deliveries, delivery.crashes) == (message.pk, 2, 0)
    log = [(row.to_state, row.reason, row.delivery) for row in log_of(message)]
    assert log[1:] == [(State.RUNNING, "", 1), (State.SCHEDULED, LOST, 1), (State.RUNNING, "", 2)]
    with django_assert_num_queries(0):
        consumer.orphaned_claims.release()


def test_a_claim_whose_answer_came_is_kept(consumer: Consumer, cut: Cut) -> None:
    held = schedule_message("t.ok")
    consumer.run_round()
    # Redis may give its id a second time, and it may be among the ids of a claim whose answer was lost.
    consumer.orphaned_claims.note_unanswered([held.pk])
    consumer.run_round()
    held.refresh_from_db()
    assert (held.state, held.deliveries) == (State.RUNNING, 1)
    lost = orphan(consumer, cut)
    consumer.orphaned_claims.note_unanswered([held.pk])
    held_again(consumer, lost)
    assert {(delivery.id, delivery.deliveries) for delivery in consumer.pool.held()} == {(held.pk, 1), (lost.pk, 2)}


def test_a_message_that_another_worker_claimed_is_not_released(consumer: Consumer, assembled: Assemble) -> None:
    message = schedule_message("t.ok")
    assembled(name="w2", redis=consumer.brokers.redis is not None).consumer.run_round()
    consumer.orphaned_claims.note_unanswered([message.pk])
    consumer.run_round()
    message.refresh_from_db()
    assert (message.state, message.worker) == (State.RUNNING, "w2")


def test_a_claim_that_was_not_committed_leaves_no_trace(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    message = schedule_message("t.ok")
    with monkeypatch.context() as broken, pytest.raises(OperationalError):
        broken.setattr(transitions, "claim_asked", REFUSE)
        consumer.run_round()
    assert held_again(consumer, message).deliveries == 1


def test_an_orphaned_claim_is_remembered_while_the_database_is_away(
    consumer: Consumer, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = orphan(consumer, cut)
    for _turn in range(2):
        with monkeypatch.context() as broken, pytest.raises(OperationalError):
            broken.setattr(crashes, "release_orphaned", REFUSE)
            consumer.run_round()
    assert held_again(consumer, message).deliveries == 2


def test_an_orphaned_claim_is_released_when_redis_was_away_too(consumer: Consumer, cut: Cut) -> None:
    if consumer.brokers.redis is None:
        pytest.skip("there is none")
    message = schedule_message("t.ok")
    cut()

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(consumer.brokers.redis, "delay", Mock(side_effect=BrokerUnavailable("no answer")))
        consumer.run_round()
    assert consumer.brokers.current() is consumer.brokers.database
    assert held_again(consumer, message).deliveries == 2


def test_a_worker_that_ends_releases_its_orphaned_claims(consumer: Consumer, cut: Cut) -> None:
    message = orphan(consumer, cut)
    consumer.stop()
    consumer.run()
    assert log_of(message)[-1].reason == LOST
    # Not "outcome unknown": it never ran.
    assert cancel_message(message).verdict == Verdict.CANCELLED


def test_a_worker_that_ends_without_a_database_leaves_orphaned_claims_to_their_lease(
    consumer: Consumer, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = orphan(consumer, cut)
    monkeypatch.setattr(crashes, "release_orphaned", REFUSE)
    consumer.stop()
    consumer.run()
    assert state(message) == State.RUNNING


def test_an_orphaned_claim_of_a_message_to_be_cancelled_is_cancelled(consumer: Consumer, cut: Cut) -> None:
    message = orphan(consumer, cut)
    assert cancel_message(message).verdict == Verdict.REQUESTED
    consumer.run_round()
    message.refresh_from_db()
    assert (message.state, log_of(message)[-1].reason) == (State.CANCELLED, f"cancel requested; {LOST}")


def held_again(consumer: Consumer, message: Message) -> Delivery:
    """Make turns until a message is claimed again. Redis may be asked before it is told of the released message."""

    def found() -> list[Delivery]:
        consumer.run_round()
        return [delivery for delivery in consumer.pool.held() if delivery.id == message.pk]

    eventually(found, "it is delivered again")
    return found()[0]
