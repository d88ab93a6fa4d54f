"""The lock that the processes of a worker share, also when a process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from django_delayq.worker.parts.processlock import ProcessLock


@contextmanager
def forked(act: Callable[[], object]) -> Iterator[int]:
    """Fork a process that calls ``act`` and lives until it is killed."""
    result_read, result_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(result_read)
        os.write(result_write, b"1" if act() else b"0")
        signal.pause()
    os.close(result_write)
    try:
        assert os.read(result_read, 1) == b"1"
        yield pid
    finally:
        os.close(result_read)
        kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


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
