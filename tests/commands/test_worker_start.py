"""What ``run_delayq`` refuses before it starts a worker process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support.workers import ROOT, Worker

pytestmark = pytest.mark.usefixtures("transactional_db")


VALUE, MIDDLEWARE = {"LEASE": -1}, {"MIDDLEWARE": ["nowhere.Tenants"]}


@pytest.mark.parametrize(
    ("arguments", "delayq", "words"),
    [
        (["--once"], VALUE, "DELAYQ['LEASE'] is impossible."),
        (["--skip-checks"], VALUE, "DELAYQ['LEASE'] is impossible."),
        (["--processes", "1"], MIDDLEWARE, "names nowhere.Tenants"),
        (["--once", "--skip-checks"], MIDDLEWARE, "names nowhere.Tenants"),
    ],
)
def test_a_wrong_setting_ends_it_with_exit_code_78(arguments: list[str], delayq: dict[str, Any], words: str) -> None:
    with Worker(*arguments, delayq=delayq) as worker:
        assert worker.wait() == 78
    assert worker.count(words.replace("[", r"\[").replace("]", r"\]")) == 1
    assert worker.count("Traceback") == 0


# What gevent does to a process, as far as a worker notices it.
PATCHED = """
import select

def wait(*arguments):
    raise AssertionError("nothing waits under a patch")

wait.__module__ = "gevent.select"
select.select = wait
"""
WITHOUT_POSIX = """
import os, sys

sys.modules["fcntl"] = None
del os.fork
"""
RUN = """
import sys
from django.core.management import execute_from_command_line

execute_from_command_line(sys.argv)
"""


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (PATCHED, "gevent has patched the standard library of this process"),
        (WITHOUT_POSIX, "run_delayq needs Linux, macOS or another POSIX system, also with --once; on Windows, run it"),
    ],
    ids=["patched", "without POSIX"],
)
def test_an_impossible_process_is_refused_in_words(system: str, words: str) -> None:
    command = [sys.executable, "-c", system + RUN, "run_delayq", "--once"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(f"CommandError: {words}")
    assert done.stderr.count("\n") == 1
