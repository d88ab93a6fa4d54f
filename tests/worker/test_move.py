"""A message that was moved begins under the limits of its new queue, and under those of the old one no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_delayq import move_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.assembled import Assemble

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("loaded", "puts_are_flushed")]

WITH_REDIS = pytest.mark.parametrize("redis", [True, False], ids=["Redis", "no Redis"])


def running() -> dict[str, int]:
    rows = Message.objects.filter(state=State.RUNNING).values_list("queue", flat=True)
    return {queue: list(rows).count(queue) for queue in rows}


@WITH_REDIS
def test_the_limit_of_the_new_queue_holds_what_is_moved(
    assembled: Assemble, queue_limits: Callable[..., None], redis: bool
) -> None:
    queue_limits(b={"limit": 1})
    parts = assembled(5, queues=("a", "b"), redis=redis)
    messages = schedule_messages([{"topic": "t.ok", "queue": "a"}] * 3)
    move_message(Message.objects.filter(pk__in=[message.pk for message in messages[:2]]), queue="b")
    parts.consumer.run_round()
    parts.consumer.run_round()
    assert running() == {"a": 1, "b": 1}


@WITH_REDIS
def test_what_the_limit_of_the_old_queue_has_blocked_begins_in_the_new_one(
    assembled: Assemble, queue_limits: Callable[..., None], redis: bool
) -> None:
    queue_limits(a={"limit": 1})
    parts = assembled(5, queues=("a", "c"), redis=redis)
    schedule_messages([{"topic": "t.ok", "queue": "a"}] * 3)
    parts.consumer.run_round()
    assert running() == {"a": 1}
    blocked = Message.objects.filter(state=State.SCHEDULED).order_by("pk").first()
    assert move_message(blocked or 0, queue="c")
    parts.consumer.run_round()
    parts.consumer.run_round()
    assert running() == {"a": 1, "c": 1}
