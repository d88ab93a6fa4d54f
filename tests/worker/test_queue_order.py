"""Queues are served in strict order: a lower queue waits while a higher one holds ready messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.claim.wanted import Wanted
from django_delayq.worker.processes.assembly import Parts

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def consumer(settings: Any) -> Iterator[Consumer]:
    """A consumer of the queues "high" and "low" whose only thread does not run. The database times."""
    settings.DELAYQ = {"REDIS": None}
    parts = Parts(Options("default", queues=("high", "low"), threads=1))
    yield parts.consumer
    parts.brokers.close()


def test_a_thread_that_becomes_free_during_a_turn_serves_the_highest_queue(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue in ("low", "high"):
        schedule_message("t.ok", queue=queue)
    rooms = iter([0, 1])
    monkeypatch.setattr(Wanted, "ids", property(lambda self: next(rooms, 1)))
    consumer.turn()
    assert not Message.objects.filter(state=State.RUNNING).exists()
    consumer.turn()
    assert Message.objects.get(state=State.RUNNING).queue == "high"
