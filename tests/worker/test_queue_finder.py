"""The queues that a worker finds."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq import cancel_message, schedule_message
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.worker.claim.queues import QueueFinder
from django_delayq.worker.processes.assembly import Parts
from tests.support.claims import DB

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_queue_that_runs_empty_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    message = schedule_message("t.ok", queue="found")
    queues = QueueFinder(DB)
    queues.tick()
    assert "found" in queues()
    cancel_message(message)
    queues.tick()
    assert "found" in queues()
    monkeypatch.setattr("django_delayq.worker.claim.queues.REMEMBERED", 0.0)
    queues.tick()
    assert "found" not in queues()


def test_the_first_message_of_a_new_queue_is_found_by_the_next_poll_without_redis(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    parts = Parts(Options("default", threads=1))
    # Handlers of the tests have queues of their own, which the worker would know.
    monkeypatch.setattr(parts.queues, "_found", ("default",))
    try:
        parts.consumer.turn()
        message = schedule_message("t.ok", queue="never-used")
        parts.consumer.turn()
        assert Message.objects.get(pk=message.pk).state == State.RUNNING
    finally:
        parts.brokers.close()
