"""Tests of extensions: what workers call, and that a broken extension does not stop deliveries."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection

from django_delayq import cancel_message, extensions, handler, schedule_message, signals
from django_delayq.core.clock import NO_TIME
from django_delayq.core.outcomes import Ack, GiveUp, Outcome, Release, Retry
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.extensions import Service, WorkerExtension
from django_delayq.models import Message
from django_delayq.worker.processes.children import Child
from django_delayq.worker.processes.supervisor import Supervisor
from django_delayq.worker.shared.due_services import DueServices, Runner
from django_delayq.worker.shared.shared_state import SharedState
from tests.support.assembled import Assemble, drain
from tests.support.claims import DB, claimed
from tests.support.receivers import heard
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

Made = Callable[[str, str], WorkerExtension]


class Recording(WorkerExtension):
    """Remembers which of its methods were called, with the topics of the messages."""

    def __init__(self, using: str, worker: str) -> None:
        super().__init__(using, worker)
        self.calls: list[tuple[str, list[str]]] = []
        for method in ("claimed", "handled", "consumed", "retried", "ended"):
            setattr(self, method, partial(self._note, method))

    def stop(self) -> None:
        self._note("stop", [])

    def _note(self, method: str, messages: Sequence[Any]) -> None:
        self.calls.append((method, [message.topic for message in messages]))


@pytest.fixture
def added(own_additions: None) -> Callable[[Made], None]:
    """Add an extension to workers, in the place of all others, until the test ends."""

    def add(make: Made) -> None:
        extensions.additions.workers.clear()
        extensions.add_to_workers(make)

    return add


@pytest.fixture
def recording(added: Callable[[Made], None]) -> list[Recording]:
    """The recording extensions that were made, in their order."""
    made: list[Recording] = []

    def make(using: str, worker: str) -> Recording:
        made.append(Recording(using, worker))
        return made[-1]

    added(make)
    return made


class Counting(Service):
    """Counts its ticks, which follow each other at once."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> float:
        self.ticks += 1
        return 0.01


@pytest.fixture
def running() -> Iterator[Callable[..., None]]:
    """Run services in one thread until the test ends."""
    runners: list[Runner] = []

    def run(*services: Service) -> None:
        runners.append(Runner("test", DueServices(services)))
        runners[-1].start()

    yield run
    for runner in runners:
        runner.stop()
        runner.join(60)


@pytest.mark.parametrize("wait", [RuntimeError("on purpose"), None, timedelta(seconds=1), "soon"], ids=repr)
def test_a_service_that_fails_or_returns_no_number_is_called_again_and_told_apart_from_its_namesake(
    running: Callable[..., None], caplog: pytest.LogCaptureFixture, wait: Any
) -> None:
    class Odd(Counting):
        def tick(self) -> float:
            super().tick()
            if isinstance(wait, Exception):
                raise wait
            return wait  # type: ignore[no-any-return, unused-ignore]

    good, odd = Counting(), Odd()
    running(good, odd)
    eventually(lambda: odd.ticks > 2 and good.ticks > 2, "both services tick")
    assert caplog.text.count("The service failed") == 1
    assert "works again" not in caplog.text


def test_a_service_may_wait_for_ever() -> None:
    class Once(Service):
        def tick(self) -> float:
            return math.inf

    assert 0 < DueServices([Once()]).run_due() < threading.TIMEOUT_MAX


def test_each_outcome_reaches_an_extension_once(assembled: Assemble, recording: list[Recording]) -> None:
    worker = assembled()
    worker.reaper.tick()
    assert recording[0].calls == []
    recorder = worker.recorder
    topics = ("t.ok", "t.fail", "t.reject", "t.sleep")
    outcomes: tuple[Outcome, ...] = (Ack(), Retry(NO_TIME), GiveUp("E: e"), Release("shutdown"))
    for delivery, outcome in zip(claimed(*topics), outcomes, strict=True):
        recorder.submit(delivery, outcome, "worker:w")
    assert recorder.flush(60)
    found: dict[str, list[str]] = {}
    for method, theirs in recording[0].calls:
        assert theirs, f"{method} was called without messages"
        found.setdefault(method, []).extend(theirs)
    assert {method: sorted(theirs) for method, theirs in found.items()} == {
        "consumed": ["t.ok"],
        "retried": ["t.fail"],
        "ended": ["t.reject", "t.sleep"],
    }


