"""Processes that a test forks and kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
