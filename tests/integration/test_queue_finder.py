"""The queues that a worker finds."""

from __future__ import annotations

import pytest

from django_delayq import cancel_message, schedule_message
from django_delayq.worker.queue_finder import QueueFinder
from tests.integration.claims import DB

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_queue_that_runs_empty_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    message = schedule_message("t.ok", queue="found")
    queues = QueueFinder(DB)
    queues.tick()
    assert "found" in queues()
    cancel_message(message)
    queues.tick()
    assert "found" in queues()
    monkeypatch.setattr("django_delayq.worker.queue_finder.REMEMBERED", 0.0)
    queues.tick()
    assert "found" not in queues()
