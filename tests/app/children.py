"""Handlers that start processes. Each starts one in a way of its own and ends it by a signal."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async

from django_delayq.project.registry import Delivered

from .handlers import leave, receives
from .waiting import wait_for_a_signal

# A child that a signal did not end is killed after so many seconds.
LONGEST = 60.0

# The signal that the next child of this process is sent before the hooks of the worker have seen the fork.
_early: int | None = None


def _hit_early() -> None:
    if _early is not None:
        os.kill(os.getpid(), _early)


os.register_at_fork(after_in_child=_hit_early)


def fork() -> int:
    child = os.fork()
    if child == 0:
        try:
            wait_for_a_signal()
        finally:
            os._exit(1)
    return child


def wait(child: int) -> int:
    """Wait until a child has ended, and return its exit code."""
    until = time.monotonic() + LONGEST
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError("the child lives on")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def by_fork(number: int) -> int:
    child = fork()
    os.kill(child, number)
    return wait(child)


def by_multiprocessing(method: str) -> Callable[[int], int]:
    def run(number: int) -> int:
        context: Any = multiprocessing.get_context(method)
        is_up = context.RawValue("b", 0)
        child = context.Process(target=wait_for_a_signal, args=[is_up])
        child.start()
        # A fork server ignores SIGINT, and so does its child for a moment.
        while not is_up.value:
            time.sleep(0.01)
        os.kill(child.pid, number)
        child.join(LONGEST)
        if child.exitcode is None:
            child.kill()
            raise RuntimeError("the child lives on")
        code: int = child.exitcode
        return code

    return run


def by_subprocess(number: int) -> int:
    with subprocess.Popen(["sleep", "3600"]) as child:
        child.send_signal(number)
        try:
            return child.wait(LONGEST)
        finally:
            child.kill()


def by_spawn(number: int) -> int:
    child = os.posix_spawnp("sleep", ["sleep", "3600"], os.environ)
    os.kill(child, number)
    return wait(child)


WAYS: dict[str, Callable[[int], int]] = {
    "fork": by_fork,
    "multiprocessing fork": by_multiprocessing("fork"),
    "multiprocessing spawn": by_multiprocessing("spawn"),
    "multiprocessing forkserver": by_multiprocessing("forkserver"),
    "subprocess": by_subprocess,
    "posix_spawn": by_spawn,
}


@receives("t.child", retry=False)
def end_a_child(message: Delivered) -> None:
    """Start a process in the way that the payload says, end it by the payload's signal, and leave its exit code."""
    leave(message, str(WAYS[message.payload["way"]](message.payload["signal"])))


@receives("t.child_async", retry=False)
async def end_a_child_of_the_event_loop(message: Delivered) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "3600")
    child.send_signal(message.payload["signal"])
    try:
        code = await asyncio.wait_for(child.wait(), LONGEST)
    except TimeoutError:
        child.kill()
        raise
    await sync_to_async(leave)(message, str(code))


@receives("t.child_early", retry=False)
def end_a_child_at_once(message: Delivered) -> None:
    """Have a child get a signal while it still has the handlers of the worker."""
    global _early  # noqa: PLW0603
    _early = message.payload["signal"]
    try:
        child = fork()
    finally:
        _early = None
    leave(message, str(wait(child)))


@receives("t.child_of_child", retry=False)
def end_a_child_whose_own_child_keeps_its_handler(message: Delivered) -> None:
    """Have a child choose what SIGTERM does, and leave what its own child, which inherits that, makes of it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
        grandchild = fork()
        os.kill(grandchild, signal.SIGTERM)
        os._exit(wait(grandchild))
    leave(message, str(wait(child)))


@receives("t.mask", retry=False)
def leave_the_mask(message: Delivered) -> None:
    """Leave the signals that this thread blocks after a fork, those that its child blocks, and those of a program."""
    show = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    reading, writing = os.pipe()
    child = os.fork()
    mask = str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    if child == 0:
        os.write(writing, mask.encode())
        os._exit(0)
    os.close(writing)
    wait(child)
    with os.fdopen(reading) as pipe:
        of_child = pipe.read()
    of_program = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    leave(message, f"{mask} {of_child} {of_program}")


@receives("t.pools", retry=False)
def use_pools(message: Delivered) -> None:
    """Use one pool of processes after the other; each is ended by SIGTERM."""
    for _pool in range(message.payload["pools"]):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    leave(message)
