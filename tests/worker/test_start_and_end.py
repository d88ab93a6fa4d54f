"""A worker begins with functions of the project, and ends in order at the first signal, at once at the second."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis

from django_delayq import schedule_message, schedule_messages, worker_started
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import process_start
from django_delayq.worker.claim.tuning import Tuning
from testproject.cleaner import family, send
from testproject.servers import PostgresServer
from tests.app.models import Effect
from tests.support.processes import Gate, Start
from tests.support.record_of import log_of, states, wait_until, wait_until_all
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


LOST = "These threads .* do not run in the worker processes"


def lines(folder: Path) -> list[list[str]]:
    """Return the lines that the listener of each process has written."""
    return [path.read_text().splitlines() for path in folder.glob("log-*")]


@pytest.mark.parametrize(
    "arguments",
    [["--max-messages", "2"], ["--once"], ["--max-messages", "2", "--reload"]],
    ids=["worker", "once", "reload"],
)
def test_functions_begin_before_the_first_message_and_end_after_the_last(
    start: Start, tmp_path: Path, arguments: list[str]
) -> None:
    message, on_loop = schedule_message("t.started", 1), schedule_message("t.started_async")
    worker = start(*arguments, prefix=f"env DELAYQ_TEST_STARTED={tmp_path}")
    wait_until(message, State.CONSUMED)
    wait_until(on_loop, State.CONSUMED)
    if "--reload" in arguments:
        eventually(lambda: "has listened" in str(lines(tmp_path)), "the functions have ended")
    else:
        assert worker.wait() == 0
    assert lines(tmp_path) == [["listens", "has counted", "message 1", "has disconnected", "has listened"]]
    assert Effect.objects.get(message_id=on_loop.pk).note == "of delayq-event-loop"
    # One of the project's threads was started too early, which is told before the first fork.
    is_forked = arguments == ["--max-messages", "2"]
    assert worker.count(LOST) == worker.count(f"{LOST}: early-bird") == is_forked


def test_each_process_has_functions_of_its_own(start: Start, tmp_path: Path) -> None:
    worker = start("--processes", "2", prefix=f"env DELAYQ_TEST_STARTED={tmp_path}")
    eventually(lambda: [log[:2] for log in lines(tmp_path)] == [["listens", "has counted"]] * 2, "both begin")
    worker.stop()
    assert [log[-1] for log in lines(tmp_path)] == ["has listened"] * 2


@pytest.mark.parametrize(
    ("fails", "words"), [("sync", "the project cannot start"), ("async", "the project cannot connect")]
)
@pytest.mark.parametrize("arguments", [[], ["--once"]], ids=["worker", "once"])
def test_a_function_that_fails_ends_its_process_and_costs_no_message_an_attempt(
    start: Start, tmp_path: Path, fails: str, words: str, arguments: list[str]
) -> None:
    message = schedule_message("t.started_async")
    given = f"env DELAYQ_TEST_STARTED={tmp_path} DELAYQ_TEST_STARTED_FAILS={fails}"
    worker = start(*arguments, prefix=given)
    worker.wait_for(f"RuntimeError: {words}")
    if arguments:
        assert worker.wait() == 1
    else:
        worker.wait_for(r"died \(exit code 1\)")
        worker.stop()
    assert [move.to_state for move in log_of(message)] == [State.SCHEDULED]


@pytest.mark.parametrize("function", [print, lambda message: None, type], ids=["built-in", "argument", "class"])
def test_what_cannot_be_called_without_arguments_is_refused(function: object) -> None:
    with pytest.raises(TypeError, match=r"@worker_started decorates a function|cannot be called without arguments"):
        worker_started(function)  # type: ignore[type-var]


@pytest.mark.parametrize("kind", ["async", "yields", "context", "async context"])
def test_a_decorator_that_hides_what_a_function_is_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits() -> None: ...

    def yields() -> Iterator[None]:
        yield

    async def yields_too() -> AsyncIterator[None]:
        yield

    hidden: dict[str, Callable[[], object]] = {"async": waits, "yields": yields}
    hidden |= {"context": contextmanager(yields), "async context": asynccontextmanager(yields_too)}
    monkeypatch.setattr(process_start, "functions", {})

    @worker_started
    def hides() -> object:
        return hidden[kind]()

    with pytest.raises(TypeError, match="nobody runs; put @worker_started below"), process_start.in_process():
        pass


# --- --reload ---------------------------------------------------------------------------------------------------------


SETTINGS = """
from tests.support.worker_settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "edited"]
LOGGING["loggers"]["django.utils.autoreload"] = {"handlers": ["console"], "level": "DEBUG"}
"""
# Django's reloader compares with what it saw first: it overlooks what is saved between the import and this line.
WATCHED = r"File \S+/edited/handlers\.py first seen"
HANDLERS = """
from django_delayq import handler

