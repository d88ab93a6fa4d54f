"""A worker in the test's own process, and in processes of hosts: a script, one without ``fork`` and POSIX signals."""

from __future__ import annotations

import asyncio
import atexit
import errno
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction

from django_delayq import RetryLater, handler, schedule_message, worker_started
from django_delayq.core.states import State
from django_delayq.embedded import EmbeddedWorker
from django_delayq.models import Message
from django_delayq.models import Worker as WorkerRow
from django_delayq.project import process_start
from django_delayq.project.registry import Delivered
from django_delayq.recurring import create_schedule
from django_delayq.worker.processes.process import Parts
from tests.app.models import Effect
from tests.docs.blocks import DOCS, blocks
from tests.support.forks import forked
from tests.support.processes import Configure, Gate, Start
from tests.support.record_of import log_of, path_of, wait_until, wait_until_all
from tests.support.refused_threads import refused
from tests.support.workers import ROOT, Worker, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("configure")]
BOTH = pytest.mark.usefixtures("timed_by")


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """Ask after each test whether a thread of its workers is left."""
    others = set(threading.enumerate())
    yield
    eventually(lambda: others.issuperset(threads_of_workers()), f"all threads end: {threads_of_workers()}")


def threads_of_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("delayq-")]


# --- what it delivers -------------------------------------------------------------------------------------------------


@BOTH
def test_messages_are_delivered_at_their_due_times_as_by_a_worker() -> None:
    with EmbeddedWorker(threads=2) as worker:
        assert worker.is_alive
        messages = [schedule_message("t.effect", delay=delay) for delay in ("0s", "0.3s")]
        for message in messages:
            wait_until(message, State.CONSUMED)
            assert path_of(message) == ["scheduled", "running", "consumed"]
            assert log_of(message)[-1].actor.startswith(f"worker:{worker.name}/")
        eventually(lambda: [row.name for row in WorkerRow.objects.all()] == [worker.name], "its row is there")
    assert not WorkerRow.objects.exists()
    assert Effect.objects.count() == 2


@BOTH
def test_each_kind_of_handler_runs() -> None:
    ran: list[str] = []

    @handler("e.async", limit=1)
    async def on_loop(message: Delivered) -> None:
        await asyncio.sleep(0)
        await Message.objects.aget(pk=message.id)
        ran.append(threading.current_thread().name)

    @handler("e.again", retry=["0.05s"])
    def again(message: Delivered) -> None:
        if message.attempt == 1:
            raise RuntimeError("not yet")
        raise RetryLater("0.05s", counts=False) if message.deliveries == 2 else SystemExit("a handler ends no host")

    with EmbeddedWorker():
        messages = [schedule_message(topic, key="k") for topic in ("e.async", "t.tx", "e.again")]
        schedule_message("e.async")
        eventually(lambda: Message.objects.filter(state=State.CONSUMED).count() == 3)
        assert ran == ["delayq-event-loop"] * 2
        wait_until(messages[2], State.DEAD)
        assert path_of(messages[2]).count("running") == 3


def test_a_schedule_makes_its_messages() -> None:
    create_schedule("each-second", "t.ok", every="1s")
    with EmbeddedWorker():
        eventually(lambda: Message.objects.filter(topic="t.ok", state=State.CONSUMED).exists())


def test_only_the_queues_that_were_asked_for_are_served() -> None:
    with EmbeddedWorker(queues={"a": 3, "b": 1}):
        served = [schedule_message("t.ok", queue=queue) for queue in "ab"]
        other = schedule_message("t.ok", queue="c")
        for message in served:
            wait_until(message, State.CONSUMED)
        other.refresh_from_db()
        assert other.state == State.SCHEDULED


def test_two_workers_of_one_process_share_the_work(gate: Gate) -> None:
    with EmbeddedWorker(threads=1, name="one"), EmbeddedWorker(threads=1, name="two"):
        both = [gate.running() for _ in range(2)]
        gate.open()
        actors = {log_of(wait_until(message, State.CONSUMED))[-1].actor.split("/")[0] for message in both}
    assert actors == {"worker:one", "worker:two"}


