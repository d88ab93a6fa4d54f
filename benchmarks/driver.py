"""Starts the servers, the adapters and their workers, and reads the marks of handled messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis
from psycopg import sql

from testproject.cleaner import PID_FILE, family
from testproject.servers import Server

from .measures import Measures
from .own_servers import servers
from .peers.adapter_process import EFFECTS, MARK, Mark
from .systems import HERE, System

ROOT = HERE.parent
PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "django-delayq-peers"
# The time within which an adapter must answer, and a worker must start.
ANSWER_SECONDS = 300.0
START_SECONDS = 30.0


class Failed(Exception):
    """A system failed in a workload; the message says why."""


class Bench:
    """One Redis and one PostgreSQL for all systems, a database for each, and a directory for logs and marks."""

    def __init__(self, peers: Path) -> None:
        self.peers = peers
        self._prepared: set[str] = set()

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delayq-bench-")))
            self.redis_server, self.postgres = stack.enter_context(servers())
            self.redis = redis.Redis.from_url(self.redis_server.url)
            stack.callback(self.redis.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def url(self, system: System) -> str:
        """The URL of the system's own database."""
        return self.postgres.url.rpartition("/")[0] + f"/bench_{system.name.replace('-', '_')}"

    def sql(self, statement: str, system: System | None = None) -> Any:
        """Execute a statement in the system's database, and return the first value of its first row."""
        url = self.postgres.url if system is None else self.url(system)
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def create_database(self, system: System) -> None:
        name = sql.Identifier(self.url(system).rpartition("/")[2])
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
            connection.execute(sql.SQL("CREATE DATABASE {}").format(name))

    @contextmanager
    def adapter(self, system: System, environment: Mapping[str, str] | None = None) -> Iterator[Adapter]:
        """Start the system's adapter, on empty tables and an empty Redis."""
        first = system.name not in self._prepared
        if first:
            self.create_database(system)
        self.redis.flushall()
        with Adapter(self, system, environment or {}) as adapter:
            if first:
                adapter.call("setup")
                self._prepared.add(system.name)
            adapter.empty()
            # What the last system wrote is no work for this one: neither for the server nor, half a minute later, for
            # the kernel.
            self.sql("CHECKPOINT")
            os.sync()
            yield adapter


