"""Queues are served in strict order: a lower queue waits while a higher one holds ready messages."""

from __future__ import annotations

import pytest

from django_delayq import schedule_message
from django_delayq.worker.claim.wanted import Wanted
from tests.support.assembled import Assemble

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_thread_that_becomes_free_during_a_turn_serves_the_highest_queue(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assembled(queues=("high", "low"), redis=False)
    for queue in ("low", "high"):
        schedule_message("t.ok", queue=queue)
    rooms = iter([0, 1])
    monkeypatch.setattr(Wanted, "ids", property(lambda self: next(rooms, 1)))
    parts.consumer.turn()
    assert parts.pool.held() == []
    parts.consumer.turn()
    assert [delivery.queue for delivery in parts.pool.held()] == ["high"]