def test_one_of_two_workers_ends_and_the_other_one_goes_on_with_its_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_delayq")
    with ExitStack() as stack:
        first = stack.enter_context(EmbeddedWorker(threads=1))
        second = stack.enter_context(EmbeddedWorker(threads=1))
        assert first.stop()
        assert "delayq-log" in {thread.name for thread in threads_of_workers()}
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        assert second.is_alive
    assert caplog.text.count("has ended; handlers finished") == 2


def test_a_worker_of_the_command_works_beside_it(start: Start, gate: Gate) -> None:
    start("--threads", "1").wait_for("delayq")
    with EmbeddedWorker(threads=1, name="embedded"):
        both = [gate.running() for _ in range(2)]
        gate.open()
        wait_until_all(State.CONSUMED, 2)
    assert sum("worker:embedded/" in log_of(message)[-1].actor for message in both) == 1


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_it_says_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_delayq")
    with EmbeddedWorker(threads=1):
        pass
    assert "It has no supervisor" in caplog.text
    assert "In production, use run_delayq" in caplog.text


def test_a_second_start_is_an_error_and_one_after_the_end_is_none() -> None:
    worker = EmbeddedWorker(threads=1)
    assert worker.stop()
    assert worker.name is None
    for _ in range(2):
        with worker, pytest.raises(RuntimeError, match="runs already"):
            worker.start()
        assert worker.stop()
        assert not worker.is_alive


def test_an_exception_in_the_block_ends_the_worker_and_goes_on() -> None:
    with pytest.raises(ZeroDivisionError), EmbeddedWorker(threads=1) as worker:
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        1 / 0  # noqa: B018
    assert not worker.is_alive


def test_async_code_starts_and_ends_it() -> None:
    async def serve() -> None:
        async with EmbeddedWorker(threads=1) as worker:
            assert worker.is_alive
            message = await Message.objects.aget(pk=pk)
            while message.state != State.CONSUMED:
                await asyncio.sleep(0.01)
                await message.arefresh_from_db()
        # asgiref's thread has a connection of its own.
        await sync_to_async(connections.close_all)()

    pk = schedule_message("t.ok").pk
    asyncio.run(serve())


def test_handlers_that_run_may_finish(gate: Gate) -> None:
    with EmbeddedWorker(threads=1) as worker:
        running = gate.running()
        waiting = schedule_message("t.ok")
        ending = threading.Thread(target=worker.stop)
        ending.start()
        eventually(lambda: not worker._process or worker._process.pool.threads._is_releasing, "it ends")
        gate.open()
        ending.join()
    wait_until(running, State.CONSUMED)
    waiting.refresh_from_db()
    assert waiting.state == State.SCHEDULED


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_may_end_its_worker(is_async: bool) -> None:
    answers: list[bool] = []

    def end(message: Delivered) -> None:
        answers.append(worker.stop())

    async def end_on_loop(message: Delivered) -> None:
        answers.append(worker.stop())

    handler("e.end")(end_on_loop if is_async else end)
    with EmbeddedWorker(threads=1, graceful_timeout=5) as worker:
        message = wait_until(schedule_message("e.end"), State.CONSUMED)
        eventually(lambda: not worker.is_alive, "it ends")
    assert (answers, path_of(message)) == ([False], ["scheduled", "running", "consumed"])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_ends_another_worker_and_waits_for_it(is_async: bool) -> None:
    answers: list[bool] = []

    def end(message: Delivered) -> None:
        answers.append(other.stop())

    async def end_from_loop(message: Delivered) -> None:
        await sync_to_async(end)(message)

    handler("e.end", queue="ends")(end_from_loop if is_async else end)
    with EmbeddedWorker(threads=1, queues=["other"]) as other, EmbeddedWorker(threads=1, queues=["ends"]):
        wait_until(schedule_message("e.end"), State.CONSUMED)
        assert (answers, other.is_alive) == ([True], False)


