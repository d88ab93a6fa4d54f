"""A worker whose log nobody reads any more, or that cannot write it, goes on, and ends with its own exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from tests.support.processes import Start
from tests.support.record_of import wait_until
from tests.support.workers import ROOT, Worker

pytestmark = pytest.mark.usefixtures("transactional_db")

# Runs a program whose stdout and stderr are the writing end of a pipe without a reader, closed, or on a full disk.
EXECUTE = """
import os
import sys

how, *command = sys.argv[1:]
reading, writing = os.pipe()
os.close(reading)
for number in (1, 2):
    match how:
        case "gone":
            os.dup2(writing, number)
        case "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        case "closed":
            os.close(number)
os.execvp(command[0], command)
"""


@pytest.fixture(params=["gone", "full", "closed"])
def start_mute(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Callable[..., Worker]:
    """Start workers that cannot write what they say."""
    if request.param == "full" and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    script = tmp_path / "execute.py"
    script.write_text(EXECUTE)
    # Without a buffer nothing is left to be written later.
    prefix = f"env -u PYTHONUNBUFFERED {sys.executable} {script} {request.param}"
    return lambda *arguments: start(*arguments, prefix=prefix)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_worker_that_cannot_write_its_log_replaces_dead_processes_and_ends_in_order(
    start_mute: Callable[..., Worker], number: signal.Signals
) -> None:
    worker = start_mute()
    (first,) = worker.wait_for_children(1)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    os.kill(first, signal.SIGKILL)
    worker.wait_for_children(1, other_than=[first])
    wait_until(schedule_message("t.reject"), State.DEAD)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    worker.send(number)
    assert worker.wait() == 0


def test_once_that_cannot_write_how_many_it_delivered_has_delivered_them(start_mute: Callable[..., Worker]) -> None:
    rejected, delivered = schedule_message("t.reject"), schedule_message("t.ok")
    assert start_mute("--once").wait() == 0
    wait_until(rejected, State.DEAD)
    wait_until(delivered, State.CONSUMED)


def test_a_worker_that_cannot_write_why_it_does_not_start_ends_with_the_code_for_it(
    start_mute: Callable[..., Worker],
) -> None:
    assert start_mute("--once", "--max-tasks-per-child", "5").wait() == 2


HANDED_OUT = """
import os

from django_delayq.worker.processes import output

output.occupy_closed()
(reading, writing), nowhere = os.pipe(), os.stat(os.devnull)
numbers = [number for number in range(3) if os.path.samestat(os.fstat(number), nowhere)]
os._exit(42 if min(reading, writing) > 2 and {1, 2} <= set(numbers) else 1)
"""


def test_no_connection_gets_the_number_of_a_closed_stream() -> None:
    """A library that writes an error there would write it to a server; and libuv ends a process that closes it."""
    command = [sys.executable, "-c", EXECUTE, "closed", sys.executable, "-c", HANDED_OUT]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 42