class Adapter:
    """The process of a system's adapter, and its workers."""

    def __init__(self, bench: Bench, system: System, environment: Mapping[str, str]) -> None:
        self.bench = bench
        self.system = system
        self.marks = bench.directory / f"{system.name}.marks"
        self.log = bench.directory / f"{system.name}.log"
        self.environment = {
            **os.environ,
            "REDIS_URL": bench.redis_server.url,
            "DATABASE_URL": bench.url(system),
            "BENCH_MARKS": str(self.marks),
            "DEBUG": "0",
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            # Graphile Worker logs each job otherwise. Its own figures are measured without these lines.
            "NO_LOG_SUCCESS": "1",
            **environment,
        }
        if system.kind == "peer":
            for name in ("DJANGO_SETTINGS_MODULE", "PYTHONPATH", "VIRTUAL_ENV"):
                self.environment.pop(name, None)
        if system.is_node:
            self.environment["NODE_PATH"] = str(system.modules(bench.peers))
        self.workers: list[int] = []
        self.directory = HERE / "peers" if system.kind == "peer" else ROOT

    def __enter__(self) -> Adapter:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.system.command(self.bench.peers),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.directory,
                env=self.environment,
            )
        description = self.call("describe")
        self.verbs: list[str] = description["verbs"]
        self.worker_arguments: list[str] | None = description["worker"]
        self.tables: list[str] = description["tables"]
        self.open: str = description["open"]
        if not self.open:
            self.environment["BENCH_COUNT_ALL"] = "1"
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def call(self, verb: str, /, *, timeout: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """Call the adapter. Raises ``Failed`` with its error, or when it does not answer within ``timeout`` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(timeout, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise self.failed(f"the adapter ended in {verb}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{verb}: {answer['error']}")
        return answer["answer"]

    def empty(self) -> None:
        """Empty the tables, Redis and the marks."""
        self.marks.unlink(missing_ok=True)
        self.bench.redis.flushall()
        if self.tables:
            self.bench.sql(f"TRUNCATE {', '.join(self.tables)} CASCADE", self.system)
        self.call("ready")

    def put(self, number: int, delay: float = 0.0) -> None:
        """Schedule messages in the quickest way, then ANALYZE the tables, as an autovacuum would."""
        verb = "schedule_bulk" if "send_many" in self.verbs else "schedule"
        self.call(verb, number=number, delay=delay)
        if self.tables:
            self.bench.sql(f"ANALYZE {', '.join(self.tables)}", self.system)

    @contextmanager
    def worker(self, processes: int = 1) -> Iterator[None]:
        """Run worker processes, each started as the system's docs say."""
        assert self.worker_arguments is not None
        started = []
        with self.log.open("ab") as log:
            for _ in range(processes):
                command = [str(self.system.program(self.bench.peers)), *self.worker_arguments]
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=self.directory,
                        env=self.environment,
                        start_new_session=True,
                    )
                )
        self.workers = [process.pid for process in started]
        try:
            yield
        finally:
            self.workers = []
            for process in started:
                end_worker(process)

    @contextmanager
    def warm_worker(self) -> Iterator[None]:
        """Run a worker process that has handled a message already."""
        with self.worker():
            self.call("schedule", number=0, delay=0, warm=1)
            wait(self.read_marks, START_SECONDS)
            yield

    @contextmanager
    def workers_stopped(self) -> Iterator[Callable[[], None]]:
        """Suspend each worker that has handled a message until all have; yield a function that lets all go on."""
        stopped: set[int] = set()

        def together() -> bool:
            for worker in {mark.worker for mark in self.read_marks()} - stopped:
                stopped.add(worker)
                os.killpg(worker, signal.SIGSTOP)
            return len(stopped) == len(self.workers)

        def go_on() -> None:
            for worker in stopped:
                os.killpg(worker, signal.SIGCONT)

        try:
            if not wait(together, START_SECONDS):
                raise self.failed("a worker handled no message")
            yield go_on
        finally:
            go_on()

    def left(self, number: int) -> int:
        """Return how many of ``number`` messages are not done: handled, and their outcome committed where one is."""
        if self.open:
            return int(self.bench.sql(f"SELECT count(*) {self.open}", self.system))
        return number - self.done

    def wait_until_done(self, number: int, limit: float) -> None:
        """Wait until all messages are done, or for ``limit`` seconds."""
        deadline = time.monotonic() + limit
        if not self.open:
            wait(lambda: self.done >= number, limit)
            return
        # No query disturbs the server before the last message was handled.
        wait(lambda: any(mark.number == number for mark in self.read_marks()), limit)
        with psycopg.connect(self.bench.url(self.system), autocommit=True) as connection:
            query = f"SELECT EXISTS (SELECT {self.open})".encode()
            wait(lambda: connection.execute(query).fetchone() == (False,), max(0.0, deadline - time.monotonic()))

    def cpu(self) -> Measures:
        """Return the CPU seconds so far of the adapter with its workers, and of the servers."""
        return {
            "client": sum(map(cpu_seconds, [self.process.pid, *self.workers])),
            "postgres": server_cpu_seconds(self.bench.postgres),
            "redis": server_cpu_seconds(self.bench.redis_server),
        }

    @property
    def done(self) -> int:
        """The number of messages that were noted."""
        return self.marks.stat().st_size // MARK.size if self.marks.exists() else 0

    def read_marks(self) -> list[Mark]:
        return [Mark(*mark) for mark in MARK.iter_unpack(self.marks.read_bytes())] if self.marks.exists() else []

    def fill_effects(self, number: int) -> None:
        """Create the table that handlers write to, with a row for each of ``number`` messages."""
        self.bench.sql(f"{EFFECTS}; TRUNCATE bench_effect RESTART IDENTITY", self.system)
        rows = f"SELECT n, '{{}}' FROM generate_series(1, {number}) n"
        self.bench.sql(f"INSERT INTO bench_effect (number, payload) {rows}", self.system)
        self.bench.sql("VACUUM ANALYZE bench_effect", self.system)

    def failed(self, what: str) -> Failed:
        """Return the exception to raise, with the tail of the log."""
        return Failed("\n".join([*self.log.read_text(errors="replace").splitlines()[-20:], what]))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants, ended ones included; 0 where there is no /proc."""
    try:
        # utime, stime, cutime and cstime, after the name in parentheses, which may contain any character.
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    children = [child for child in family(pid) if child != pid]
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def server_cpu_seconds(server: Server) -> float:
    return cpu_seconds(int((server.directory / PID_FILE).read_text()))


def wait(done: Callable[[], object], limit: float) -> bool:
    """Wait until ``done`` returns something true. Return False when that takes more than ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """End a worker and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT if process.poll() is None else 0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