def test_a_sync_call_of_an_async_handler_may_end_its_worker() -> None:
    answers: list[bool] = []

    @handler("e.end")
    async def end(message: Delivered) -> None:
        answers.append(await sync_to_async(worker.stop)())
        answers.append(await asyncio.to_thread(worker.stop))
        answers.append(await asyncio.get_running_loop().run_in_executor(None, worker.stop))

    with EmbeddedWorker(threads=1) as worker:
        message = wait_until(schedule_message("e.end"), State.CONSUMED)
    assert (answers, path_of(message)) == ([False] * 3, ["scheduled", "running", "consumed"])


def test_an_async_handler_that_does_not_finish_is_released() -> None:
    begun = threading.Event()

    @handler("e.endless")
    async def endless(message: Delivered) -> None:
        begun.set()
        await asyncio.Event().wait()

    message = schedule_message("e.endless")
    with EmbeddedWorker(threads=1, graceful_timeout=0) as worker:
        assert begun.wait(60)
        assert worker.stop()
    assert path_of(message) == ["scheduled", "running", "scheduled"]
    assert log_of(message)[-1].reason == "shutdown"


def test_a_sync_handler_that_does_not_finish_keeps_its_message(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedWorker(threads=1, graceful_timeout=0) as worker:
        running = gate.running()
        assert not worker.stop()
    running.refresh_from_db()
    assert running.state == State.RUNNING
    assert f"of message {running.pk}, topic t.gate" in caplog.text
    gate.open()
    # This process ends without a database.
    assert worker._process is not None
    atexit.unregister(worker._process.end_with_interpreter)


@pytest.mark.parametrize("fails", ["sync", "async"])
def test_a_function_of_the_project_that_fails_fails_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setattr(process_start, "functions", {})

    @handler("e.async")
    async def on_loop(message: Delivered) -> None:
        pass

    def begin() -> None:
        raise RuntimeError("the project cannot start")

    async def abegin() -> None:
        raise RuntimeError("the project cannot start")

    worker_started(begin if fails == "sync" else abegin)
    worker = EmbeddedWorker(threads=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the project cannot start"):
            worker.start()
        assert not worker.is_alive
    assert "Receivers did not end" not in caplog.text
    process_start.functions.clear()
    with worker:
        wait_until(schedule_message("e.async"), State.CONSUMED)


def test_an_event_loop_that_cannot_be_made_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    @handler("e.async")
    async def on_loop(message: Delivered) -> None:
        pass

    def refuse() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    worker = EmbeddedWorker(threads=2)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "uvloop", None)
        patch.setattr(asyncio, "new_event_loop", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            worker.start()
    with worker:
        wait_until(schedule_message("e.async"), State.CONSUMED)


REFUSED = ["signals", "recorder", "due-timer", "handler-1", "event-loop", "upkeep", "timeout-watch", "consumer"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_thread_that_the_system_refuses_leaves_no_half_of_a_worker(name: str) -> None:
    @handler("e.async")
    async def on_loop(message: Delivered) -> None:
        pass

    worker, others = EmbeddedWorker(threads=2), set(threads_of_workers())
    with refused(f"delayq-{name}"), pytest.raises(RuntimeError, match="can't start new thread"):
        worker.start()
    eventually(lambda: others.issuperset(threads_of_workers()), "no thread is left")
    with worker:
        wait_until(schedule_message("e.async"), State.CONSUMED)


def test_a_worker_whose_log_gets_no_thread_works() -> None:
    with refused("delayq-log"), EmbeddedWorker(threads=1):
        wait_until(schedule_message("t.ok"), State.CONSUMED)


def test_functions_of_the_project_run_around_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_start, "functions", {})
    order: list[str] = []

    @worker_started
    def around() -> Iterator[None]:
        order.append("before")
        yield
        order.append("after")

    @handler("e.note")
    def note(message: Delivered) -> None:
        order.append("message")

    with EmbeddedWorker(threads=1):
        wait_until(schedule_message("e.note"), State.CONSUMED)
    assert order == ["before", "message", "after"]


def test_a_handler_that_does_not_end_at_its_timeout_keeps_its_thread_and_no_other(
    monkeypatch: pytest.MonkeyPatch, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Parts.run_tuning, "stuck_after", 0.1)
    told: list[str] = []

    @handler("e.stuck", timeout="0.1s", retry=False)
    def stuck(message: Delivered) -> None:
        while not (gate.folder / "go").exists():
            try:
                time.sleep(0.01)
            except BaseException as error:  # noqa: BLE001
                told.append(type(error).__name__)

    with EmbeddedWorker(threads=2) as worker:
        message = schedule_message("e.stuck")
        eventually(lambda: "does not end at its timeout, and keeps its thread" in caplog.text)
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        assert worker.is_alive
        gate.open()
        wait_until(message, State.CONSUMED)
    assert told == ["HandlerTimeout"]


def test_no_connection_of_the_worker_is_left() -> None:
    @handler("e.sync_call")
    async def call(message: Delivered) -> None:
        await Message.objects.aget(pk=message.id)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with EmbeddedWorker(threads=2):
            for topic in ("t.tx", "t.effect", "e.sync_call"):
                wait_until(schedule_message(topic), State.CONSUMED)
        gc.collect()
    if connection.vendor == "postgresql":
        others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with connection.cursor() as cursor:
            eventually(lambda: not cursor.execute(others).fetchall(), "all connections are closed")


@pytest.mark.postgresql
def test_the_sessions_of_the_process_keep_their_name() -> None:
    names: list[str] = []

    @handler("e.name", transactional=True)
    def ask(message: Delivered) -> None:
        with connection.cursor() as cursor:
            names.append(cursor.execute("SHOW application_name").fetchone()[0])

    with EmbeddedWorker(threads=1) as worker:
        wait_until(schedule_message("e.name"), State.CONSUMED)
        assert worker.name is not None
        assert worker.name not in names[0]


def test_a_process_that_is_forked_has_no_worker() -> None:
    with EmbeddedWorker(threads=1) as worker:

        def look() -> bool:
            return not worker.is_alive and worker.stop()

        with forked(look):
            wait_until(schedule_message("t.ok"), State.CONSUMED)
        assert worker.is_alive


def test_the_heartbeat_file_tells_that_it_lives(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with EmbeddedWorker(threads=1, heartbeat_file=file):
        eventually(file.exists)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threads": 0}, "threads must be a whole number of 1 or more, not 0"),
        ({"threads": True}, "threads must be a whole number"),
        ({"async_concurrency": "9"}, "async_concurrency must be a whole number"),
        ({"graceful_timeout": "soon"}, "graceful_timeout is"),
        ({"queues": "mails"}, r"write \['mails'\]"),
        ({"queues": ["mails", "mails"]}, "each queue once"),
        ({"queues": ["no queue"]}, "queue must"),
        ({"queues": {"mails": 0}}, "the weight of a queue must be a whole number from 1 to 9999"),
        ({"name": "a worker"}, "name must"),
        ({"roles": "consumer"}, r"write \['consumer'\]"),
        ({"roles": ["consumers"]}, "roles must be of loader, .*, not consumers"),
        ({"roles": []}, "roles must be of loader, .*, not none"),
        ({"using": "defautl"}, "no database 'defautl' in DATABASES. Did you mean default?"),
    ],
)
def test_wrong_arguments_fail_at_the_call(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EmbeddedWorker(**arguments)


def test_impossible_settings_fail_at_the_call(configure: Configure) -> None:
    configure(REDIS="nowhere")
    with pytest.raises(ImproperlyConfigured):
        EmbeddedWorker()


def test_it_does_not_start_where_it_would_see_nothing() -> None:
    worker = EmbeddedWorker()
    with transaction.atomic(), pytest.raises(RuntimeError, match="what this transaction has written"):
        worker.start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"NAME": ":memory:", "ENGINE": "django.db.backends.sqlite3"}, "is in memory"),
        ({"OPTIONS": {"pool": True}}, "up to 9 connections, and the pool .* has 4"),
        ({"OPTIONS": {"pool": {"max_size": 8}}}, "has 8"),
    ],
)
def test_it_does_not_start_on_a_database_that_it_cannot_use(options: dict[str, Any], words: str) -> None:
    with own_database("apart", **options):
        worker = EmbeddedWorker(using="apart")
        with pytest.raises(ImproperlyConfigured, match=words):
            worker.start()


