"""The demo as a newcomer starts it: one command that needs no servers and leaves no processes behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.support.workers import ROOT, eventually


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo with servers of its own; on SQLite when these tests are."""
    ours = ("DATABASE_URL", "REDIS_URL", "SQLITE_PATH", "DJANGO_SETTINGS_MODULE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if os.environ.get("DELAYQ_TEST_DATABASE") == "sqlite":
        environment["SQLITE_PATH"] = str(folder / "shop.sqlite3")
    with subprocess.Popen(
        [sys.executable, "-m", "testproject.demo", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read the output up to a line in which the pattern is found, and return it."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"it does not say {pattern!r}:\n{said}")


def is_gone(process: subprocess.Popen[str], said: str) -> bool:
    """Tell whether its worker has ended and nothing listens any more at the addresses that it printed."""
    ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", said)]
    assert ports
    worker = f"demo-{process.pid} "
    return not any(map(listens, ports)) and not any(worker in line for line in command_lines())


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command_lines() -> list[str]:
    return subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_demo_wipes_redis_loses_nothing_and_leaves_messages_of_each_kind_in_the_admin(tmp_path: Path) -> None:
    with demo(tmp_path, "--serve") as process:
        said = read_until(process, r"The admin: http")
        url = re.search(r"The admin: (\S+) +user: (\S+) +password: (\S+)", said)
        assert url is not None
        pages = browse(*url.groups())
        process.send_signal(signal.SIGINT)
        rest, _nothing = process.communicate(timeout=60)

    assert process.returncode == 0, said + rest
    assert "Redis is wiped now: FLUSHALL" in said
    assert "Redis is loaded again from the record" in said
    assert "4 of them after retries" in said
    assert "Lost: 0. Effects that happened twice: 0. Lamps: 100 = 92 on the shelf + 8 sold." in said
    log = said.partition("The log of message")[2]
    moves = re.findall(r"^ +[\d.]+ s +(\w*) +→ (\w+)", log, re.MULTILINE)
    again = [("scheduled", "running"), ("running", "scheduled")]
    assert moves == [("", "scheduled"), *again, *again, ("scheduled", "running"), ("running", "consumed")]
    assert log.count("HTTP Error 503") == 2
    for line in ("37 messages due in the future", "5 overdue in a paused queue", "6 dead", "3 expired, 3 cancelled"):
        assert line in said
    for state, number in (("scheduled", 43), ("dead", 6), ("expired", 3), ("consumed", 1)):
        found = re.search(r"([\d,]+) message", pages[state])
        assert found is not None
        assert int(found[1].replace(",", "")) >= number, state
    assert is_gone(process, said + rest)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_demo_that_is_interrupted_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        said = read_until(process, r" done$")
        process.send_signal(number)
        rest, _nothing = process.communicate(timeout=60)

        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert "nothing is left running" in rest
        eventually(lambda: is_gone(process, said), "everything that it started has ended")


def browse(root: str, user: str, password: str) -> dict[str, str]:
    """Log in to the admin, and return the text of the list of messages in each state."""
    client = build_opener(HTTPCookieProcessor(CookieJar()))
    form = client.open(f"{root}login/").read().decode()
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', form)
    assert token is not None
    fields = {"username": user, "password": password, "csrfmiddlewaretoken": token[1], "next": "/admin/"}
    client.open(f"{root}login/", urlencode(fields).encode())
    pages = {}
    for state in ("scheduled", "dead", "expired", "consumed"):
        url = f"{root}delayq/message/?{urlencode({'q': f'state:{state}'})}"
        pages[state] = re.sub(r"<[^>]+>", " ", client.open(url).read().decode())
    return pages


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, demo(tmp_path, "--port", str(taken.getsockname()[1])) as it:
        said, _nothing = it.communicate(timeout=60)

    assert it.returncode == 2
    assert "already in use" in said
    assert "Worker" not in said
