"""What a worker logs: the fates of messages, each or counted. One that cannot write its log goes on."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.outcomes import Ack
from django_delayq.core.states import State
from django_delayq.models.messages import Lease
from django_delayq.record import reads
from django_delayq.worker.processes import output
from django_delayq.worker.run import reporting
from django_delayq.worker.run.recorder import Recorder
from django_delayq.worker.run.reporting import OutcomeLog
from tests.support.claims import claimed, state
from tests.support.forks import forked
from tests.support.processes import Gate, Start, with_settings
from tests.support.record_of import states, wait_until, wait_until_all
from tests.support.workers import PATIENCE, Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


logger = logging.getLogger("django_delayq")


RAISING = """
def refuse(record):
    raise LookupError("no such customer")


LOGGING = {
    "version": 1,
    "filters": {"refuse": {"()": lambda: refuse}},
    "loggers": {"django_delayq": {"filters": ["refuse"], "level": "DEBUG"}},
}
"""
EARLY = """
import django_delayq.signals

LOGGING = {
    "version": 1,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}
"""
BLOCKING = """
import logging
import time
from pathlib import Path


class Blocking(logging.StreamHandler):
    def emit(self, record):
        if getattr(record, "delayq_event", "") == "dead":
            Path("{folder}", "blocks").touch()
            while not Path("{folder}", "free").exists():
                time.sleep(0.01)
        super().emit(record)


LOGGING = {{
    "version": 1,
    "handlers": {{"blocking": {{"()": lambda: Blocking()}}}},
    "loggers": {{"django_delayq": {{"handlers": ["blocking"], "level": "ERROR"}}}},
}}
"""
CONSUMED = r"INFO .*message consumed id=\d+ topic=t\.ok delivery=1 lateness_ms=\d+\.\d runtime_ms=\d+\.\d$"


def counted(log: str, queue: str) -> dict[str, int]:
    """Return what the lines about a queue count, all together."""
    found: dict[str, int] = {}
    for said in re.findall(rf"queue {queue}: (.*) in .*", log):
        for number, outcome in re.findall(r"(\d[\d,]*) (\w+)", said):
            found[outcome] = found.get(outcome, 0) + int(number.replace(",", ""))
    return found


def test_a_worker_counts_what_it_delivers_by_queue_and_has_no_line_for_each(
    start: Start, set_pace: Callable[[dict[str, float]], None]
) -> None:
    set_pace({"process.Parts.run_tuning.counts_interval": 0.2})
    worker = start("--threads", "2")
    schedule_messages([{"topic": "t.ok"}] * 30)
    schedule_messages([{"topic": "t.ok", "queue": "mail"}] * 2)
    schedule_message("t.reject", queue="mail")
    eventually(lambda: states() == {State.CONSUMED: 32, State.DEAD: 1}, "all are delivered")
    worker.wait_for("queue mail: .* dead")
    assert worker.stop() == 0
    assert counted(worker.log, "default") == {"consumed": 30}
    assert counted(worker.log, "mail") == {"consumed": 2, "dead": 1}
    assert worker.count("message consumed") == 0
    assert worker.count("message dead") == 1


@pytest.mark.parametrize("more", [(), ("--once",)])
def test_verbosity_2_brings_a_line_for_each_message_before_the_worker_ends(start: Start, more: tuple[str, ...]) -> None:
    schedule_messages([{"topic": "t.ok"}] * 300)
    worker = start("-v", "2", *more)
    wait_until_all(State.CONSUMED, 300)
    assert (worker.wait() if more else worker.stop()) == 0
    assert worker.count(CONSUMED) == 300
    assert counted(worker.log, "default") == {"consumed": 300}


@pytest.mark.parametrize(("verbosity", "consumed", "delivered"), [("0", 0, 0), ("2", 1, 0), ("3", 1, 1)])
def test_without_logging_of_the_project_the_verbosity_decides_what_is_printed(
    start: Start, tmp_path: Path, verbosity: str, consumed: int, delivered: int
) -> None:
    schedule_messages([{"topic": "t.ok"}, {"topic": "t.reject"}])
    worker = start("--once", "-v", verbosity, prefix=with_settings(tmp_path, "LOGGING = {}"))
    assert worker.wait() == 0
    assert states() == {State.CONSUMED: 1, State.DEAD: 1}
    assert (worker.count("message consumed"), worker.count("message delivered .*t.ok")) == (consumed, delivered)
    assert verbosity != "0" or worker.log == ""


def test_a_log_that_settings_have_used_too_early_is_written(start: Start, tmp_path: Path) -> None:
    """Unless it is told otherwise, logging disables each logger that it meets and that the project does not name."""
    schedule_messages([{"topic": "t.ok"}, {"topic": "t.reject"}])
    worker = start("--once", prefix=with_settings(tmp_path, EARLY))
    assert worker.wait() == 0
    assert worker.count("^message dead .* topic=t.reject") == 1


def consume(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Have a recorder write the success of a message, and end. Return the events that it logged."""
    (one,) = claimed("t.ok")
    recorder.submit(one, Ack(), "worker:w")
    assert recorder.flush(PATIENCE)
    recorder.stop()
    recorder.join(PATIENCE)
    assert state(one) == State.CONSUMED
    return [getattr(record, "delayq_event", "") for record in caplog.records]


