"""The supervisor: which children it kills, and which it replaces; and how one process ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connections

from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.project import registry
from django_delayq.record import crashes
from django_delayq.worker.processes.children import Child, Children
from django_delayq.worker.processes.process import (
    BROKEN,
    EXHAUSTED,
    STUCK,
    OnceProcess,
    WorkerProcess,
    collect_less_often,
)
from django_delayq.worker.processes.process_tuning import ProcessTuning
from django_delayq.worker.processes.supervisor import Supervisor
from django_delayq.worker.run.recorder import Recorder
from django_delayq.worker.shared.shared_state import SharedState
from tests.support.claims import DB, claimed, state
from tests.support.forks import forked
from tests.support.workers import PATIENCE, eventually

LEASE = max(handler.lease for handler in registry.handlers().values())
GRACEFUL = 10.0
LIMIT = int(ProcessTuning().hung_after + 2 * (LEASE + GRACEFUL))


def child(pid: int, shared: SharedState | None = None) -> Child:
    """Return a worker process as its supervisor sees it."""
    return Child(pid, f"host/{pid}", time.monotonic(), shared or SharedState(1))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as made:
        yield made
        made.kill()


@pytest.fixture
def shared() -> SharedState:
    return SharedState(1)


class Family(Children):
    """The children of a supervisor that starts none; it lists those that it would start, and those that have died."""

    def __init__(self, **options: Any) -> None:
        self.started: list[Child] = []
        self.dead: list[Child] = []
        options = {"processes": 1, "graceful_timeout": GRACEFUL, **options}
        super().__init__(Options(DB, **options), self.begin, lambda dead, _living: self.dead.append(dead))

    def begin(self) -> Child:
        self.started.append(child(1000 + len(self.started)))
        return self.started[-1]

    def has_ended(self, pid: int, code: int) -> None:
        """Have a child end in order, with this exit code."""
        one = child(pid)
        one.shared.ended = True
        self.note_death(one, code)

    def add(self, pid: int, shared: SharedState | None = None) -> Child:
        self.running[pid] = made = child(pid, shared)
        return made


@pytest.fixture
def family(process: subprocess.Popen[bytes], shared: SharedState) -> Family:
    """A running process is the only child."""
    made = Family()
    made.add(process.pid, shared)
    return made


def test_a_child_that_shows_no_life_is_killed_and_not_from_outside(
    family: Family, process: subprocess.Popen[bytes]
) -> None:
    hung = family.running[process.pid]
    for _second in range(LIMIT):
        family.check(1.0)
    assert process.poll() is None
    family.check(1.0)
    family.check(1.0)
    family.note_death(hung, process.wait(60))
    family.note_death(child(0), -signal.SIGKILL)
    assert [dead.death.by_kill for dead in family.dead] == [False, True]


def test_a_child_that_ends_for_a_stuck_handler_has_its_successor_at_once() -> None:
    family = Family()
    for code, waits in [(STUCK, False), (STUCK, False), (BROKEN, False), (BROKEN, True), (STUCK, False)]:
        family.has_ended(3, code)
        assert (family.seconds_to_start > 0) == waits


def test_a_child_that_shows_life_is_not_killed_although_its_supervisor_sleeps_in_between(
    family: Family, process: subprocess.Popen[bytes], shared: SharedState
) -> None:
    for _day in range(LIMIT):
        shared.show_life(0.0)
        family.check(1.0)
        family.check(86_400.0)
    assert process.poll() is None


def supervise(kind: type[Supervisor] = Supervisor, **options: Any) -> None:
    """Run a supervisor of one process in a process of its own, and see that it ends in order."""

    def run() -> bool:
        # As when Python begins.
        gc.set_threshold(700, 11, 12)
        return kind(Options(DB, processes=1, **options)).run() == 0

    connections.close_all()
    with forked(run):
        pass


@pytest.mark.django_db(transaction=True)
def test_a_worker_process_looks_less_often_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()

    def tell(self: WorkerProcess, watch: object) -> int:
        os.write(writing, f"{gc.get_threshold()} {gc.get_freeze_count() > 10_000}".encode())
        return 0

    monkeypatch.setattr(WorkerProcess, "run", tell)
    supervise(max_runtime=0.0)
    assert os.read(reading, 100) == b"(20000, 11, 12) True"


@pytest.mark.parametrize("chosen", [0, 9000])
def test_a_project_chooses_how_often_its_workers_look_for_garbage(monkeypatch: pytest.MonkeyPatch, chosen: int) -> None:
    monkeypatch.setattr(gc, "get_threshold", lambda: (chosen, 10, 10))
    monkeypatch.setattr(gc, "set_threshold", lambda *_: pytest.fail("changed"))
    collect_less_often(5000)


@pytest.mark.django_db(transaction=True)
def test_a_worker_whose_processes_die_at_once_ends_at_its_max_runtime_and_shows_no_life(tmp_path: Path) -> None:
    heartbeat, deaths = tmp_path / "heartbeat", tmp_path / "deaths"

    class Dying(Supervisor):
        def run_child(self, shared: SharedState, run: str) -> int:
            with deaths.open("a") as file:
                file.write("died\n")
            shared.show_life(time.monotonic())
            return 1

    supervise(Dying, max_runtime=5.0, heartbeat_file=str(heartbeat))
    assert deaths.read_text().count("died") > 2
    # At most once: before the second death nobody knows that they die.
    assert not heartbeat.exists() or time.time() - heartbeat.stat().st_mtime > 1.0


@pytest.mark.django_db(transaction=True)
def test_a_process_that_is_told_to_end_while_it_is_made_ends() -> None:
    class Stopped(Supervisor):
        def run_child(self, shared: SharedState, run: str) -> int:
            os.kill(os.getppid(), signal.SIGTERM)
            eventually(lambda: self._signals, "the supervisor has passed the signal on")
            return super().run_child(shared, run)

    supervise(Stopped, graceful_timeout=600.0)


def test_a_child_that_does_not_end_is_killed_and_that_is_told_once(
    family: Family, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _time in range(2):
        family.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    assert caplog.text.count("has not ended, and is killed") == 1


def test_a_worker_shows_life_while_the_consumers_go_on_that_have_begun(family: Family, shared: SharedState) -> None:
    """A function with ``@worker_started`` may take minutes."""
    assert not family.shows_life()
    shared.show_life(time.monotonic())
    assert family.shows_life()
    successor = family.add(1)
    assert family.shows_life()
    successor.shared.show_life(time.monotonic() - family.tuning.stale_after)
    assert not family.shows_life()


def test_a_child_that_has_delivered_its_messages_has_no_successor() -> None:
    family = Family(processes=2, max_messages=5)
    family.has_ended(1, EXHAUSTED)
    # Another one that died has one, which counts anew.
    family.has_ended(2, BROKEN)
    family.check(0.0)
    [successor] = family.started
    family.has_ended(successor.pid, EXHAUSTED)
    family.check(0.0)
    assert family.started == [successor]
    assert family.are_done


@pytest.mark.parametrize(("max_runtime", "successors"), [(3600.0, 1), (0.0, 0)], ids=["before", "after"])
def test_a_child_that_somebody_ended_before_the_runtime_was_over_has_a_successor(
    process: subprocess.Popen[bytes], max_runtime: float, successors: int
) -> None:
    family = Family(processes=2, max_runtime=max_runtime)
    family.add(process.pid)
    family.has_ended(1, 0)
    assert family.is_stopping == (not successors)
    if successors:
        family.check(0.0)
    assert len(family.started) == successors


def test_a_fork_that_the_system_refuses_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children = Supervisor(Options(DB, processes=1), ProcessTuning(check_interval=0.001)).children
    refusing = Mock(side_effect=BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    monkeypatch.setattr(os, "fork", refusing)
    for tries in range(1, 4):
        eventually(lambda: not children.seconds_to_start, "the pause is over")
        children.check(0.0)
        assert refusing.call_count >= tries
    assert caplog.text.count("No worker process can be started; it is tried again") == 1


def test_claims_that_wait_for_the_database_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(Options(DB), ProcessTuning(check_interval=0.0))
    monkeypatch.setattr(crashes, "release_worker", Mock(side_effect=OperationalError("gone")))
    supervisor.children.note_death(child(1), BROKEN)
    for _time in range(3):
        supervisor.releases.go_on()
        assert supervisor.releases.pid
        _reap_releaser(supervisor)
    assert [dead.pid for dead in supervisor.releases.waiting] == [1]
    assert caplog.text.count("The claims of host/1 are released as soon as possible") == 1


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_never_ends_keeps_no_supervisor_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(Options(DB), ProcessTuning())
    [delivery] = claimed("t.ok", worker="host/1")
    monkeypatch.setattr("django_delayq.worker.processes.releases.report_moves", lambda *_: time.sleep(3600))
    supervisor.children.note_death(child(1), BROKEN)
    supervisor.releases.go_on()
    eventually(lambda: state(delivery) == State.SCHEDULED, "the claim is released")
    # As it is when so much time has passed.
    supervisor.tuning.longest_release = 0.0
    supervisor.releases.go_on()
    _reap_releaser(supervisor)
    assert supervisor.releases.waiting


def _reap_releaser(supervisor: Supervisor) -> None:
    def look() -> bool:
        supervisor.reap()
        return not supervisor.releases.pid

    eventually(look, "the process that releases claims ends")


def test_no_more_retired_children_finish_than_children_work() -> None:
    family = Family(processes=2, max_tasks_per_child=1)
    assert family.options.most_processes == 5
    *retired, isolating = (family.add(pid).shared for pid in range(4))
    for shared in retired:
        shared.retired = True
    family.check(0.0)
    assert [shared.replaced for shared in (*retired, isolating)] == [True, True, False, False]
    # An isolated message does not count: one more child makes way for it.
    isolating.suspect_since = time.monotonic() - 60.0
    family.check(0.0)
    assert isolating.replaced
    del family.running[0]
    family.check(0.0)
    assert retired[2].replaced


def test_a_child_that_ends_after_it_was_replaced_is_no_crash(
    shared: SharedState, caplog: pytest.LogCaptureFixture
) -> None:
    family = Family(max_runtime=3600.0)
    shared.retired = True
    shared.replaced = True
    shared.ended = True
    for pid in range(3):
        family.note_death(family.add(pid, shared), 0)
    assert (family.seconds_to_start, family.dead, family.is_stopping) == (0.0, [], False)
    assert not caplog.records


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_process_that_has_lost_a_thread_ends_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recorder, "run", lambda self: None)
    process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0))
    assert process.run() == BROKEN
    assert "delayq-recorder has died" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_process_that_has_ended_leaves_no_file_open() -> None:
    def run() -> int:
        process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0))
        threading.Timer(0.2, process.stop).start()
        assert process.run() == 0
        del process
        gc.collect()
        return len(os.listdir("/dev/fd"))

    first = run()
    assert run() <= first


@pytest.mark.django_db(transaction=True)
def test_a_consumer_that_ends_between_two_looks_of_its_process_has_not_died(caplog: pytest.LogCaptureFixture) -> None:
    class Late(OnceProcess):
        looked = False

        def is_over(self) -> bool:
            # The first look comes just before the end of the consumer.
            looked, self.looked = self.looked, True
            self.parts.consumer.join()
            return looked and super().is_over()

    assert Late(Options(DB, threads=1)).run() == 0
    assert "has died" not in caplog.text