class own_database:
    """A further alias, like the default one but for some of its settings."""

    def __init__(self, alias: str, **changes: Any) -> None:
        self.alias, self.changes = alias, changes

    def __enter__(self) -> None:
        connections.settings[self.alias] = {**connections.settings["default"], **self.changes}

    def __exit__(self, *exc_info: object) -> None:
        connections[self.alias].close()
        del connections[self.alias], connections.settings[self.alias]


# --- in processes of hosts --------------------------------------------------------------------------------------------


class Host(Worker):
    """A program with the present settings, and its output so far."""

    def __init__(self, *program: str, **environment: str) -> None:
        """``program`` are the arguments of Python, or its text alone."""
        arguments = program if len(program) > 1 else ("-W", "error", "-W", "ignore::DeprecationWarning", "-c", *program)
        delayq = json.dumps(django_settings.DELAYQ)
        self._start([sys.executable, *arguments], {"DELAYQ_TEST_SETTINGS": delayq, **environment})


SET_UP = """
import logging, os, signal, sys, time
import django
django.setup()
from django_delayq import schedule_message
from django_delayq.models import Message
from django_delayq.embedded import EmbeddedWorker

def wait(message, state="consumed"):
    while message.state != state:
        time.sleep(0.01)
        message.refresh_from_db()
    print(f"{message.topic} {message.state}", flush=True)
"""

