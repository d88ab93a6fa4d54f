"""A log that takes no lines: nobody reads the pipe, or a handler of the project blocks. The worker goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models import Worker as Heard
from django_delayq.models.messages import Lease
from django_delayq.project import registry
from django_delayq.record import reads
from tests.app.models import Effect
from tests.support.processes import Gate, Start, with_settings
from tests.support.record_of import states, wait_until, wait_until_all
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

# Runs a program whose stdout and stderr are a named pipe.
EXECUTE = """
import os
import sys

pipe, *command = sys.argv[1:]
for number in (1, 2):
    os.dup2(os.open(pipe, os.O_WRONLY), number)
os.execvp(command[0], command)
"""
LOGGING = """
import logging
import time
from pathlib import Path

from django.utils.log import AdminEmailHandler

ADMINS = ["eve@example.org"]
EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
EMAIL_HOST, EMAIL_PORT = "127.0.0.1", {port}


class Blocking(logging.Handler):
    def emit(self, record):
        while True:
            time.sleep(60)


class Ending(logging.Handler):
    def emit(self, record):
        raise SystemExit("the log is gone")


LOGGING = {{
    "version": 1,
    "handlers": {{"own": {{"()": lambda: {handler}}}}},
    "loggers": {{"{logger}": {{"handlers": ["own"], "level": "{level}"}}}},
}}
DEBUG = {debug}
"""

# The system gives no thread for the log, as where a container has no more of them.
NO_THREAD = """
import threading

start = threading.Thread.start


def refuse(thread):
    if thread.name == "delayq-log":
        raise RuntimeError("can't start new thread")
    start(thread)


threading.Thread.start = refuse
"""


class Pipe:
    """A named pipe whose reader lives, and reads only when it is told to."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._read = b""

    def fill(self) -> None:
        """Write until nothing fits any more."""
        for size in (65_536, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(self._end, b"." * size)

    def read(self) -> str:
        """Read what is there by now, and return all that was read."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read += os.read(self._end, 65_536)
        return self._read.decode(errors="replace")

    def close(self) -> None:
        os.close(self._end)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path / "log")
    yield made
    made.close()


@pytest.fixture
def start_into(start: Start, pipe: Pipe, tmp_path: Path) -> Callable[..., Worker]:
    """Start workers that write into that pipe."""
    script = tmp_path / "execute.py"
    script.write_text(EXECUTE)
    return lambda *arguments: start(*arguments, prefix=f"{sys.executable} {script} {pipe.path}")


def wait_until_renewed(message: Message) -> None:
    """Wait until the lease of a message, which is short, was renewed again and again, or another delivery has begun."""
    much_later = reads.now("default") + timedelta(seconds=4)
    renewed = Lease.objects.filter(message_id=message.pk, until__gt=much_later)
    eventually(
        lambda: renewed.exists() or wait_until(message, State.RUNNING).deliveries > 1,
        "the lease is renewed",
    )


def deliver_all_kinds(worker: Worker, start: Start, gate: Gate, held: Message) -> None:
    """See that a worker records, renews, claims and supervises, beside one that would take what it loses."""
    (first,) = worker.wait_for_children(1)
    start("--worker-name", "healthy")
    topics = ("t.effect", "t.reject", "t.tx", "t.second_time", "t.async")
    schedule_messages([{"topic": topic} for topic in topics * 20])
    eventually(lambda: states() == {State.RUNNING: 1, State.DEAD: 20, State.CONSUMED: 80}, "all but one end")
    wait_until_renewed(held)
    gate.open()
    assert wait_until(held, State.CONSUMED).deliveries == 1
    effects = Counter(Effect.objects.filter(note="").values_list("message_id", flat=True))
    assert set(effects.values()) == {1}
    os.kill(first, signal.SIGKILL)
    worker.wait_for_children(1, other_than=[first])


def test_a_worker_whose_log_nobody_reads_goes_on_beside_another_one_and_ends_in_order(
    start_into: Callable[..., Worker],
    start: Start,
    pipe: Pipe,
    gate: Gate,
    set_pace: Callable[[dict[str, float]], None],
) -> None:
    set_pace({"process.Parts.run_tuning.counts_interval": 0.2})
    worker = start_into("-v", "2")
    held = gate.running("t.short_lease")
    pipe.fill()
    deliver_all_kinds(worker, start, gate, held)
    assert worker.stop() == 0


def test_a_worker_alone_whose_log_is_full_from_the_start_delivers_and_ends_in_order(
    start_into: Callable[..., Worker], pipe: Pipe, tmp_path: Path
) -> None:
    pipe.fill()
    heartbeat = tmp_path / "alive"
    worker = start_into("--heartbeat-file", str(heartbeat))
    schedule_messages([{"topic": "t.effect"}] * 50)
    wait_until_all(State.CONSUMED, 50)
    eventually(heartbeat.exists, "the supervisor does its work")
    assert worker.stop() == 0


def test_a_worker_whose_log_gets_no_thread_works_and_writes_it(start: Start, tmp_path: Path) -> None:
    worker = start(prefix=with_settings(tmp_path, NO_THREAD))
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    os.kill(worker.wait_for_children(1)[0], signal.SIGKILL)
    worker.wait_for(r"Worker process \S+ died \(killed by signal 9\)")
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    assert worker.stop() == 0


def test_once_whose_output_nobody_reads_ends(start_into: Callable[..., Worker], pipe: Pipe) -> None:
    pipe.fill()
    message = schedule_message("t.ok")
    assert start_into("--once").wait() == 0
    wait_until(message, State.CONSUMED)
    assert start_into("--once", "--max-tasks-per-child", "5").wait() == 2


def test_a_log_that_is_read_again_tells_how_many_lines_are_missing(
    start_into: Callable[..., Worker], pipe: Pipe, set_pace: Callable[[dict[str, float]], None]
) -> None:
    set_pace({"log_writer.MOST_WAITING": 20})
    worker = start_into("-v", "2")
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    pipe.fill()
    schedule_messages([{"topic": "t.ok"}] * 300)
    wait_until_all(State.CONSUMED, 301)
    told = r"WARNING .* (\d+) lines are missing here"
    eventually(lambda: re.search(told, pipe.read()), "the log says so")
    missing = sum(map(int, re.findall(told, pipe.read())))
    assert pipe.read().count("message consumed") + missing >= 300
    late = schedule_message("t.ok")
    eventually(lambda: f"message consumed id={late.pk} " in pipe.read(), "the log goes on")
    assert worker.stop() == 0
    assert "Stopped: all worker processes have ended" in pipe.read()


@pytest.fixture
def dead_relay() -> Iterator[int]:
    """The port of a mail server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def full_syslog(tmp_path: Path) -> Iterator[Path]:
    """A syslog that reads nothing."""
    path = tmp_path / "syslog"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full,
    ):
        bound.bind(str(path))
        full.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.sendto(b".", str(path))
        yield path


