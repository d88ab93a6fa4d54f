"""The rows that show which worker processes are alive."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db.models.signals import post_delete

from django_delayq.models import Worker
from django_delayq.record import transitions
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.upkeep.heartbeat import Heartbeat
from django_delayq.worker.upkeep.janitor import DEAD_WORKER_RETENTION, Janitor
from tests.support.claims import DB

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def rude_receiver() -> Iterator[None]:
    """A receiver of the project that follows what is deleted of all models, and that knows nothing of workers."""

    def receiver(**facts: object) -> None:
        raise AssertionError(facts["sender"])

    post_delete.connect(receiver)
    yield
    post_delete.disconnect(receiver)


@pytest.mark.usefixtures("rude_receiver")
def test_the_rows_of_dead_workers_are_deleted_whatever_a_project_receives() -> None:
    now = transitions.now(DB)
    for name, seen_at in (("dead", now - 2 * DEAD_WORKER_RETENTION), ("silent", now - timedelta(hours=1))):
        Worker.objects.create(name=name, host="h", pid=1, started_at=seen_at, seen_at=seen_at)
    Janitor(DB).tick()
    assert [worker.name for worker in Worker.objects.all()] == ["silent"]


@pytest.mark.usefixtures("rude_receiver")
def test_the_row_of_a_process_that_ends_in_order_is_deleted(parts: Parts) -> None:
    heartbeat = Heartbeat(DB, "host/1", parts.queues, 1, ["t.ok"])
    heartbeat.tick()
    assert Worker.objects.get().name == "host/1"
    heartbeat.delete()
    assert not Worker.objects.exists()
