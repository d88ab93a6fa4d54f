"""Only the settings of the tests switch failpoints on. They refuse unknown names."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection, connections

import django_delayq
from tests.support import failpoints

PACKAGE = Path(django_delayq.__file__).parent
INSTALL = "from tests.support import failpoints as machinery; machinery.install()"


def reaching(text: str | None, code: str = "", install: str = INSTALL) -> subprocess.CompletedProcess[str]:
    """Run a process that starts with these failpoints and reaches after_claim three times."""
    environment = {name: value for name, value in os.environ.items() if name != failpoints.ENVIRONMENT}
    if text is not None:
        environment[failpoints.ENVIRONMENT] = text
    program = f"""
import os
from django_delayq.core import failpoints
{install}
{code}
for number in range(1, 4):
    try:
        failpoints.reach("after_claim")
    except ConnectionError as error:
        print(number, type(error).__name__)
    else:
        print(number)
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=PACKAGE.parent,
        check=False,
    )


def test_they_do_nothing_unless_asked() -> None:
    ended = reaching(None)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n2\n3\n", "")


def test_nothing_done_after_the_start_switches_them_on() -> None:
    ended = reaching(None, f"os.environ['{failpoints.ENVIRONMENT}'] = 'after_claim:kill:1'")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n2\n3\n", "")


def test_no_variable_switches_them_on_in_the_package() -> None:
    ended = reaching("after_claim:kill:1", install="")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n2\n3\n", "")


def test_no_module_of_the_package_can_switch_them_on() -> None:
    for path in PACKAGE.rglob("*.py"):
        for use in re.findall(r"failpoints\.(?!py\b)(\w+)", path.read_text()):
            assert use == "reach", path


@pytest.mark.parametrize(
    ("action", "code", "output"),
    [
        ("kill", -signal.SIGKILL, "1\n"),
        ("exit", 86, "1\n"),
        ("raise", 0, "1\n2 Broken\n3\n"),
        ("delay=1ms", 0, "1\n2\n3\n"),
    ],
)
def test_the_action_happens_at_the_nth_time_and_once(action: str, code: int, output: str) -> None:
    ended = reaching(f"after_claim:{action}:2", "import functools; print = functools.partial(print, flush=True)")
    assert (ended.returncode, ended.stdout) == (code, output)
    assert f"Failpoints are on: after_claim:{action}:2" in ended.stderr
    assert f"Failpoint after_claim:{action}:2 in process" in ended.stderr


def test_a_failpoint_acts_once_in_all_the_processes_forked_from_one() -> None:
    ended = reaching("after_claim:exit:1", "if os.fork() == 0: failpoints.reach('after_claim')\nos.wait()")
    assert ended.returncode == 0
    assert ended.stdout == "1\n2\n3\n"


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql("needs a connection")
def test_a_reset_is_met_by_the_next_statement_of_this_thread_alone() -> None:

    def ask() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")

    with ThreadPoolExecutor(1) as other:
        ask()
        other.submit(ask).result()
        try:
            failpoints._action("reset")()
            with pytest.raises(OperationalError):
                ask()
            assert not connection.is_usable()
            other.submit(ask).result()
        finally:
            connection.close()
            other.submit(connections.close_all).result()


def test_a_reset_of_a_port_leaves_other_ports_alone() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as cut,
        socket.create_server(("127.0.0.1", 0)) as spared,
        socket.create_connection(cut.getsockname()) as to_cut,
        socket.create_connection(spared.getsockname()) as to_spared,
    ):
        failpoints._action(f"reset={cut.getsockname()[1]}")()
        with pytest.raises(BrokenPipeError):
            to_cut.send(b"?")
        to_spared.send(b"?")


@pytest.mark.parametrize(
    "text",
    [
        "after_clam:kill:1",
        "after_claim:murder:1",
        "after_claim:kill:0",
        "after_claim:kill:-1",
        "after_claim:kill:20000",
        "after_claim:kill:x",
        "after_claim:kill",
        "after_claim:delay:1",
        "after_claim:delay=long:1",
        "after_claim:reset=redis:1",
        "after_claim:kill:1,after_claim",
    ],
)
def test_a_malformed_failpoint_is_an_error_at_the_start(text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="DELAYQ_FAILPOINTS: "):
        failpoints.parse(text)
    ended = reaching(text)
    assert ended.returncode == 1
    assert "ImproperlyConfigured" in ended.stderr
    assert not ended.stdout


def test_every_name_is_a_place_in_the_code_and_every_place_has_a_name() -> None:
    # Those of a load and of a restore are given to the function that does the work of both.
    place = re.compile(r'(?:failpoints\.reach\(|failpoint=)"(\w+)"')
    places = {name for path in PACKAGE.rglob("*.py") for name in place.findall(path.read_text())}
    assert places == failpoints.NAMES