@pytest.mark.parametrize(
    ("handler", "level"),
    [
        ("Blocking()", "DEBUG"),
        ("Ending()", "DEBUG"),
        ("AdminEmailHandler()", "INFO"),
        ("logging.handlers.SysLogHandler('{syslog}')", "INFO"),
    ],
    ids=["blocks", "exits", "mails", "syslog"],
)
def test_a_handler_of_the_log_that_blocks_or_exits_holds_up_no_worker(
    start: Start, tmp_path: Path, gate: Gate, dead_relay: int, full_syslog: Path, handler: str, level: str
) -> None:
    worker = start(
        prefix=with_settings(
            tmp_path,
            LOGGING.format(
                handler=handler.format(syslog=full_syslog),
                logger="django_delayq",
                level=level,
                port=dead_relay,
                debug=False,
            ),
        )
    )
    held = gate.running("t.short_lease")
    deliver_all_kinds(worker, start, gate, held)
    assert worker.stop() == 0


def test_what_a_library_logs_of_the_work_of_a_worker_does_not_hold_it_up(start: Start, tmp_path: Path) -> None:
    settings = LOGGING.format(handler="Blocking()", logger="django.db.backends", level="DEBUG", port=0, debug=True)
    worker = start(prefix=with_settings(tmp_path, settings))
    schedule_messages([{"topic": "t.ok"}] * 50)
    wait_until_all(State.CONSUMED, 50)
    assert worker.stop() == 0


HOLDING = """
from django.apps import AppConfig

from django_delayq import extensions
from django_delayq.extensions import WorkerExtension


class Holding(WorkerExtension):
    def consumed(self, messages):
        threading.Event().wait()


class HoldingConfig(AppConfig):
    name = "holding"

    def ready(self):
        extensions.add_to_workers(Holding)
"""


def test_a_process_whose_recorder_is_held_up_looks_dead_and_is_replaced(
    start: Start, tmp_path: Path, set_pace: Callable[[dict[str, float]], None]
) -> None:
    longest = max(handler.lease for handler in registry.handlers().values())
    set_pace(
        {
            "process.Parts.run_tuning.hangs_after": 1.0,
            "process.Parts.upkeep.heartbeat_interval": 0.2,
            "supervisor.USUAL.stale_after": 1.0,
            "supervisor.USUAL.hung_after": 4.0 - 2 * (longest + 1),
        }
    )
    (tmp_path / "holding").mkdir()
    (tmp_path / "holding" / "__init__.py").write_text("")
    (tmp_path / "holding" / "apps.py").write_text(f"import threading\n{HOLDING}")
    prefix = with_settings(tmp_path, 'INSTALLED_APPS = [*INSTALLED_APPS, "holding"]')
    heartbeat = tmp_path / "alive"
    worker = start("--heartbeat-file", str(heartbeat), "--graceful-timeout", "1", prefix=prefix)
    eventually(heartbeat.exists, "it lives")
    wait_until(schedule_message("t.ok"), State.CONSUMED)

    def silent() -> bool:
        seen = Heard.objects.filter(seen_at__gt=reads.now("default") - timedelta(seconds=1))
        return heartbeat.stat().st_mtime < time.time() - 1 and not seen.exists()

    eventually(silent, "neither the file nor the row of the worker shows life")
    worker.wait_for("has shown no life")
    wait_until(schedule_message("t.reject"), State.DEAD)
