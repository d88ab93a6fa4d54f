"""The lock that the processes of a worker share, also when a process dies."""

from __future__ import annotations

import os

import pytest

from django_delayq.worker.parts.lifetime import ProcessLock
from tests.support.forks import forked, kill


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
