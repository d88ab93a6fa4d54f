"""Waits until a pipe or a socket can be read, also in a process that has many files open, and ends such waits."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any


def wait_readable(files: Sequence[Any], timeout: float) -> list[Any]:
    """Wait up to ``timeout`` seconds until one of these files can be read. Return those that can."""
    try:
        # epoll and poll know whole milliseconds only, and round up.
        return select.select(files, [], [], timeout)[0]
    except ValueError:
        # select knows no descriptor of 1024 or more. And epoll would need one more of them for each wait.
        with selectors.PollSelector() as selector:
            for file in files:
                selector.register(file, selectors.EVENT_READ)
            return [key.fileobj for key, _events in selector.select(timeout)]


def patched_by() -> str | None:
    """Return the library that has patched the waits and threads of this process; None: there is none."""
    for function, home in ((select.select, "select"), (threading.get_ident, "_thread")):
        if function.__module__ != home:
            return function.__module__.partition(".")[0]
    return None


class Waker:
    """Ends a wait: its ``fileno()`` can be read after ``wake``. Any thread may wake, and so may a signal handler.

    It is a pair of sockets: Windows waits for no pipe.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
            weakref.finalize(self, end.close)

    def fileno(self) -> int:
        """Return the number of the file to wait for."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the wait, or the next one."""
        # There is enough to read, or it is closed.
        with contextlib.suppress(OSError):
            self._write.send(b"!")

    def forget(self) -> None:
        """Have the next wait last until the next ``wake``."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Close the sockets."""
        self._read.close()
        self._write.close()
