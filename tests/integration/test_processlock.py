"""What the processes of a worker share: a lock, and the budget of --max-messages. Some of them die holding either."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from django_delayq.worker.budget import Budget
from django_delayq.worker.processlock import ProcessLock


@contextmanager
def forked(act: Callable[[], object]) -> Iterator[int]:
    """Another process that has done this; it lives until it is killed."""
    done, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done)
        os.write(told, b"1" if act() else b"0")
        signal.pause()
    os.close(told)
    try:
        assert os.read(done, 1) == b"1"
        yield pid
    finally:
        os.close(done)
        kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@pytest.mark.parametrize("build", ["as it is", "without memfd"])
def test_one_process_has_it_until_it_dies(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_dead_process_had_reserved_is_given_back() -> None:
    budget = Budget(10, 2)
    budget.place = 1
    with forked(lambda: budget.reserve(7) == 7):
        budget.place = 0
        assert budget.reserve(5) == 3
        budget.settle(3, 3)
        assert (budget.left, budget.empty) == (False, False)
    budget.bury(1)
    assert budget.left
    assert budget.reserve(10) == 7
    budget.settle(7, 7)
    assert budget.empty


def test_who_stands_still_in_the_middle_holds_up_only_those_who_reserve() -> None:
    budget = Budget(10, 2)
    with forked(budget._lock.acquire) as holder:
        budget.give_back()
        budget.give_back()
        assert not budget.bury(1)
        assert not budget.empty
        kill(holder)
    assert budget.bury(1)
    assert budget.reserve(100) == 12


def test_without_a_limit_there_is_always_something_left() -> None:
    budget = Budget(None, 2)
    assert budget.reserve(1000) == 1000
    budget.settle(1000, 1000)
    budget.bury(1)
    assert (budget.left, budget.empty) == (True, False)
