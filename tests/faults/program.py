"""The processes that have failpoints: run_delayq, delayq_restore, and a producer."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

from django.conf import settings

from tests.support.workers import Worker, eventually

from .lossy import Network


class Program(Worker):
    """Any Python module as a process, watched in the way of ``Worker``."""

    def __init__(self, *arguments: str, failpoints: str = "", network: Network | None = None) -> None:
        self._start(
            [sys.executable, "-m", *arguments],
            {
                "DELAYQ_TEST_SETTINGS": json.dumps(settings.DELAYQ),
                "DELAYQ_FAILPOINTS": failpoints,
                **(network.environment if network is not None else {}),
            },
        )

    def wait_for_failpoint(self) -> int:
        """Wait until a process has reached the failpoint, and return its pid."""
        return int(self.wait_for(r"Failpoint \S+ in process (\d+)")[1])


def state_of(pid: int) -> str:
    """Return the state of a process: R, S, D, T (stopped), Z, or X when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "X"
    found = re.match(r"\d+ \(.*\) (\w)", stat, re.DOTALL)
    assert found
    return found[1]


def wait_for_state(pid: int, states: str) -> None:
    eventually(lambda: state_of(pid) in states, f"process {pid} is {states}")


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
