"""The consumer: what it claims, and when it comes back."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.db import OperationalError

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.base import Entry, Taken
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.outcomes import Ack
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.claim import wanted
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.run.recorder import LeaseRenewer
from tests.support.assembled import Assemble
from tests.support.claims import claimed
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def test_claimed_messages_run_although_redis_goes_away_while_the_rest_is_put_back(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = schedule_message("t.ok")
    early = schedule_message("t.ok", delay=60)
    brokers, consumer = parts.brokers, parts.consumer
    assert brokers.redis is not None
    now_tenths = int((time.time() + 0.01) * SECOND)

    def take(queue: str, limit: int, _within: float, _opened: object, **_how: bool) -> Taken:
        tickets = [Ticket(pk, now_tenths) for pk in (ready.pk, early.pk)]
        return Taken(tickets)

    def put(queue: str, entries: list[Entry], *, fill: bool = False) -> None:
        raise BrokerUnavailable

    monkeypatch.setattr(brokers.redis, "take", take)
    monkeypatch.setattr(brokers.redis, "put", put)
    consumer.turn()
    assert [delivery.id for delivery in parts.pool.held()] == [ready.pk]
    assert brokers.current() is brokers.database


def test_a_message_that_falls_due_while_others_are_claimed_is_not_slept_through(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers, consumer = parts.brokers, parts.consumer
    assert brokers.redis is not None

    def wait_after_answer(ago: float) -> float:
        answer = Taken(next_due=1.5, at=time.monotonic() - ago)
        monkeypatch.setattr(brokers.redis, "take", lambda queue, limit, within, opened, both_ends: answer)
        return consumer.turn()

    assert wait_after_answer(ago=1.0) <= 0.5
    assert wait_after_answer(ago=60.0) == 0.0


def test_a_process_whose_outcomes_cannot_be_recorded_takes_nothing(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work might have to be repeated."""
    parts = assembled(redis=False)
    succeed, is_away = transitions.succeed, threading.Event()

    def fail(*arguments: Any, **options: Any) -> set[int]:
        if is_away.is_set():
            raise OperationalError("on purpose")
        return succeed(*arguments, **options)

    monkeypatch.setattr(transitions, "succeed", fail)
    monkeypatch.setattr(wanted, "LONGEST_BEHIND", 0.05)
    is_away.set()
    (delivery,) = claimed("t.ok")
    parts.recorder.submit(delivery, Ack(), "worker:w")
    eventually(lambda: parts.recorder.behind > 0.05, "an outcome waits")
    message = schedule_message("t.ok")
    parts.consumer.turn()
    assert Message.objects.get(pk=message.pk).state == State.SCHEDULED
    assert not parts.consumer._may_go_on
    is_away.clear()
    assert parts.recorder.flush(60)
    parts.consumer.turn()
    assert Message.objects.get(pk=message.pk).state == State.RUNNING


def test_a_worker_whose_lease_renewals_get_no_answer_claims_nothing(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes wait behind them: the same thread writes both."""
    answers = threading.Event()

    def wait(_renewer: LeaseRenewer) -> float:
        assert answers.wait(PATIENCE)
        return 60.0

    monkeypatch.setattr(LeaseRenewer, "tick", wait)
    monkeypatch.setattr(wanted, "LONGEST_BEHIND", 0.05)
    parts = assembled(redis=False)
    eventually(lambda: parts.recorder.behind > 0.05, "a renewal waits")
    message = schedule_message("t.ok")
    parts.consumer.turn()
    assert Message.objects.get(pk=message.pk).state == State.SCHEDULED
    answers.set()
    eventually(lambda: not parts.recorder.behind, "the renewal has its answer")
    parts.consumer.turn()
    assert Message.objects.get(pk=message.pk).state == State.RUNNING


def test_a_consumer_that_may_deliver_no_more_does_not_ask_again_and_again(assembled: Assemble) -> None:
    consumer = assembled(redis=False, max_messages=1).consumer
    schedule_messages([{"topic": "t.ok"}] * 3)
    consumer.turn()
    assert len(consumer.pool.held()) == 1
    consumer.pool.threads._all_places = 3
    assert not consumer._may_go_on
    assert consumer.turn() > 0.5