def test_a_handler_that_stops_on_request_has_run(recording: list[Recording]) -> None:
    def stop(message: Any) -> None:
        cancel_message(message.id)
        message.extend("1m")
        message.raise_if_cancelled()

    handler("integration.extensions")(stop)
    schedule_message("integration.extensions")
    assert drain(Options(DB, threads=1)) == 1
    assert ("handled", ["integration.extensions"]) in recording[0].calls


@pytest.mark.parametrize("broken", ["constructor", "services"])
def test_a_worker_with_a_broken_extension_delivers(
    added: Callable[[Made], None], assembled: Assemble, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    class Broken(WorkerExtension):
        def __init__(self, using: str, worker: str) -> None:
            super().__init__(using, worker)
            if broken == "constructor":
                raise RuntimeError("on purpose")

        def services(self, roles: frozenset[str]) -> Iterator[Service]:
            yield Counting()
            raise RuntimeError("on purpose")

    added(Broken)
    assert assembled().extensions.services(frozenset()) == []
    assert "An extension failed" in caplog.text
    message = schedule_message("t.ok")
    assert drain(Options(DB, threads=1)) == 1
    message.refresh_from_db()
    assert message.state == State.CONSUMED


def test_a_service_that_fails_in_another_way_says_so(
    running: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counting):
        name = "service"
        longest_backoff = 0.01

        def tick(self) -> float:
            self.ticks += 1
            raise OSError("connection closed" if self.ticks == 1 else "certificate has expired")

    running(service := Failing())
    eventually(lambda: service.ticks > 5, "it is tried again and again")
    told = [record.getMessage().partition("OSError: ")[2] for record in caplog.records]
    assert told == ["connection closed", "certificate has expired"]


@pytest.mark.parametrize("hook", ["claimed", "handled", "consumed", "stop"])
def test_an_extension_that_wants_to_exit_ends_no_thread(added: Callable[[Made], None], hook: str) -> None:
    class Exits(WorkerExtension):
        pass

    def leave(*arguments: Any) -> None:
        raise SystemExit

    setattr(Exits, hook, leave)
    added(Exits)
    message = schedule_message("t.ok")
    with heard(signals.message_succeeded) as told:
        assert drain(Options(DB, threads=1)) == 1
    assert [facts["message_id"] for facts in told] == [message.pk]


def test_a_claim_is_reported_after_its_commit(
    added: Callable[[Made], None], assembled: Assemble, settings: Any
) -> None:
    in_transaction: list[bool] = []

    class Asking(WorkerExtension):
        def claimed(self, claims: Sequence[Any]) -> None:
            in_transaction.append(connection.in_atomic_block)

    settings.DELAYQ = {"REDIS": None}
    added(Asking)
    schedule_message("t.ok")
    assembled().consumer.run_round()
    assert in_transaction == [False]


def release_claims_of(worker: str) -> None:
    """Have a supervisor do what it does after the death of a process."""
    Supervisor(Options(DB)).releases.release(Child(1, worker, 0.0, SharedState(1)))


def unmade(using: str, worker: str) -> WorkerExtension:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_dead_process_has_its_claims_released_and_reported(
    recording: list[Recording], added: Callable[[Made], None], is_broken: bool
) -> None:
    [delivery] = claimed("t.ok", worker="host/1/abc")
    if is_broken:
        added(unmade)
    release_claims_of("host/1/abc")
    assert Message.objects.get(pk=delivery.id).state == State.SCHEDULED
    told = [] if is_broken else [("host/1/abc", [("ended", ["t.ok"]), ("stop", [])])]
    assert [(made.worker, made.calls) for made in recording] == told