NOTEBOOK = f"""{SET_UP}
worker = EmbeddedWorker(threads=2)
worker.start()
try:
    worker.start()
except RuntimeError as error:
    print(f"refused: {{error}}")
for topic in ("t.effect", "t.async"):
    wait(schedule_message(topic, delay="0.1s"))
worker.stop()
with worker:
    wait(schedule_message("t.tx"))
worker.start()
print("the last cell", flush=True)
"""


@BOTH
def test_a_notebook_runs_it_cell_by_cell() -> None:
    with Host(NOTEBOOK) as host:
        assert host.wait() == 0, host.log
        for words in ("refused: This EmbeddedWorker runs already", "t.effect consumed", "t.tx consumed"):
            assert words in host.log
        # It ends with the interpreter, in order, although nobody has stopped it.
        assert host.count("has ended; handlers finished") == 3
    assert "Warning" not in host.log
    assert not WorkerRow.objects.exists()


WITHOUT_TABLES = f"""
from django.conf import settings
settings.DATABASES["default"] = {{"ENGINE": "django.db.backends.sqlite3", "NAME": "FILE"}}
{SET_UP}
EmbeddedWorker().start()
"""


def test_it_does_not_start_without_tables(tmp_path: Path) -> None:
    with Host(WITHOUT_TABLES.replace("FILE", str(tmp_path / "empty"))) as host:
        assert host.wait() == 1
        assert "The tables are missing: run manage.py migrate." in host.log


UNENDING = f"""{SET_UP}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with EmbeddedWorker(threads=1, graceful_timeout="0.1s"):
    print("ready", flush=True)
    time.sleep(100)
"""


def test_what_a_handler_still_holds_is_released_when_its_host_ends(gate: Gate) -> None:
    with Host(UNENDING) as host:
        host.wait_for("^ready")
        running = gate.running()
        host.send(signal.SIGTERM)
        assert host.wait() == 3, host.log
    running.refresh_from_db()
    assert running.state == State.SCHEDULED
    assert running.crashes == 0
    assert log_of(running)[-1].reason == "worker was shut down"


def test_a_message_outlives_a_host_that_was_killed(gate: Gate) -> None:
    with Host(UNENDING) as host:
        host.wait_for("^ready")
        running = gate.running("t.short_lease")
        host.kill()
    gate.open()
    with EmbeddedWorker(threads=1):
        wait_until(running, State.CONSUMED)


OWN_SETTINGS = """
from tests.support.worker_settings import *

INSTALLED_APPS = ["own", *INSTALLED_APPS]
DEBUG = True
"""