@pytest.mark.parametrize(
    ("level", "verbose", "events"),
    [
        ("INFO", False, ["counted"]),
        ("DEBUG", False, ["consumed", "counted"]),
        ("INFO", True, ["consumed", "counted"]),
        ("WARNING", True, []),
    ],
)
def test_the_level_of_the_project_decides_what_is_logged(
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    level: str,
    verbose: bool,
    events: list[str],
) -> None:
    reporting.be_verbose(on=verbose)
    caplog.set_level(level, "django_delayq")
    try:
        assert consume(recorder, caplog) == events
    finally:
        reporting.be_verbose(on=False)


def test_a_log_that_raises_for_every_line_ends_no_thread(start: Start, tmp_path: Path) -> None:
    schedule_message("t.dirty", "atomic")
    schedule_messages([{"topic": topic} for topic in ("t.ok", "t.reject", "t.async")])
    worker = start("--threads", "1", prefix=with_settings(tmp_path, RAISING))
    eventually(lambda: states() == {State.CONSUMED: 3, State.DEAD: 1}, "all are delivered")
    assert worker.stop() == 0
    assert "LookupError: no such customer" in worker.log


def test_a_log_that_blocks_for_a_failure_costs_no_lease(start: Start, tmp_path: Path, gate: Gate) -> None:
    worker = start(prefix=with_settings(tmp_path, BLOCKING.format(folder=tmp_path)))
    running = gate.running("t.short_lease")
    schedule_message("t.reject")
    eventually((tmp_path / "blocks").exists, "the log blocks")
    much_later = reads.now("default") + timedelta(seconds=4)
    renewed = Lease.objects.filter(message_id=running.pk, until__gt=much_later)
    eventually(lambda: renewed.exists() or wait_until(running, State.RUNNING).deliveries > 1, "the lease is renewed")
    (tmp_path / "free").touch()
    gate.open()
    assert wait_until(running, State.CONSUMED).deliveries == 1
    assert worker.stop() == 0
    assert worker.count("^message dead .* topic=t.reject") == 1


def test_the_counts_begin_anew_with_each_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "django_delayq")
    log = OutcomeLog(interval=7.0)
    log.count("mail", "released")
    log.count("mail", "consumed", 2000)
    for _ in range(2):
        assert log.tick() == 7.0
    log.count("mail", "dead")
    assert log.tick() == 7.0
    assert [re.sub("in .*", "", record.getMessage()) for record in caplog.records] == [
        "queue mail: 2,000 consumed, 1 released ",
        "queue mail: 1 dead ",
    ]


# --- a log that nobody reads any more, or that cannot be written ------------------------------------------------------


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


def test_a_worker_that_cannot_write_its_log_replaces_dead_processes_and_ends_in_order(
    start_mute: Callable[..., Worker],
) -> None:
    worker = start_mute()
    (first,) = worker.wait_for_children(1)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    os.kill(first, signal.SIGKILL)
    worker.wait_for_children(1, other_than=[first])
    wait_until(schedule_message("t.reject"), State.DEAD)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_once_that_cannot_write_what_it_says_ends_with_the_code_for_it(start_mute: Callable[..., Worker]) -> None:
    rejected, delivered = schedule_message("t.reject"), schedule_message("t.ok")
    assert start_mute("--once").wait() == 0
    wait_until(rejected, State.DEAD)
    wait_until(delivered, State.CONSUMED)
    assert start_mute("--once", "--max-tasks-per-child", "5").wait() == 2


def test_no_connection_gets_the_number_of_a_closed_stream() -> None:
    """A library that writes an error there would write it to a server; and libuv ends a process that closes it."""

    def hand_out() -> bool:
        for number in (1, 2):
            os.close(number)
        output.occupy_closed()
        nowhere = os.stat(os.devnull)
        are_occupied = all(os.path.samestat(os.fstat(number), nowhere) for number in (1, 2))
        return are_occupied and min(os.pipe()) > 2

    with forked(hand_out):
        pass
