"""An overdue backlog is delivered in the order of its due times, on both brokers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.utils import timezone

from django_delayq import MessageDict, pause_queue, resume_queue, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.worker.upkeep.loader import Loader
from tests.app.models import Effect
from tests.support.assembled import Assemble
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


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
    parts.pool.start()
    try:
        if paused:
            parts.consumer.turn()
            resume_queue("default")

        def all_consumed() -> bool:
            parts.consumer.turn()
            return not Message.objects.exclude(state=State.CONSUMED).exists()

        eventually(all_consumed)
    finally:
        parts.pool.stop()
    assert list(Effect.objects.order_by("id").values_list("message_id", flat=True)) == ids