def test_runserver_has_a_worker_that_is_replaced_when_code_changes(tmp_path: Path) -> None:
    (command,) = (block.text for block in blocks(DOCS / "howto/embedded.rst") if "inner_run" in block.text)
    folder = tmp_path / "own/management/commands"
    folder.mkdir(parents=True)
    for place in (folder, *folder.parents[:2]):
        (place / "__init__.py").touch()
    (folder / "runserver.py").write_text(command)
    (tmp_path / "own_settings.py").write_text(OWN_SETTINGS)
    path = {"DJANGO_SETTINGS_MODULE": "own_settings", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with Host("-m", "django", "runserver", "127.0.0.1:0", **path) as host:
        first = host.wait_for(r"Embedded worker (\S+) delivers")[1]
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        eventually(lambda: [row.name for row in WorkerRow.objects.all()] == [first], "its row is there")
        (folder / "runserver.py").write_text(f"{command}\n# changed\n")
        host.wait_for(f"{first} has ended; handlers finished: 0")
        eventually(lambda: WorkerRow.objects.exclude(name=first).exists(), "another one is there")
        wait_until(schedule_message("t.ok"), State.CONSUMED)


# What Windows lacks, and waits for sockets alone. The standard library has taken what it needs on this system.
LIKE_WINDOWS = """
import asyncio, concurrent.futures, decimal, getpass, logging.config, multiprocessing, os, random, selectors, signal
import importlib.abc, select, socket, ssl, stat, subprocess, sys, tempfile, uuid
import tests.support.worker_settings

assert not any(name.startswith("django_delayq.worker") for name in sys.modules)

for name in ("fork", "forkpty", "register_at_fork", "set_blocking", "getuid", "geteuid", "killpg", "getpgid", "setsid",
             "sched_getaffinity", "memfd_create", "pread", "pwrite", "sysconf", "WNOHANG", "uname", "nice", "mkfifo"):
    delattr(os, name)
for name in ("SIGHUP", "SIGQUIT", "SIGKILL", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGSTOP",
             "SIGCONT", "SIG_BLOCK", "SIG_SETMASK", "pthread_sigmask", "pthread_kill", "alarm", "pause", "siginterrupt",
             "setitimer"):
    delattr(signal, name)
for name in ("poll", "epoll"):
    delattr(select, name)
for name in ("TCP_KEEPCNT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT", "MSG_DONTWAIT", "SO_REUSEPORT"):
    delattr(socket, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "readline", "uvloop"):
    sys.modules[name] = None

plain_select = select.select
def select_sockets(reading, writing, *rest):
    for file in (*reading, *writing):
        number = file if isinstance(file, int) else file.fileno()
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            raise OSError(10038, "not a socket")
    return plain_select(reading, writing, *rest)
select_sockets.__module__ = "select"
select.select = select_sockets
"""

ON_WINDOWS = f"""{LIKE_WINDOWS}
from django.conf import settings
settings.INSTALLED_APPS.remove("tests.app")
{SET_UP}
from django_delayq import RetryLater, handler
from django.core.management import call_command

@handler("w.tx", transactional=True)
@handler("w.again", retry=["0.1s"])
def handle(message):
    if message.topic == "w.again" and message.attempt == 1:
        raise RuntimeError("not yet")

@handler("w.async", limit=1)
async def handle_async(message):
    await asyncio.sleep(0)

@handler("w.timeout", timeout="0.1s", retry=False)
def outlast(message):
    while True:
        time.sleep(0.01)

with EmbeddedWorker(threads=2) as worker:
    for topic in ("w.tx", "w.again", "w.async"):
        wait(schedule_message(topic, delay="0.1s"))
    wait(schedule_message("w.timeout"), "dead")
    assert worker.is_alive
call_command("delayq_stats")
try:
    call_command("run_delayq")
except Exception as error:
    print(f"refused: {{error}}")
"""


@BOTH
def test_it_runs_without_what_windows_lacks() -> None:
    with Host(ON_WINDOWS) as host:
        assert host.wait() == 0, host.log
    assert host.count("consumed$") == 3
    assert host.count("w.timeout dead$") == 1
    assert "not a socket" not in host.log
    assert "refused: run_delayq needs Linux" in host.log
