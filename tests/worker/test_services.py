"""Services that share a thread do not wait for each other's locks."""

from __future__ import annotations

import pytest

from django_delayq.extensions import Service
from django_delayq.models import Queue
from django_delayq.record.sql.moves import writing
from django_delayq.worker.parts import service_turns
from django_delayq.worker.parts.service_turns import ServiceTurns
from tests.support.claims import DB
from tests.support.transactions import unfinished

pytestmark = pytest.mark.django_db(transaction=True)


class Writer(Service):
    """Changes a row that a frozen process has locked."""

    name = "writer"

    def __init__(self) -> None:
        self.written = 0

    def tick(self) -> float:
        with writing(DB):
            Queue.objects.filter(name="locked").update(reason="written")
        self.written += 1
        return 0.0


class Other(Service):
    name = "other"
    ticks = 0

    def tick(self) -> float:
        self.ticks += 1
        return 60.0


@pytest.mark.postgresql("SQLite has one lock, and a timeout for it")
def test_a_lock_that_a_frozen_process_holds_stops_no_other_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_turns, "LOCK_TIMEOUT", 50)
    Queue.objects.create(name="locked")
    writer, other = Writer(), Other()
    with unfinished(lambda: Queue.objects.filter(name="locked").update(reason="frozen")) as thaw:
        ServiceTurns([writer, other]).run_due()
        assert not thaw.is_set()
        assert (writer.written, other.ticks) == (0, 1)
    assert "The writer failed and is tried again" in caplog.text
    ServiceTurns([writer]).run_due()
    assert writer.written == 1
