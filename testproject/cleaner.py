"""Ends a server and removes its directory when the process that started it is gone.

This script runs beside each server and waits until its standard input ends: then the owner has closed the server or was
killed, even by SIGKILL. It imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PID_FILE = "server.pid"
# The time that a server has to end before it is killed.
END_SECONDS = 5.0


def family(pid: int) -> list[int]:
    """Return a process and its children: PostgreSQL has one for each connection, in a session of its own."""
    children: list[int] = []
    if Path("/proc/self").exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    else:
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        pairs = (line.split() for line in lines.splitlines())
        children = [int(child) for child, parent in pairs if int(parent) == pid]
    return [pid, *children]


def send(pid: int, number: int) -> bool:
    """Send a signal; tell whether the process was there to receive it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def clean_up(directory: Path, number: int) -> None:
    """End the server of a directory, which may be frozen, with a signal, and remove the directory."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid = int((directory / PID_FILE).read_text())
        members = family(pid)
        for member in members:
            send(member, signal.SIGCONT)
        send(pid, number)
        deadline = time.monotonic() + END_SECONDS
        while send(pid, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        for member in members:
            send(member, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clean_up(Path(sys.argv[1]), int(sys.argv[2]))
