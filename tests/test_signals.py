"""Signals are sent after the commit, with plain arguments, and no receiver can harm a caller."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.dispatch import Signal

from django_delayq import cancel_message, schedule_message, schedule_messages, signals
from django_delayq.models import Message
from tests.support.steps import TOPIC, later

pytestmark = pytest.mark.django_db(transaction=True)


class Undo(Exception):
    """An exception that rolls a transaction back."""


class Listener:
    """A receiver that remembers its calls."""

    def __init__(self, *to: Signal) -> None:
        self.heard: list[dict[str, Any]] = []
        self.signals = to
        for signal in to:
            signal.connect(self)

    def __call__(self, sender: Any, **facts: Any) -> None:
        assert sender is Message
        self.heard.append(facts)

    def close(self) -> None:
        for signal in self.signals:
            signal.disconnect(self)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(signals.message_scheduled, signals.message_cancelled)
    yield listener
    listener.close()


def test_the_signal_of_a_scheduled_message_has_plain_arguments_without_the_payload(listener: Listener) -> None:
    row = schedule_message(TOPIC, {"secret": 1}, delay=60, queue="slow", key="k")
    (facts,) = listener.heard
    facts.pop("signal")
    assert facts == {
        "message_id": row.pk,
        "topic": TOPIC,
        "queue": "slow",
        "due_at": row.due_at,
        "using": "default",
    }


def test_a_signal_is_sent_after_the_commit_and_not_before(listener: Listener) -> None:
    with transaction.atomic():
        rows = [later(), *schedule_messages([{"topic": TOPIC}] * 2)]
        cancel_message(rows[0].pk)
        assert listener.heard == []
    assert [facts["message_id"] for facts in listener.heard] == [row.pk for row in (*rows, rows[0])]


def test_a_rolled_back_message_sends_no_signal(listener: Listener) -> None:
    with pytest.raises(Undo), transaction.atomic():
        later()
        raise Undo
    with transaction.atomic():
        kept = later()
        with pytest.raises(Undo), transaction.atomic():
            cancel_message(kept.pk)
            raise Undo
    assert [facts["message_id"] for facts in listener.heard] == [kept.pk]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_signal_names_the_database_of_its_message(listener: Listener) -> None:
    later(using="other")
    assert listener.heard[0]["using"] == "other"


def test_a_cancel_that_changed_nothing_sends_no_signal(listener: Listener) -> None:
    row = later()
    cancel_message(row.pk)
    cancel_message(row.pk)
    cancel_message(10**12)
    assert len(listener.heard) == 2


@pytest.mark.parametrize("inside", [True, False], ids=["in a transaction", "outside of one"])
def test_a_receiver_that_raises_harms_nobody_and_is_logged(
    inside: bool, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sender: Any, **facts: Any) -> None:
        raise RuntimeError("a receiver's own trouble")

    signals.message_scheduled.connect(broken)
    late = Listener(signals.message_scheduled)
    try:
        with caplog.at_level(logging.ERROR, "django_delayq"):
            if inside:
                with transaction.atomic():
                    row = later()
            else:
                row = later()
    finally:
        signals.message_scheduled.disconnect(broken)
        late.close()
    assert Message.objects.get().pk == row.pk
    assert len(listener.heard) == len(late.heard) == 1
    assert any(record.exc_info and "own trouble" in str(record.exc_info[1]) for record in caplog.records)


def test_a_receiver_may_schedule_a_message_itself() -> None:
    def follow(sender: Any, topic: str, **facts: Any) -> None:
        if topic == TOPIC:
            schedule_message("record.follows", delay=60)

    signals.message_scheduled.connect(follow)
    try:
        with transaction.atomic():
            later()
    finally:
        signals.message_scheduled.disconnect(follow)
    assert sorted(Message.objects.values_list("topic", flat=True)) == ["record.follows", TOPIC]
