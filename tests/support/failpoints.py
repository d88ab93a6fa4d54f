"""Failpoints: named places at which a test makes this process die, freeze, wait, fail or lose its connections.

The package only says which place is reached (``django_delayq/core/failpoints.py``). The settings of the tests call
``install``, which reads DELAYQ_FAILPOINTS: ``name:action:nth``, or several of these, separated by commas:

    DELAYQ_FAILPOINTS="after_claim:kill:1,before_record:delay=2:3"

The action happens once: when the place is reached for the ``nth`` time, counted together with the processes that are
forked from this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections

from django_delayq.core import in_tests
from django_delayq.core.durations import seconds

logger = logging.getLogger("django_delayq")

ENVIRONMENT = "DELAYQ_FAILPOINTS"

NAMES = frozenset(
    {
        # A process that schedules.
        "before_insert",
        "after_insert",
        "before_put",
        "after_put",
        # The consumer.
        "before_take",
        "after_take",
        "before_limited_claim",
        "after_claim",
        # One run of a handler.
        "before_handler",
        "after_handler",
        "before_succeed",
        "after_succeed",
        "after_commit",
        # The recorder.
        "before_record",
        "after_record",
        # The rest.
        "after_horizon",
        "mid_load",
        "mid_restore",
        "after_reap",
    }
)
# The greatest ``nth``: a pipe holds a byte for each time that the place is reached.
GREATEST_NTH = 10_000

Fault = Callable[[], None]


class Broken(OperationalError, ConnectionError):
    """The error of the action "raise". It is a database error and a socket error, as callers of either would get it."""


class _Armed:
    """An action that waits for its turn. Each pass, in any process, reads a byte of a pipe, and the last byte is it."""

    def __init__(self, what: str, action: Fault, nth: int) -> None:
        self.what = what
        self._action = action
        self._countdown, write = os.pipe()
        os.write(write, b"." * (nth - 1) + b"!")
        os.close(write)

    def reached(self) -> None:
        if os.read(self._countdown, 1) == b"!":
            # Not by the log, whose thread may die or freeze before it has written the line.
            os.write(2, f"Failpoint {self.what} in process {os.getpid()}\n".encode())
            self._action()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _break() -> None:
    raise Broken("a failpoint broke the connection")


def _reset() -> None:
    """Cut this thread's connections to databases. Django notices with the next statement."""
    theirs = [connection.connection for connection in connections.all(initialized_only=True)]
    _cut(raw.fileno() for raw in theirs if hasattr(raw, "fileno"))


def _reset_port(port: int) -> None:
    """Cut this process's connections to a port, such as that of Redis, whose connections belong to no thread."""
    _cut((int(name) for name in os.listdir("/dev/fd")), port)


def _cut(files: Iterable[int], port: int | None = None) -> None:
    cut = 0
    for file in files:
        with contextlib.suppress(OSError):
            # Only sockets are copied: closing the copy of a file would end the locks that this process has on it.
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            with socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM) as end:
                if port is None or end.getpeername()[1:2] == (port,):
                    end.shutdown(socket.SHUT_RDWR)
                    cut += 1
    logger.warning("Cut %d connections to %s", cut, port or "databases")


_ACTIONS: dict[str, Fault] = {"kill": _die, "stop": _freeze, "raise": _break, "reset": _reset}


def _action(text: str) -> Fault:
    word, _equals, value = text.partition("=")
    if word == "delay":
        wait = seconds(value)
        return lambda: time.sleep(wait)
    if word == "reset" and value:
        port = int(value)
        return lambda: _reset_port(port)
    if text not in _ACTIONS:
        raise ValueError(f"no action {text!r}: there are {', '.join([*_ACTIONS, 'delay=SECONDS', 'reset=PORT'])}")
    return _ACTIONS[text]


def parse(text: str) -> dict[str, list[_Armed]]:
    """Read the variable. Raises ``ImproperlyConfigured`` for anything that cannot be read."""
    armed: dict[str, list[_Armed]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            name, action, nth = part.split(":")
            if name not in NAMES:
                raise ValueError(f"no failpoint {name!r}: there are {', '.join(sorted(NAMES))}")
            if not 1 <= int(nth) <= GREATEST_NTH:
                raise ValueError(f"{nth} is not between 1 and {GREATEST_NTH}")
            armed.setdefault(name, []).append(_Armed(part, _action(action), int(nth)))
        except ValueError as error:
            raise ImproperlyConfigured(f"{ENVIRONMENT}: {part!r} is not name:action:nth: {error}") from None
    return armed


def install() -> None:
    """Do in this process, and in those that it forks, what the variable asks for."""
    text = os.environ.get(ENVIRONMENT, "")
    armed = parse(text)
    if not armed:
        return

    def reached(name: str) -> None:
        for one in armed.get(name, ()):
            one.reached()

    in_tests.failpoint = reached
    logger.warning("Failpoints are on: %s", text)
