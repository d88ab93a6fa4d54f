"""Signals are sent after the commit, with plain arguments, and no receiver can harm a caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import transaction

from django_delayq import cancel_message, schedule_message, schedule_messages, signals
from django_delayq.models import Message
from tests.support.receivers import heard, receiving
from tests.support.steps import TOPIC, later

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """The arguments of the signals of scheduled and of cancelled messages."""
    with heard(signals.message_scheduled, signals.message_cancelled) as arguments:
        yield arguments


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("using", ["default", "other"])
def test_the_signal_of_a_scheduled_message_has_plain_arguments_without_the_payload(
    using: str, told: list[dict[str, Any]]
) -> None:
    row = schedule_message(TOPIC, {"secret": 1}, delay=60, queue="slow", key="k", using=using)
    facts = {"message_id": row.pk, "topic": TOPIC, "queue": "slow", "due_at": row.due_at, "using": using}
    assert told == [{"sender": Message, **facts}]


def test_a_signal_is_sent_after_the_commit_and_not_before(told: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        rows = [later(), *schedule_messages([{"topic": TOPIC}] * 2)]
        cancel_message(rows[0].pk)
        assert told == []
    assert [facts["message_id"] for facts in told] == [row.pk for row in (*rows, rows[0])]


def test_a_rolled_back_message_sends_no_signal(told: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        later()
        transaction.set_rollback(True)
    with transaction.atomic():
        kept = later()
        with transaction.atomic():
            cancel_message(kept.pk)
            transaction.set_rollback(True)
    assert [facts["message_id"] for facts in told] == [kept.pk]


def test_a_cancel_that_changed_nothing_sends_no_signal(told: list[dict[str, Any]]) -> None:
    row = later()
    cancel_message(row.pk)
    cancel_message(row.pk)
    cancel_message(10**12)
    assert len(told) == 2


@pytest.mark.parametrize("inside", [True, False], ids=["in a transaction", "outside of one"])
def test_a_receiver_that_raises_harms_nobody_and_is_logged(
    inside: bool, told: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sender: Any, **facts: Any) -> None:
        raise RuntimeError("a receiver's own trouble")

    with (
        receiving(broken, signals.message_scheduled),
        heard(signals.message_scheduled) as late,
        transaction.atomic() if inside else nullcontext(),
    ):
        row = later()
    assert Message.objects.get().pk == row.pk
    assert len(told) == len(late) == 1
    assert any(record.exc_info and "own trouble" in str(record.exc_info[1]) for record in caplog.records)


def test_a_receiver_may_schedule_a_message_itself() -> None:
    def follow(sender: Any, topic: str, **facts: Any) -> None:
        if topic == TOPIC:
            schedule_message("record.follows", delay=60)

    with receiving(follow, signals.message_scheduled), transaction.atomic():
        later()
    assert sorted(Message.objects.values_list("topic", flat=True)) == ["record.follows", TOPIC]
