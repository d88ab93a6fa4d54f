"""The leader: one process of a fleet does the upkeep; and the services of a process, which take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from unittest.mock import Mock

import pytest
import redis
from django.apps import apps
from django.db import OperationalError

from django_delayq.broker.keys import keys
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.worker_options import Options
from django_delayq.extensions import Service
from django_delayq.models import Queue
from django_delayq.record import reads
from django_delayq.record.sql.moves import writing
from django_delayq.worker.processes import process as worker_process
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.shared.due_services import DueServices, Runner
from django_delayq.worker.upkeep.leadership import Leadership
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.claims import DB
from tests.support.transactions import unfinished
from tests.support.workers import eventually

# The lease outlasts each test.
TUNING = UpkeepTuning(leader_lease=60.0)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]


def process(worker: str, *, queues: tuple[str, ...] | None = None, topics: tuple[str, ...] = ("a", "b")) -> Leadership:
    return Leadership(BrokerSwitch(DB, lambda: topics), worker, queues, topics, ("loader",), TUNING)


@pytest.fixture
def two() -> tuple[Leadership, Leadership]:
    """Two processes with the same work, of which the first leads."""
    first, second = process("w1"), process("w2", topics=("b", "a"))
    assert (first.tick(), second.tick()) == (TUNING.leader_interval, TUNING.standby_interval)
    return first, second


def who_leads(*processes: Leadership) -> list[bool]:
    """Have processes ask who leads, and return which of them do."""
    for process in processes:
        process.tick()
    return [process.is_leader() for process in processes]


def test_one_of_two_processes_with_the_same_work_leads(two: tuple[Leadership, Leadership]) -> None:
    assert who_leads(*two) == [True, False]


def test_processes_with_other_work_have_a_leader_each() -> None:
    all_of_them = process("w1"), process("w2", queues=("mail",)), process("w3", topics=("a", "b", "new"))
    assert who_leads(*all_of_them) == [True, True, True]


def test_the_duty_of_a_leader_that_ends_is_free_at_once(two: tuple[Leadership, Leadership]) -> None:
    first, second = two
    first.release()
    assert who_leads(second) == [True]
    # A process that led while Redis was away takes the duty from nobody.
    first.brokers.report_failure(BrokerUnavailable("gone"))
    first.tick()
    first.release()
    assert who_leads(second) == [True]


def test_the_duty_of_a_leader_that_died_is_free_after_its_lease(
    redis_client: redis.Redis, two: tuple[Leadership, Leadership]
) -> None:
    first, second = two
    key = f"{keys('delayq', '').duty}:{first.name_in_redis}"
    assert 0 < redis_client.pttl(key) <= TUNING.leader_lease * 1000
    redis_client.delete(key)
    assert who_leads(second, first) == [True, False]


def test_a_leader_without_a_database_leads_on_only_when_that_answers(
    redis_client: redis.Redis, two: tuple[Leadership, Leadership], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    redis_client.pexpire(f"{keys('delayq', '').duty}:{first.name_in_redis}", 60)
    with monkeypatch.context() as patch:
        patch.setattr(reads, "now", Mock(side_effect=OperationalError("gone")))
        with pytest.raises(OperationalError):
            first.tick()
    eventually(lambda: second.tick() == TUNING.leader_interval, "the lease is over")
    assert who_leads(second, first) == [True, False]


def test_every_process_leads_while_redis_is_away(two: tuple[Leadership, Leadership]) -> None:
    two[1].brokers.report_failure(BrokerUnavailable("gone"))
    assert who_leads(*two) == [True, True]


def test_one_process_has_the_services_that_work_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Service] = []

    def keep(services: Iterable[Service], is_leader: object) -> list[Runner]:
        found.extend(services)
        return []

    monkeypatch.setattr(worker_process, "in_threads", keep)
    process = worker_process.WorkerProcess(Options(DB, threads=1, async_concurrency=1))
    process.parts.brokers.close()
    shared = ["janitor", "loader", "mover", "queue finder", "reaper", "sweeper"]
    for app, names in {"console": ("operation look", "rollup compactor"), "recurring": ("scheduler",)}.items():
        shared += names if apps.is_installed(f"django_delayq.{app}") else ()
    assert sorted(service.name for service in found if service.is_shared) == sorted(shared)


class Counted(Service):
    """Counts its ticks, which call ``act``; it is always due. Its first ``halves`` ticks leave work half done."""

    def __init__(
        self,
        name: str = "counted",
        *,
        is_shared: bool = False,
        halves: int = 0,
        act: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.is_shared = is_shared
        self.halves = halves
        self.act = act
        self.ticks = 0

    def tick(self) -> float:
        self.act()
        self.ticks += 1
        return 0.0 if self.ticks <= self.halves else 1e-9


class StandingBy(DueServices):
    """The services of a process that does not lead, and does the work of the leader once and then not for years."""

    standby = 1e9

    def __init__(self, *services: Service) -> None:
        super().__init__(services, lambda: self.leads)
        self.leads = False


def test_a_process_that_does_not_lead_does_shared_work_once_and_then_rarely() -> None:
    shared, own = Counted(is_shared=True), Counted()
    process = StandingBy(shared, own)
    for _ in range(3):
        process.run_due()
    assert (shared.ticks, own.ticks) == (1, 3)
    process.leads = True
    process.run_due()
    assert (shared.ticks, own.ticks) == (2, 4)
    process.leads = False
    process.standby = 0.0
    time.sleep(0.001)
    process.run_due()
    assert shared.ticks == 3


def test_a_process_that_does_not_lead_tries_again_what_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    failing = Counted("sweeper", is_shared=True, act=Mock(side_effect=OperationalError("gone")))
    wait = StandingBy(failing).run_due()
    assert f"The sweeper failed and is tried again in {wait:.1f} s" in caplog.text


def test_a_process_that_does_not_lead_ends_what_it_has_begun() -> None:
    """The leader would wait for a load, or an operation, that nobody goes on with."""
    shared = Counted(is_shared=True, halves=2)
    process = StandingBy(shared)
    assert [process.run_due() > 1, shared.ticks] == [False, 1]
    for _ in range(3):
        process.run_due()
    assert shared.ticks == 3


@pytest.mark.postgresql("SQLite has one lock, and a timeout for it")
def test_a_lock_that_a_frozen_process_holds_stops_no_other_service(caplog: pytest.LogCaptureFixture) -> None:
    Queue.objects.create(name="locked")

    def write() -> None:
        with writing(DB):
            Queue.objects.filter(name="locked").update(reason="written")

    writer, other = Counted("writer", act=write), Counted("other")
    with unfinished(lambda: Queue.objects.filter(name="locked").update(reason="frozen")) as thaw:
        services = DueServices([writer, other])
        services.lock_timeout = 50
        services.run_due()
        assert not thaw.is_set()
        assert (writer.ticks, other.ticks) == (0, 1)
    assert "The writer failed and is tried again" in caplog.text
    DueServices([writer]).run_due()
    assert writer.ticks == 1
