"""Queues are served in strict order: a lower queue waits while a higher one holds ready messages."""

from __future__ import annotations

import pytest

from django_delayq import schedule_message
from django_delayq.worker.claim.wanted import Wanted
from tests.support.assembled import Assemble

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.usefixtures("loaded", "puts_are_flushed")
@pytest.mark.parametrize("redis", [True, False], ids=["Redis", "no Redis"])
def test_a_thread_that_becomes_free_during_a_turn_serves_the_highest_queue(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch, redis: bool
) -> None:
    # Nothing is in the middle queue: it has left nobody out, and yet the low one is not served.
    parts = assembled(queues=("high", "middle", "low"), redis=redis)
    for queue in ("low", "high"):
        schedule_message("t.ok", queue=queue)
    rooms = iter([0, 1])
    monkeypatch.setattr(Wanted, "ids", property(lambda self: next(rooms, 0)))
    parts.consumer.turn()
    assert parts.pool.held() == []
    parts.consumer.turn()
    assert [delivery.queue for delivery in parts.pool.held()] == ["high"]
