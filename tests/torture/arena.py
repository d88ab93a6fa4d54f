"""The servers and processes of a torture, and the faults that each can suffer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, LiteralString, NamedTuple, Self

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from testproject.binaries import PGBOUNCER_ADVICE, find_pgbouncer
from testproject.cleaner import PID_FILE, family, send
from testproject.servers import PgBouncerServer, PostgresServer, RedisServer
from tests.support.proxy import Proxy
from tests.support.redis_cluster import RedisCluster
from tests.support.skewed import SkewedRedis, why_no_clock_can_be_set
from tests.support.workers import PATIENCE, ROOT, eventually
from tests.torture.full_disk import FillablePostgres, find_compiler
from tests.torture.journal import Journal
from tests.torture.resolver import REDIS_HOST
from tests.torture.sizes import DELAYQ, GRACEFUL_TIMEOUT, LIFETIME, PULLERS, REPLACED, Size

AUDIT = """
CREATE SCHEMA torture;
CREATE TABLE torture.sched (id bigint, due timestamptz NOT NULL, kind text NOT NULL, key text, holds text,
    cancel_at timestamptz);
CREATE INDEX ON torture.sched (cancel_at) WHERE cancel_at IS NOT NULL;
-- No constraint: a duplicate is to be seen, not refused.
CREATE TABLE torture.effect (id bigint, delivery int, pid int, at timestamptz DEFAULT clock_timestamp());
-- What was deleted from the record, with the state that it was in.
CREATE TABLE torture.gone (id bigint, state text);
CREATE FUNCTION torture.note_gone() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO torture.gone VALUES (OLD.id, OLD.state); RETURN NULL; END $$;
CREATE TRIGGER torture_gone AFTER DELETE ON delayq_message FOR EACH ROW EXECUTE FUNCTION torture.note_gone();
"""
LEFT = """
SELECT (SELECT count(*) FROM delayq_message WHERE state IN ('scheduled', 'running'))
     + (SELECT count(*) FROM delayq_schedule WHERE NOT ended)
"""
# The messages of a topic that run, with their processes.
RUNNING = """
SELECT id, split_part(worker, '/', 2)::int FROM delayq_message WHERE topic = %s AND state = 'running' ORDER BY id
"""
RECORD = ("delayq_message", "delayq_transition", "delayq_schedule", "delayq_occurrence")


# The bytes that a worker can write while nobody reads its log: the least that a pipe holds.
SMALL_PIPE = 4096
# Data of clients that act by key takes so many seconds in each direction, as from an operator's desk.
FAR = 0.05
# The connections that a pooler has which is too small.
FEW = 3


class Running(NamedTuple):
    """A message that runs, and its process."""

    id: int
    pid: int


class RedisLog(NamedTuple):
    """A file to which Redis appends every command, and the size in bytes of the data that it began with."""

    path: Path
    base: int


@contextlib.contextmanager
def _opened(pipe: str) -> Iterator[int]:
    end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield end
    finally:
        os.close(end)


class Reader(threading.Thread):
    """Reads what a process writes to a small pipe, as a container's log driver does, and may stop reading."""

    def __init__(self, log: Path) -> None:
        super().__init__(name=f"reader of {log.name}", daemon=True)
        self._log = log
        self._reads = threading.Event()
        self._reads.set()
        self._stands = threading.Event()
        self._pipe, self.end = os.pipe()
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, SMALL_PIPE)

    def run(self) -> None:
        with self._log.open("ab") as log, open(self._pipe, "rb", buffering=0) as pipe:
            while text := pipe.read(SMALL_PIPE):
                log.write(text)
                log.flush()
                if not self._reads.is_set():
                    self._stands.set()
                    self._reads.wait()

    def pause(self) -> None:
        """Read nothing from now on, and fill the pipe up, as another program does that writes to the same log."""
        self._stands.clear()
        self._reads.clear()
        # It is about to read once more.
        self._fill()
        self._stands.wait(PATIENCE)
        self._fill()

    def _fill(self) -> None:
        # Opened anew: whether a write waits would else change for the worker, too.
        with contextlib.suppress(BlockingIOError), _opened(f"/proc/self/fd/{self._pipe}") as end:
            while True:
                os.write(end, b"\n")

    @property
    def is_full(self) -> bool:
        """True when nobody can write to the pipe without a wait."""
        with _opened(f"/proc/self/fd/{self._pipe}") as end:
            return not select.select([], [end], [], 0)[1]

    def go_on(self) -> None:
        self._reads.set()


