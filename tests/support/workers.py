"""``run_delayq`` as a real process, which tests stop, kill and freeze. No helper sleeps for a fixed time."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from django.conf import settings

from testproject.cleaner import family

ROOT = Path(__file__).resolve().parents[2]
# Waits fail after so many seconds.
PATIENCE = 90.0

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str = "", *, timeout: float = PATIENCE) -> T:
    """Call ``look`` until it returns something true, and return that."""
    deadline = time.monotonic() + timeout
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"did not happen in {timeout:g} s: {what or look}; last seen: {seen!r}"
        time.sleep(0.01)


def is_quick(act: Callable[[], object], seconds: float) -> None:
    """Call ``act`` until one call takes less than so many seconds. A busy machine makes a call take longer at times."""

    def took() -> float:
        began = time.monotonic()
        act()
        return time.monotonic() - began

    eventually(lambda: took() < seconds, f"{act} within {seconds:g} s")


class Worker:
    """A ``run_delayq`` with the present settings.DELAYQ in a process group of its own, and its log lines so far."""

    def __init__(
        self, *arguments: str, unknown: Sequence[str] = (), delayq: dict[str, object] | None = None, prefix: str = ""
    ) -> None:
        self._start(
            [*prefix.split(), sys.executable, "-m", "django", "run_delayq", *arguments],
            {
                "DELAYQ_TEST_SETTINGS": json.dumps({**settings.DELAYQ, **(delayq or {})}),
                "DELAYQ_TEST_UNKNOWN": ",".join(unknown),
            },
        )

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DJANGO_SETTINGS_MODULE": "tests.support.worker_settings",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self._rest = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while self._is_readable(wait=True) and self._take():
            pass

    def _is_readable(self, *, wait: bool) -> bool:
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        return bool(poll.poll(None if wait else 0))

    def _take(self) -> bool:
        """Take the lines that were written until now. Tell whether more may follow."""
        with self._news:
            while not self._output.closed and self._is_readable(wait=False):
                read = os.read(self._output.fileno(), 65_536)
                if not read:
                    return False
                # A line is whole when its end is there.
                *lines, self._rest = (self._rest + read).split(b"\n")
                self.lines += [line.decode(errors="replace") for line in lines]
                self._news.notify_all()
        return True

    # --- what it says -------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        self._take()
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, timeout: float = PATIENCE) -> re.Match[str]:
        """Wait for a log line in which the pattern is found, and return the match."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                left = deadline - time.monotonic()
                assert left > 0, f"not in the log after {timeout:g} s: {pattern}\n{self.log}"
                assert self._reader.is_alive(), f"ended, and never said {pattern}\n{self.log}"
                self._news.wait(min(left, 0.5))

    def count(self, pattern: str) -> int:
        """Count the log lines in which the pattern is found, of all that were written before the call."""
        self._take()
        return sum(bool(re.search(pattern, line)) for line in self.lines)

    # --- its processes ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def children(self) -> list[int]:
        """The worker processes under the supervisor."""
        return family(self.pid)[1:]

    def wait_for_children(self, number: int, *, other_than: Sequence[int] = ()) -> list[int]:
        """Wait until there are so many children, and return their pids."""

        def look() -> list[int]:
            there = self.children
            return there if len(there) == number and not set(there) & set(other_than) else []

        return eventually(look, f"{number} worker processes")

    def send(self, number: signal.Signals) -> None:
        """Signal the supervisor alone."""
        os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """Signal the whole process group, as a terminal or a power cut does."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process and of its log, and return the exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end in {timeout:g} s\n{self.log}") from None
        self._reader.join(timeout)
        return code

    def stop(self) -> int:
        """End the worker in order, and return the exit code."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the whole process group, as a power cut does."""
        self.send_all(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """End whatever is left of the worker."""
        try:
            self.send_all(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self._reader.join(PATIENCE)
        if not self._reader.is_alive():
            self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
