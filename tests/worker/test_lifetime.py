"""The life of a worker process: what it may claim and use, and how others take its place."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Transition
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.shared import lifetime as module
from django_delayq.worker.shared.lifetime import Budget, resident_memory
from django_delayq.worker.shared.shared_state import ProcessLock, SharedState
from tests.support.claims import DB
from tests.support.forks import forked, kill
from tests.support.metrics import scrape
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, once_each, states, wait_until, wait_until_all
from tests.support.workers import eventually

# --- what a process may claim, and how much memory it may use ---------------------------------------------------------


MB = 1024**2


class Asked:
    """A process with limits: its shared state, and how often it has asked for a successor."""

    def __init__(self, **limits: int) -> None:
        self.shared = SharedState(1)
        self.times = 0
        self.budget = Budget(Options(DB, **limits), self.shared, "host/1", self.ask)  # type: ignore[arg-type]

    def ask(self) -> None:
        self.times += 1

    def wait(self) -> None:
        """Let the time be over in which its successor should have come."""
        self.budget.patience = 0.0


def test_a_process_claims_its_share_asks_once_for_a_successor_and_goes_on_if_none_comes() -> None:
    process = Asked(max_tasks_per_child=5)
    process.budget.count(4)
    process.budget.refund()
    assert process.budget.grant(100) == 2
    process.budget.count(2)
    # A delivery that it released unstarted does not make it claim again.
    process.budget.refund()
    assert not process.budget.check()
    assert (process.shared.retired, process.budget.grant(1), process.times) == (True, 0, 1)
    process.wait()
    assert process.budget.check()
    assert process.budget.grant(100) == 5
    process.budget.count(5)
    assert (process.shared.retired, process.times) == (True, 2)
    process.shared.replaced = True
    process.wait()
    assert (process.budget.check(), process.budget.grant(1)) == (False, 0)


def test_processes_are_not_spent_at_the_same_moment() -> None:
    shares = {Asked(max_tasks_per_child=1000).budget.grant(10_000) for _ in range(50)}
    assert len(shares) > 5
    assert 900 <= min(shares) <= max(shares) <= 1000
    assert {Asked(max_tasks_per_child=9).budget.grant(100) for _ in range(20)} == {9}


def test_a_process_is_spent_when_it_uses_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 100 * MB
    monkeypatch.setattr(module, "resident_memory", lambda: used)
    monkeypatch.setattr(Budget, "jitter", 0.0)
    process = Asked(max_memory_per_child=100 * MB)
    process.budget.check()
    # Its successor would need as much before its first message.
    assert process.budget.grant(1)
    process.budget.count(1)
    process.budget.check()
    assert (process.budget.grant(1), process.times) == (0, 1)
    process.wait()
    assert process.budget.check()
    used = 109 * MB
    process.budget.check()
    assert process.budget.grant(1)
    used = 110 * MB
    process.budget.check()
    assert not process.budget.grant(1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system has no /proc")
def test_without_proc_the_memory_of_a_process_is_the_most_that_it_ever_had(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident_memory()

    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    # The kernel counts the two at different moments.
    assert before / 2 < resident_memory() < 4096 * MB


@pytest.mark.django_db(transaction=True)
def test_a_process_is_spent_only_when_it_holds_what_it_has_claimed() -> None:
    """Otherwise it would be replaced, find that it holds nothing, and end with a message that has not begun."""
    held: list[int] = []

    def note_held() -> None:
        held.extend(delivery.id for delivery in parts.pool.held())

    parts = Parts(Options(DB, threads=1, max_tasks_per_child=1), redis=False, on_retired=note_held)
    message = schedule_message("t.ok")
    parts.consumer.run_round()
    assert held == [message.pk]
    parts.brokers.close()


# --- the lock that the processes of a worker share --------------------------------------------------------------------


@pytest.mark.parametrize("build", ["as it is", "without memfd"])
def test_a_process_holds_the_lock_until_it_dies(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build == "without memfd":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    lock = ProcessLock()
    with forked(lock.acquire) as holder:
        assert not lock.acquire(wait=False)
        kill(holder)
        assert lock.acquire(wait=False)
    with forked(lambda: not lock.acquire(wait=False)):
        lock.release()
    with forked(lambda: lock.acquire(wait=False)):
        pass


# --- processes that are replaced in order -----------------------------------------------------------------------------


REPLACED = "; another one takes its place"
CONSUMED = "delayq_outcomes_total{outcome=consumed,queue=default,topic=t.effect}"


@pytest.fixture
def patient(set_pace: Callable[[dict[str, float]], None]) -> None:
    """Have a retired process wait for its successor, and a message for a thread, as long as a slow machine needs."""
    set_pace({"lifetime.Budget.patience": 90.0, "process.Parts.run_tuning.longest_queued": 90.0})


def deliveries_per_process() -> Counter[str]:
    """Return the number of deliveries that each worker process has begun."""
    actors = Transition.objects.filter(to_state=State.RUNNING).values_list("actor", flat=True)
    return Counter(actors)


@pytest.mark.parametrize(("processes", "timed_by"), [(1, "no-redis"), (2, "redis")], indirect=["timed_by"])
def test_each_process_delivers_its_share_and_no_message_is_lost(
    start: Start, gate: Gate, processes: int, timed_by: str
) -> None:
    options = ["--processes", str(processes), "--threads", "2", "--metrics-port", "127.0.0.1:0"]
    worker = start(*options, "--max-tasks-per-child", "5")
    port = int(worker.wait_for(r"Metrics are served on port (\d+)")[1])
    first = schedule_messages({"topic": "t.effect"} for _ in range(23))
    wait_until_all(State.CONSUMED, 23)
    each = deliveries_per_process()
    assert len(each) > 1
    assert max(each.values()) >= 5

    def shares_are_kept() -> bool:
        # A process for whose successor there was no place in time has a further share.
        went_on = Counter(re.findall(r"Worker process (\S+) goes on", worker.log))
        return all(number <= 5 * (1 + went_on[actor.removeprefix("worker:")]) for actor, number in each.items())

    eventually(shares_are_kept, "no process claims more than its share")

    slow = schedule_message("t.gate", gate.payload)
    eventually(partial(gate.begun, slow.pk), "it begins")
    second = schedule_messages({"topic": "t.effect"} for _ in range(20))
    # The process in which the slow one runs is retired too: others take turns meanwhile.
    eventually(lambda: states() == {State.CONSUMED: 43, State.RUNNING: 1}, "the others are delivered")
    eventually(lambda: scrape(port)[CONSUMED] == 43, "no count is lost")
    gate.open()
    wait_until(slow, State.CONSUMED)
    slow.refresh_from_db()
    assert slow.deliveries == 1
    assert effects_per_message() == once_each([*first, *second, slow])
    assert worker.stop() == 0
    assert worker.count(REPLACED) >= 5
    assert worker.count("died|ERROR|CRITICAL") == 0


@pytest.mark.usefixtures("patient")
def test_a_signal_ends_a_worker_whose_processes_are_being_replaced(start: Start, gate: Gate) -> None:
    worker = start("--processes", "2", "--threads", "2", "--max-tasks-per-child", "1")
    messages = [schedule_message("t.gate", gate.payload) for _ in range(4)]
    eventually(lambda: gate.how_many_began() == 4, "all begin")
    # Two processes finish, and so do their successors.
    assert len(deliveries_per_process()) == 4
    worker.send(signal.SIGTERM)
    worker.wait_for("Stopping")
    gate.open()
    assert worker.wait() == 0
    assert effects_per_message() == once_each(messages)
    assert states() == {State.CONSUMED: 4}


@pytest.mark.usefixtures("patient")
def test_a_process_that_is_killed_while_it_finishes_has_lost_its_place_only(start: Start, gate: Gate) -> None:
    worker = start("--threads", "2", "--max-tasks-per-child", "1")
    (first,) = worker.wait_for_children(1)
    slow = schedule_message("t.gate", gate.payload)
    eventually(partial(gate.begun, slow.pk), "it begins")
    worker.wait_for(f"/{first}/.* has claimed 1 messages{REPLACED}")
    worker.wait_for_children(2)
    os.kill(first, signal.SIGKILL)
    worker.wait_for("died .killed by signal 9")
    eventually(partial(gate.begun, slow.pk, 2), "its successor delivers the message again")
    gate.open()
    wait_until(slow, State.CONSUMED)
    quick = schedule_message("t.effect")
    wait_until(quick, State.CONSUMED)
    assert effects_per_message() == once_each([slow, quick])
    assert deliveries_per_process().most_common(1)[0][1] == 1
    # No process was started for the dead one, whose place its successor had.
    worker.wait_for_children(1)
    assert worker.stop() == 0


@pytest.mark.usefixtures("patient")
def test_a_process_that_has_grown_is_replaced(start: Start) -> None:
    worker = start("--threads", "1", "--max-memory-per-child", "250M")
    messages = schedule_messages({"topic": "t.leak", "payload": {"megabytes": 100}} for _ in range(3))
    wait_until_all(State.CONSUMED, 3)
    worker.wait_for(f"uses [23][0-9][0-9]M of memory{REPLACED}")
    late = schedule_message("t.ok")
    wait_until(late, State.CONSUMED)
    assert len(deliveries_per_process()) == 2
    assert sum(deliveries_per_process().values()) == len(messages) + 1
    assert worker.stop() == 0
    assert worker.count("died|ERROR") == 0