print("loaded {version}", flush=True)

@handler("t.edited{version}")
def edited(message):
    pass
"""


def test_code_that_cannot_be_loaded_ends_nothing(start: Start, tmp_path: Path) -> None:
    app = tmp_path / "edited"
    app.mkdir()
    (app / "__init__.py").touch()
    (tmp_path / "edited_settings.py").write_text(SETTINGS)

    def save(text: str) -> None:
        """Write the handlers as an editor does: at once, and with a time of their own."""
        draft = app / "draft"
        draft.write_text(text)
        draft.replace(app / "handlers.py")

    save(HANDLERS.format(version=1))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    worker = start(
        "--reload", prefix=f"env PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 DJANGO_SETTINGS_MODULE=edited_settings"
    )
    wait_until(schedule_message("t.edited1"), State.CONSUMED)
    worker.wait_for(WATCHED)
    save("this is no Python")
    worker.wait_for("SyntaxError")
    worker.wait_for("starts again when code changes")
    save(HANDLERS.format(version=2))
    wait_until(schedule_message("t.edited2"), State.CONSUMED)
    assert worker.process.poll() is None
    worker.send(signal.SIGTERM)
    worker.wait()


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_the_first_signal_lets_the_running_handlers_finish_and_leaves_wake_ups_to_others(
    start: Start, gate: Gate, redis_client: redis.Redis, number: str
) -> None:
    def listens() -> bool:
        return bool(redis_client.info("clients")["blocked_clients"])

    worker = start("--threads", "2")
    running = [gate.running("t.gate"), gate.running("t.gate_async")]
    eventually(listens, "the worker listens")
    worker.send(signal.Signals[number])
    # By itself the call that listens would end after this time.
    eventually(lambda: not listens(), "the worker listens no more", timeout=Tuning().idle_wait / 2)
    worker.wait_for("takes no more messages")
    waiting = schedule_message("t.effect")
    gate.open()
    assert worker.wait() == 0
    assert "handlers finished: 2, not ended: 0; deliveries released unstarted: 0" in worker.log
    assert "Stopped: all worker processes have ended, and their claims are released" in worker.log
    assert worker.count(LOST) == 0
    for message, fate in [(running[0], State.CONSUMED), (running[1], State.CONSUMED), (waiting, State.SCHEDULED)]:
        message.refresh_from_db()
        assert (message.state, message.deliveries, message.attempts) == (fate, int(fate == State.CONSUMED), 0)


def test_a_worker_that_ends_leaves_its_load_of_redis_to_others(
    start: Start,
    redis_client: redis.Redis,
    set_pace: Callable[[dict[str, float]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_pace({"process.Parts.upkeep.pages_per_tick": 1})
    schedule_messages({"topic": "t.ok", "delay": "5m"} for _ in range(6000))
    redis_client.flushall()
    # It is told to end between two pages, of which the rest would take four seconds more.
    monkeypatch.setenv("DELAYQ_FAILPOINTS", ",".join(f"mid_load:delay=1:{page}" for page in range(2, 7)))
    worker = start()
    worker.wait_for("Failpoint mid_load")
    assert redis_client.hexists("{delayq}:meta", "loader")
    worker.stop()
    assert not worker.count("Loaded Redis")
    assert not redis_client.hexists("{delayq}:meta", "loader")


@pytest.mark.parametrize(
    ("number", "second"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)],
    ids=["timeout", "second SIGTERM", "second SIGINT"],
)
def test_after_the_graceful_timeout_or_the_second_signal_the_rest_is_given_back_at_no_cost(
    start: Start, gate: Gate, number: signal.Signals, second: bool
) -> None:
    worker = start("--threads", "2", "--graceful-timeout", "1h" if second else "0.3s")
    messages = [gate.running(), gate.running()]
    worker.send(number)
    if second:
        worker.wait_for("Stopping")
        worker.send(number)
    assert worker.wait() == 0
    assert second or "handlers finished: 0, not ended: 2; deliveries released unstarted: 0" in worker.log
    for message in messages:
        message.refresh_from_db()
        assert (message.state, message.attempts, message.deliveries) == (State.SCHEDULED, 0, 1)
        assert (message.crashes, log_of(message)[-1].reason) == (0, "worker was shut down")


def test_claims_that_have_not_begun_are_given_back_at_once(
    start: Start, gate: Gate, set_pace: Callable[[dict[str, float]], None]
) -> None:
    # What is claimed ahead waits behind the gate until the signal comes.
    set_pace({"process.Parts.run_tuning.longest_queued": 90.0})
    worker = start("--threads", "1")
    # After quick handlers a worker claims more than it can run at once.
    for _ in range(60):
        schedule_message("t.ok")
    wait_until_all(State.CONSUMED, 60)
    gates = [schedule_message("t.gate", gate.payload, priority=100)]
    eventually(lambda: gate.begun(gates[0].pk), "the handler begins")
    waiting = [schedule_message("t.effect") for _ in range(5)]
    eventually(lambda: states()[State.RUNNING] > 1, "something is claimed ahead")
    worker.send(signal.SIGTERM)
    eventually(lambda: states()[State.RUNNING] == 1, "what has not begun is given back while the other still runs")
    gate.open()
    assert worker.wait() == 0
    assert states() == {State.CONSUMED: 61, State.SCHEDULED: 5}
    for message in Message.objects.filter(pk__in=[m.pk for m in waiting]):
        assert (message.attempts, message.crashes) == (0, 0)
    released = Message.objects.filter(pk__in=[m.pk for m in waiting], deliveries=1)
    assert f"handlers finished: 1, not ended: 0; deliveries released unstarted: {released.count()}" in worker.log
    assert {log_of(message)[-1].reason for message in released} == {"shutdown"}


@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_to_the_whole_group_ends_it_in_order(start: Start, gate: Gate, number: str) -> None:
    worker = start("--processes", "2")
    worker.wait_for_children(2)
    message = gate.running()
    worker.send_all(signal.Signals[number])
    worker.wait_for("Stopping")
    gate.open()
    assert worker.wait() == 0
    assert "Traceback" not in worker.log
    wait_until(message, State.CONSUMED)


@pytest.mark.parametrize(
    ("number", "second"), [("SIGTERM", True), ("SIGINT", True), ("SIGHUP", False), ("SIGQUIT", False)]
)
def test_once_ends_in_order_at_the_first_signal_and_at_once_at_the_second(
    start: Start, gate: Gate, number: str, second: bool
) -> None:
    running = schedule_message("t.gate", gate.payload)
    worker = start("--once", "--threads", "1", "--graceful-timeout", "1h")
    eventually(lambda: gate.begun(running.pk), "the handler begins")
    worker.send(signal.Signals[number])
    worker.wait_for("takes no more messages")
    if second:
        worker.send(signal.Signals[number])
        assert worker.wait() == -signal.Signals[number]
    else:
        gate.open()
        assert worker.wait() == 0
        assert worker.lines[-1] == "1 delivered"


def test_a_worker_that_ignores_the_end_of_its_terminal_goes_on(start: Start) -> None:
    worker = start(prefix="nohup")
    worker.wait_for_children(1)
    worker.send_all(signal.SIGHUP)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert worker.count("died") == 0


def test_a_signal_during_the_start_is_not_lost(start: Start) -> None:
    worker = start("--processes", "2")
    # The first child exists and is still importing; the second does not exist yet.
    eventually(lambda: worker.children, "a child")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_children_without_a_supervisor_end_by_themselves_and_lose_nothing(start: Start, gate: Gate) -> None:
    worker = start("--graceful-timeout", "20")
    message = gate.running()
    worker.send(signal.SIGKILL)
    worker.wait_for("supervisor is gone")
    gate.open()
    wait_until(message, State.CONSUMED)


@pytest.fixture
def start_as_pid_1(start: Start) -> Callable[[], Worker]:
    try:
        subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs unshare and the right to make a PID namespace")
    return lambda: start(prefix="unshare -pf --mount-proc --kill-child")


def test_a_signal_ends_a_worker_that_begins_as_pid_1(
    start_as_pid_1: Callable[[], Worker], postgres_server: PostgresServer
) -> None:
    postgres_server.freeze()
    worker = start_as_pid_1()
    eventually(lambda: len(family(worker.pid)) > 1 and _catches(family(worker.pid)[1], signal.SIGTERM), "it begins")
    send(family(worker.pid)[1], signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def test_a_worker_works_as_pid_1(start_as_pid_1: Callable[[], Worker], gate: Gate) -> None:
    worker = start_as_pid_1()
    worker.wait_for(r"pid 1$")
    message = gate.running()
    first = family(worker.pid)[1]
    send(first, signal.SIGTERM)
    worker.wait_for("Stopping")
    gate.open()
    assert worker.wait() == 0
    wait_until(message, State.CONSUMED)
