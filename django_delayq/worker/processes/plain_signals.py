"""Gives the processes that a handler forks the signals of a plain process, and not those of the worker.

The programs that a handler executes need no help: the system gives them the default for each signal that the worker
catches. An ignored signal would stay ignored in them, so a worker ignores none of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

# Windows has none of these, and no workers that catch them.
_HARSHER = [getattr(signal, name) for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
# The signals that a worker catches, and that end it in order. It leaves the last two as they are where the project
# catches them, or where they are ignored, as ``nohup`` has it.
CAUGHT = (
    signal.SIGTERM,
    signal.SIGINT,
    *(number for number in _HARSHER if signal.getsignal(number) is signal.SIG_DFL),
)

_are_on = False
# Its ``mask``: the signals that a thread blocked before it began to fork.
_forking = threading.local()


def switch(*, on: bool) -> None:
    """Have the processes that are forked from now on begin with plain signals, or with those of this process."""
    global _are_on  # noqa: PLW0603
    _are_on = on


def heed_as_pid_1() -> None:
    """Let signals end this process until a worker catches them: the system drops those that PID 1 does not catch."""
    if os.getpid() == 1:
        for number in CAUGHT:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def _block() -> None:
    # A signal that reaches the child before it has plain handlers waits for them. The worker's would swallow it.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    """Give a child that was just forked plain signals. Runs in the child before anything else."""
    if not _are_on:
        _unblock()
        return
    # The children of this child get the handlers that it chooses.
    switch(on=False)
    for number in CAUGHT:
        signal.signal(number, signal.SIG_DFL)
    # A signal that has waited ends the child now: Python ignores the KeyboardInterrupt of a hook.
    _unblock()
    signal.signal(signal.SIGINT, signal.default_int_handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_child)
