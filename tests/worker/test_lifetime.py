"""The limits of one process: how many messages it may claim, how much memory it may use; and the lock of all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from django_delayq import schedule_message
from django_delayq.core.worker_options import Options
from django_delayq.worker.parts import lifetime as module
from django_delayq.worker.parts.lifetime import PATIENCE, BegunPage, Budget, ProcessLock, resident_memory
from django_delayq.worker.processes.assembly import Parts
from tests.support.claims import DB
from tests.support.forks import forked, kill

MB = 1024**2


class Asked:
    """A process with limits: its page, and how often it has asked for a successor."""

    def __init__(self, **limits: int) -> None:
        self.page = BegunPage(1)
        self.times = 0
        self.budget = Budget(Options(DB, **limits), self.page, "host/1")  # type: ignore[arg-type]
        self.budget.ask = self.ask

    def ask(self) -> None:
        self.times += 1


def test_a_process_claims_its_share_and_asks_once_for_a_successor() -> None:
    process = Asked(max_tasks_per_child=5)
    process.budget.count(4)
    process.budget.refund()
    assert process.budget.grant(100) == 2
    process.budget.count(2)
    # A delivery that it released unstarted does not make it claim again.
    process.budget.refund()
    assert not process.budget.check()
    assert (process.page.spent, process.budget.grant(1), process.times) == (True, 0, 1)


def test_a_process_that_gets_no_successor_goes_on_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Asked(max_tasks_per_child=5)
    process.budget.count(5)
    assert not process.budget.check()
    monkeypatch.setattr(process.budget, "_spent_at", process.budget._spent_at - PATIENCE)
    assert process.budget.check()
    assert process.budget.grant(100) == 5
    process.budget.count(5)
    assert (process.page.spent, process.times) == (True, 2)


def test_a_process_that_was_replaced_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Asked(max_tasks_per_child=1)
    process.budget.count(1)
    process.page.replace()
    monkeypatch.setattr(process.budget, "_spent_at", 0.0)
    assert not process.budget.check()
    assert not process.budget.grant(1)


def test_processes_are_not_spent_at_the_same_moment() -> None:
    shares = {Asked(max_tasks_per_child=1000).budget.grant(10_000) for _ in range(50)}
    assert len(shares) > 5
    assert 900 <= min(shares) <= max(shares) <= 1000
    assert {Asked(max_tasks_per_child=9).budget.grant(100) for _ in range(20)} == {9}


def test_a_process_is_spent_when_it_uses_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 100 * MB
    monkeypatch.setattr(module, "resident_memory", lambda: used)
    monkeypatch.setattr(module, "JITTER", 0.0)
    process = Asked(max_memory_per_child=100 * MB)
    process.budget.check()
    # Its successor would need as much before its first message.
    assert process.budget.grant(1)
    process.budget.count(1)
    process.budget.check()
    assert (process.budget.grant(1), process.times) == (0, 1)
    monkeypatch.setattr(process.budget, "_spent_at", 0.0)
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
    parts = Parts(Options(DB, threads=1, max_tasks_per_child=1), redis=False)
    message = schedule_message("t.ok")
    held: list[int] = []
    parts.budget.ask = lambda: held.extend(delivery.id for delivery in parts.pool.held())
    parts.consumer.turn()
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
