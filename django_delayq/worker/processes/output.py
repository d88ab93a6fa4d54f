"""Writes to stdout and stderr. They may be closed, and their reader gone or asleep: a worker goes on all the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from django.core.management.base import OutputWrapper

from ..shared.log_writer import log_writer


def occupy_closed() -> None:
    """Open ``/dev/null`` in place of closed streams: else a connection gets a number to which libraries write errors.

    libuv, for example, ends the process when it is to close a file with such a number.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


def flush() -> None:
    """Write out what stdout and stderr still hold."""
    for stream in (sys.stdout, sys.stderr):
        # Any error: a handler may have replaced the stream.
        with suppress(Exception):
            stream.flush()


def drop_unwritten() -> None:
    """Have Python end with the exit code of the program also when it cannot write the rest of the output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001
            with suppress(Exception):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Output(OutputWrapper):
    """The stream of a command. A line that cannot be written is lost, and no line is waited for."""

    def write(  # type: ignore[override]
        self, msg: str = "", style_func: Callable[[str], str] | None = None, ending: str | None = None
    ) -> None:
        def write() -> None:
            with suppress(OSError, AttributeError):
                OutputWrapper.write(self, msg, style_func, ending)

        log_writer.submit(write)