class Process:
    """A program of the torture in a process group of its own, with a log: a file, or a pipe with a reader.

    ``way`` is a way to the database that is not that of the place.
    """

    def __init__(
        self, arena: Arena, name: str, *arguments: str, place: int = 0, is_piped: bool = False, way: Proxy | None = None
    ) -> None:
        self.name = name
        self._log = arena.folder / "logs" / f"{name}.log"
        self.reader = Reader(self._log) if is_piped else None
        end = (
            os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if self.reader is None
            else self.reader.end
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=arena.environment(place, way),
            stdin=subprocess.DEVNULL,
            stdout=end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(end)
        if self.reader is not None:
            self.reader.start()

    @property
    def pids(self) -> list[int]:
        """The pids of the process and its children."""
        return family(self.popen.pid)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def wait_until_there(self) -> None:
        """Wait for the first line of its log."""
        eventually(lambda: self._has_logged() or not self.alive, f"{self.name} is there")

    def _has_logged(self) -> bool:
        return self._log.exists() and self._log.stat().st_size > 0

    def kill(self) -> None:
        """Kill its whole process group at once, as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class Arena:
    """Redis with a replica, and PostgreSQL, each behind proxies; workers, producers and a canceller.

    The first proxy is everybody's but the workers', of which each place has one to itself.
    """

    def __init__(self, folder: Path, seed: str, size: Size, *, is_cluster: bool = False) -> None:
        self.folder = folder
        # All processes then use a Redis Cluster, and the single Redis is idle.
        self.cluster = RedisCluster() if is_cluster else None
        self.seed = seed
        self.size = size
        for name in ("lines", "journals", "logs"):
            (folder / name).mkdir(parents=True)
        self.journal = Journal(folder / "journals" / "nemesis.jsonl")
        # While this file is there, no name is found.
        self.silent = folder / "no-names"
        self.workers: list[Process] = []
        self.others: dict[str, Process] = {}
        # These are children of a supervisor that was killed.
        self.orphans: list[int] = []
        # Faults that need a program which this machine does not have, and why.
        self.lacks: dict[str, str] = {}
        if reason := why_no_clock_can_be_set():
            self.lacks["clock"] = reason
        if find_pgbouncer() is None:
            self.lacks |= dict.fromkeys(("pooler", "small-pool"), f"no pgbouncer was found. {PGBOUNCER_ADVICE}")
        if find_compiler() is None:
            self.lacks["disk-full"] = "no C compiler was found"
        # The isolation level of all transactions of the processes at a place, by its name in psycopg.
        self.isolation: dict[int, str] = {}
        self.until = 0.0
        self._names = 0
        self._pooled: set[Proxy] = set()
        self._ended: list[Process] = []
        self._stack = contextlib.ExitStack()
        self._next_sample = 0.0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            server = RedisServer if self.is_without("clock") else SkewedRedis
            self.redis, self.replica = (
                stack.enter_context(server("--slowlog-log-slower-than", "10000")) for _ in range(2)
            )
            if self.cluster is not None:
                stack.enter_context(self.cluster)
            self.to_master = stack.enter_context(Proxy(self.redis.port))
            self._follow()
            database = PostgresServer if self.is_without("disk-full") else FillablePostgres
            # Workers beside their successors, and two processes that run a message alone, have over a hundred at times.
            self.postgres = stack.enter_context(database(fsync=True, max_connections=160))
            if not self.is_without("pooler"):
                self.pgbouncer = stack.enter_context(PgBouncerServer(self.postgres, pool_size=20))
            if not self.is_without("small-pool"):
                self.small_pool = stack.enter_context(PgBouncerServer(self.postgres, pool_size=FEW))
            places = range(1 + self.size.workers)
            self.to_redis = [stack.enter_context(Proxy(self.redis.port)) for _place in places]
            self.to_postgres = [stack.enter_context(Proxy(self.postgres.port)) for _place in places]
            self.from_afar = stack.enter_context(Proxy(self.postgres.port))
            self.from_afar.delay = FAR
            stack.callback(self._kill_all)
            subprocess.run(
                [sys.executable, "-m", "django", "migrate", "--verbosity", "0"],
                cwd=ROOT,
                env=self.environment(0),
                check=True,
            )
            with psycopg.connect(self.postgres.url) as connection:
                connection.execute(AUDIT)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def is_without(self, kind: str) -> bool:
        return kind in self.lacks or self.size.weights.get(kind) == 0

    def environment(self, place: int, way: Proxy | None = None) -> dict[str, str]:
        """Return the environment of a process at a place: 0 for all but workers."""
        way = way or self.to_postgres[place]
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "tests.torture.settings",
            "DATABASE_URL": self.postgres.url.replace(str(self.postgres.port), str(way.port)),
            "REDIS_URL": (
                self.to_redis[place].url.replace("127.0.0.1", REDIS_HOST) if self.cluster is None else self.cluster.url
            ),
            "TORTURE_DIR": str(self.folder),
            "TORTURE_DELAYQ": json.dumps(DELAYQ),
            "TORTURE_UNTIL": str(self.until),
            "TORTURE_VERSION": str(self._names),
            "TORTURE_SILENT": str(self.silent),
            "TORTURE_ISOLATION": self.isolation.get(place, "READ_COMMITTED"),
            "DEBUG": "0",
        }

    def _kill_all(self) -> None:
        for process in [*self.workers, *self.others.values(), *self._ended]:
            for pid in process.pids:
                send(pid, signal.SIGCONT)
            process.kill()

    # --- processes ----------------------------------------------------------------------------------------------------

    def begin(self, until: float) -> None:
        """Start everything. Producers go on until the given time.

        They begin when all workers are there: what waits for a worker to start would count as late in quiet times.
        """
        self.until = until
        self.workers = [self.start_worker(place) for place in range(self.size.workers)]
        eventually(lambda: self._heartbeats() >= self.size.workers * self.size.processes, "all workers are there")
        for number in range(self.size.producers):
            self.start_producer(number, self.size.poison if number == 0 else 0)
        for number in range(PULLERS):
            self.start_puller(number)
        self.others["canceller"] = Process(self, "canceller", "tests.torture.canceller", str(until + self.size.spread))

    def start_worker(self, place: int) -> Process:
        options = ["--processes", str(self.size.processes), "--threads", str(self.size.threads)]
        options += ["--graceful-timeout", GRACEFUL_TIMEOUT]
        if place == 0:
            options += ["--worker-name", REPLACED, "--max-tasks-per-child", str(LIFETIME)]
        else:
            # It has a line in its log for each message.
            options += ["--verbosity", "2"]
        return Process(self, self._name("worker"), "django", "run_delayq", *options, place=place + 1, is_piped=True)

    def start_producer(self, number: int, poison: int = 0) -> None:
        name, size = self._name("producer"), self.size
        terms = {"seed": f"{self.seed} {name}", "rate": size.rate, "spread": size.spread, "queues": size.queues}
        terms |= {"poison": poison, "until": self.until}
        self.others[f"producer {number}"] = Process(self, name, "tests.torture.producer", json.dumps(terms))

    def start_puller(self, number: int) -> None:
        name = self._name("puller")
        self.others[f"puller {number}"] = Process(self, name, "tests.torture.puller", f"{self.seed} {name}")

    def restore(self) -> Process:
        return Process(self, self._name("restore"), "django", "delayq_restore", "--json")

    def client(self, what: str, *arguments: str, way: Proxy | None = None) -> Process:
        """Start one of the clients of ``tests.torture`` that come and go."""
        process = Process(self, self._name(what), f"tests.torture.{what}", *arguments, way=way)
        self._ended.append(process)
        return process

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def tend(self) -> None:
        """Start processes again that have ended, as an init would, and note those that the nemesis did not kill."""
        for place, worker in enumerate(self.workers):
            if not worker.alive:
                text = f"{worker.name}, exit code {worker.popen.returncode}"
                self.journal.write("worker ended by itself", text=text)
                self._ended.append(worker)
                self.workers[place] = self.start_worker(place)
        for process in self.others.values():
            # Producers and pullers kill themselves at random.
            if process.popen.poll() not in (None, 0, -signal.SIGKILL) and process not in self._ended:
                self._ended.append(process)
                text = f"{process.name}, exit code {process.popen.returncode}"
                self.journal.write("client ended by itself", text=text)
        for number in range(self.size.producers):
            if not self.others[f"producer {number}"].alive and time.time() < self.until - 1:
                self.start_producer(number)
        for number in range(PULLERS):
            if not self.others[f"puller {number}"].alive:
                self.start_puller(number)
        if time.monotonic() > self._next_sample:
            self._next_sample = time.monotonic() + 5
            self._sample()

    def replace(self, worker: Process) -> Process:
        """Start another worker in the place of one that has ended."""
        self._ended.append(worker)
        place = self.workers.index(worker)
        self.workers[place] = self.start_worker(place)
        return self.workers[place]

    def stop(self) -> None:
        """End workers in order and the others at once; children whose supervisor is gone have ended by themselves."""
        for worker in self.workers:
            worker.popen.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = worker.popen.wait(PATIENCE)
                if code != 0:
                    self.journal.write("worker ended by itself", text=f"{worker.name}, exit code {code} at SIGTERM")
        for process in self.others.values():
            process.kill()
        if left := [pid for pid in self.orphans if _is_there(pid)]:
            self.journal.write("worker ended by itself", text=f"orphans go on: {left}")

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(0.2, left))

    def _sample(self) -> None:
        """Note the memory and the open files of each worker process."""
        for worker in self.workers:
            for pid in worker.pids[1:]:
                with contextlib.suppress(OSError, IndexError):
                    memory = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                    self.journal.write("sample", process=pid, memory=memory, files=files)

    # --- servers ------------------------------------------------------------------------------------------------------

    def redis_client(self) -> redis.Redis:
        """Return a client of the master that goes past the proxies."""
        return _client(self.redis)

    def replica_client(self) -> redis.Redis:
        """Return a client of the replica that goes past the proxies."""
        return _client(self.replica)

    def note_slow_scripts(self) -> None:
        """Note the slow scripts before the end of a server loses its list of them."""
        with contextlib.suppress(redis.RedisError), self.redis_client() as client:
            for entry in client.slowlog_get(100):
                command = entry["command"][:60].decode(errors="replace")
                if command.startswith(("EVAL", "FCALL")):
                    text = f"{entry['duration'] / 1000:.1f} ms: {command}"
                    self.journal.write("slow script", text=text, ms=entry["duration"] / 1000, began=entry["start_time"])
            client.slowlog_reset()

    def load_redis(self, snapshot: Path | None) -> None:
        """Kill Redis and start it on an older state, or on none."""
        self.note_slow_scripts()
        self.redis.kill()
        target = self.redis.directory / "dump.rdb"
        target.unlink(missing_ok=True)
        if snapshot is not None:
            shutil.copy(snapshot, target)
        self.redis.start()

    def snapshot(self) -> Path:
        """Save what Redis holds now."""
        copy = self.folder / "older.rdb"
        with self.redis_client() as client:
            client.save()
        shutil.copy(self.redis.directory / "dump.rdb", copy)
        return copy

    def keep_redis_log(self) -> RedisLog:
        """Have Redis write every command into a file from now on, which begins with its present data."""
        with self.redis_client() as client:
            client.config_set("appendonly", "yes")
            eventually(lambda: _is_logging(client.info("persistence")), "Redis keeps a log")
        # Redis 7 has a folder of files and writes to the last one.
        logs = [*self.redis.directory.glob("appendonly.aof"), *self.redis.directory.glob("appendonlydir/*.incr.aof")]
        path = max(logs, key=lambda log: log.stat().st_mtime)
        return RedisLog(path, path.stat().st_size)

    def cut_redis_log(self, log: RedisLog, kept: float) -> None:
        """Kill Redis, cut off the end of its log, and start it on the rest: it starts on no part of its first data."""
        self.note_slow_scripts()
        self.redis.kill()
        appended = log.path.stat().st_size - log.base
        with log.path.open("r+b") as file:
            file.truncate(log.base + int(appended * kept))
        self.redis.persistence = "aof"
        self.redis.start()
        self.redis.persistence = "none"
        with self.redis_client() as client:
            client.config_set("appendonly", "no")
        for path in (self.redis.directory / "appendonly.aof", self.redis.directory / "appendonlydir"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def fail_over(self) -> int:
        """Promote the replica to master; the former master comes back empty, as its replica.

        Returns how many bytes of the master's changes had not reached the replica.
        """
        with self.redis_client() as client:
            told = client.info("replication")["master_repl_offset"]
        self.redis.kill()
        with self.replica_client() as client:
            heard = client.info("replication")["slave_repl_offset"]
            client.replicaof("NO", "ONE")
        self.redis, self.replica = self.replica, self.redis
        for proxy in (*self.to_redis, self.to_master):
            proxy.turn_to(self.redis.port)
        self.to_master.clear()
        (self.replica.directory / "dump.rdb").unlink(missing_ok=True)
        self.replica.start()
        self._follow()
        return int(told - heard)

    def set_redis_clock(self, ahead: float) -> None:
        """Set the clock of Redis so many seconds ahead of the machine's (negative: behind)."""
        assert isinstance(self.redis, SkewedRedis)
        self.redis.set_ahead_at_start(ahead)

    def turn_pooler(self, way: Proxy) -> None:
        """Have a way to the database lead over the pooler from now on; one that did leads straight to it again."""
        if way in self._pooled:
            self._pooled.remove(way)
            way.turn_to(self.postgres.port)
        else:
            self._pooled.add(way)
            way.turn_to(self.pgbouncer.port)

    def leave_pooler(self) -> None:
        """Have all ways lead straight to the database."""
        for way in [*self._pooled]:
            self.turn_pooler(way)

    def _follow(self) -> None:
        with self.replica_client() as client:
            client.replicaof("127.0.0.1", str(self.to_master.port))

    def kill_postgres(self) -> None:
        """Send SIGKILL to every process of PostgreSQL."""
        pid = int((self.postgres.directory / PID_FILE).read_text())
        pids = family(pid)
        for each in pids:
            send(each, signal.SIGKILL)
        self.postgres.kill()
        eventually(lambda: not any(_is_there(each) for each in pids), "PostgreSQL is gone")

    def dump(self) -> None:
        """Write the tables to files, for more than the oracle reports."""
        with psycopg.connect(self.postgres.url) as connection:
            for table in ("torture.sched", "torture.effect", "torture.gone", *RECORD):
                copy = f"COPY (SELECT * FROM {table}) TO STDOUT (FORMAT csv, HEADER)"
                with (self.folder / f"{table}.csv").open("wb") as file, connection.cursor().copy(copy) as rows:
                    for data in rows:
                        file.write(data)

    def running(self, topic: str) -> list[Running]:
        """Return the messages of a topic that run."""
        with psycopg.connect(self.postgres.url) as connection:
            return [Running(*row) for row in connection.execute(RUNNING, [topic])]

    def left(self) -> int:
        """Return the number of messages that are not finished and of schedules that have not ended."""
        with psycopg.connect(self.postgres.url) as connection:
            return _number(connection, LEFT)

    def _heartbeats(self) -> int:
        """Return the number of worker processes that have said that they are alive."""
        with psycopg.connect(self.postgres.url) as connection:
            return _number(connection, "SELECT count(*) FROM delayq_worker")


def _number(connection: psycopg.Connection, query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def _is_logging(persistence: dict[str, Any]) -> bool:
    busy = persistence["aof_rewrite_in_progress"] or persistence["aof_rewrite_scheduled"]
    return bool(persistence["aof_enabled"]) and not busy


def _client(server: RedisServer) -> redis.Redis:
    # By default redis-py asks a server that does not answer eleven times.
    return redis.Redis(port=server.port, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def _is_there(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        send(pid, number)
