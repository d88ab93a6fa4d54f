"""The duty: one process of a fleet does the periodic work; and the services of a process, which take turns."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
import redis
from django.apps import apps
from django.db import OperationalError

from django_delayq.broker.keys import keys
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.worker_options import Options
from django_delayq.extensions import Service
from django_delayq.models import Queue
from django_delayq.record import transitions
from django_delayq.record.sql.moves import writing
from django_delayq.worker.parts import service_turns
from django_delayq.worker.parts.broker_switch import BrokerSwitch
from django_delayq.worker.parts.service_turns import Runner, ServiceTurns
from django_delayq.worker.processes import process as worker_process
from django_delayq.worker.upkeep.duty import HOLDER_INTERVAL, STANDBY_INTERVAL, Duty
from tests.support.claims import DB
from tests.support.transactions import unfinished
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


LEASE = 60.0


def duty(worker: str, *, queues: tuple[str, ...] | None = None, topics: tuple[str, ...] = ("a", "b")) -> Duty:
    return Duty(BrokerSwitch(DB, lambda: topics), worker, queues, topics, ("loader",))


@pytest.fixture(autouse=True)
def _redis(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Redis, and a lease that outlasts each test."""
    monkeypatch.setattr("django_delayq.worker.upkeep.duty.DUTY_LEASE", LEASE)


def test_one_of_two_processes_with_the_same_work_has_the_duty() -> None:
    first, second = duty("w1"), duty("w2", topics=("b", "a"))
    assert first.tick() == HOLDER_INTERVAL
    assert second.tick() == STANDBY_INTERVAL
    assert first.tick() == HOLDER_INTERVAL
    assert (first.is_held(), second.is_held()) == (True, False)


def test_processes_with_other_work_have_a_duty_each() -> None:
    all_of_them = [duty("w1"), duty("w2", queues=("mail",)), duty("w3", topics=("a", "b", "new"))]
    for each in all_of_them:
        each.tick()
    assert [each.is_held() for each in all_of_them] == [True, True, True]


def test_the_duty_of_a_process_that_ends_is_free_at_once() -> None:
    first, second = duty("w1"), duty("w2")
    first.tick()
    second.tick()
    first.release()
    second.tick()
    assert second.is_held()
    # A process that does not have the duty takes it from nobody.
    first._is_held = True
    first.release()
    second.tick()
    assert second.is_held()


def test_the_duty_of_a_process_that_died_ends_with_its_lease(redis_client: redis.Redis) -> None:
    first, second = duty("w1"), duty("w2")
    first.tick()
    key = f"{keys('delayq', '').duty}:{first.name_in_redis}"
    assert 0 < redis_client.pttl(key) <= LEASE * 1000
    redis_client.delete(key)
    second.tick()
    first.tick()
    assert (first.is_held(), second.is_held()) == (False, True)


def test_a_holder_without_a_database_goes_on_with_the_duty_only_when_that_answers(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(using: str) -> None:
        raise OperationalError("gone")

    first, second = duty("w1"), duty("w2")
    first.tick()
    second.tick()
    redis_client.pexpire(f"{keys('delayq', '').duty}:{first.name_in_redis}", 60)
    with monkeypatch.context() as patch:
        patch.setattr(transitions, "now", refuse)
        with pytest.raises(OperationalError):
            first.tick()
    eventually(lambda: second.tick() == HOLDER_INTERVAL, "the lease is over")
    first.tick()
    assert (first.is_held(), second.is_held()) == (False, True)


def test_every_process_has_its_duty_while_redis_is_away() -> None:
    first, second = duty("w1"), duty("w2")
    first.tick()
    second.tick()
    second.brokers.report_failure(BrokerUnavailable("gone"))
    second.tick()
    assert (first.is_held(), second.is_held()) == (True, True)


def test_one_process_has_the_services_that_work_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Service] = []

    def keep(services: Iterable[Service], has_duty: object) -> list[Runner]:
        found.extend(services)
        return []

    monkeypatch.setattr(worker_process, "in_threads", keep)
    process = worker_process.WorkerProcess(Options(DB, threads=1, async_concurrency=1))
    process.parts.brokers.close()
    shared = ["janitor", "loader", "mover", "queue finder", "reaper", "sweeper"]
    for app, names in {"console": ("operator", "rollup compactor"), "recurring": ("scheduler",)}.items():
        shared += names if apps.is_installed(f"django_delayq.{app}") else ()
    assert sorted(service.name for service in found if service.is_shared) == sorted(shared)


class Counted(Service):
    """Counts its ticks; it is always due. Its first ``halves`` ticks leave work half done."""

    def __init__(self, *, is_shared: bool, halves: int = 0) -> None:
        self.is_shared = is_shared
        self.halves = halves
        self.ticks = 0

    def tick(self) -> float:
        self.ticks += 1
        return 0.0 if self.ticks <= self.halves else 1e-9


def test_a_process_without_the_duty_does_shared_work_once_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_turns, "STANDBY", 1e9)
    held = False
    shared, own = Counted(is_shared=True), Counted(is_shared=False)
    turns = ServiceTurns([shared, own], lambda: held)
    for _ in range(3):
        turns.run_due()
    assert (shared.ticks, own.ticks) == (1, 3)
    held = True
    turns.run_due()
    assert (shared.ticks, own.ticks) == (2, 4)
    held = False
    monkeypatch.setattr(service_turns, "STANDBY", 0.0)
    time.sleep(0.001)
    turns.run_due()
    assert shared.ticks == 3


def test_a_process_without_the_duty_tries_again_what_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Service):
        name = "sweeper"
        is_shared = True

        def tick(self) -> float:
            raise OperationalError("gone")

    monkeypatch.setattr(service_turns, "STANDBY", 1e9)
    wait = ServiceTurns([Failing()], lambda: False).run_due()
    assert f"The sweeper failed and is tried again in {wait:.1f} s" in caplog.text


def test_a_process_without_the_duty_ends_what_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the duty would wait for a load, or an operation, that nobody goes on with."""
    monkeypatch.setattr(service_turns, "STANDBY", 1e9)
    shared = Counted(is_shared=True, halves=2)
    turns = ServiceTurns([shared], lambda: False)
    assert [turns.run_due() > 1, shared.ticks] == [False, 1]
    for _ in range(3):
        turns.run_due()
    assert shared.ticks == 3


# --- services that take turns -----------------------------------------------------------------------------------------


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
