"""The recorder gathers outcomes before it writes them. The clock stands still; a sleep ends when the test ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.core.outcomes import Ack
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success, Ticket
from django_delayq.worker.parts.delivery import Delivery
from django_delayq.worker.run import recorder as module
from django_delayq.worker.run.recorder import GATHER_TIME
from tests.support.assembled import Assemble
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE = 60


class Bench:
    """A recorder with the sizes of the batches that it wrote and the times (seconds) that it slept."""

    def __init__(self, assembled: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.sleeps: list[float] = []
        self.asleep = threading.Event()
        self.go_on = threading.Event()
        self.writing = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()
        monkeypatch.setattr(module, "time", self)
        succeed = transitions.succeed

        def slowly(using: str, successes: list[Success], **options: Any) -> set[int]:
            self.batches.append(len(successes))
            self.writing.set()
            assert self.may_write.wait(PATIENCE)
            return succeed(using, successes, **options)

        monkeypatch.setattr(transitions, "succeed", slowly)
        handler = registry.handlers()["t.ok"]
        ids = [schedule_message("t.ok").pk for _ in range(6)]
        rows = transitions.claim("default", [Ticket(pk) for pk in ids], {"t.ok": handler.lease}, "w")
        self.held = [Delivery(row, handler, "default") for row in rows]
        self.recorder = assembled().recorder

    def monotonic(self) -> float:
        return 1000.0

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.asleep.set()
        assert self.go_on.wait(PATIENCE)

    def submit(self, number: int) -> None:
        for _ in range(number):
            self.recorder.submit(self.held.pop(), Ack(), "worker:w")

    def wait_for(self, number: int) -> None:
        """Wait until so many outcomes are written."""
        consumed = Message.objects.filter(state=State.CONSUMED)
        eventually(lambda: consumed.count() == number, f"{number} outcomes are written")

    def close(self) -> None:
        for event in (self.go_on, self.may_write):
            event.set()
        self.recorder.stop()
        self.recorder.join(PATIENCE)


@pytest.fixture
def bench(assembled: Assemble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(assembled, monkeypatch)
    yield made
    made.close()


def test_outcomes_that_follow_closely_are_written_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.may_write.clear()
    bench.submit(1)
    assert bench.writing.wait(PATIENCE)
    bench.submit(2)
    bench.may_write.set()
    bench.wait_for(3)
    # After one alone nothing gathers.
    assert (bench.batches, bench.sleeps) == ([1, 2], [])
    bench.submit(1)
    assert bench.asleep.wait(PATIENCE)
    bench.submit(1)
    bench.writing.clear()
    bench.may_write.clear()
    bench.go_on.set()
    assert bench.writing.wait(PATIENCE)
    # Many do not wait for more.
    monkeypatch.setattr(module, "ENOUGH_OUTCOMES", 1)
    bench.submit(1)
    bench.may_write.set()
    bench.wait_for(6)
    assert bench.batches == [1, 2, 2, 1]
    assert bench.sleeps == [pytest.approx(GATHER_TIME)]
