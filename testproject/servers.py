"""Private Redis, PostgreSQL and PgBouncer servers for the demo and the tests: no root, no Docker, nothing left behind.

>>> with RedisServer() as redis, PostgresServer() as postgres:
...     print(redis.url, postgres.url)
redis://127.0.0.1:23871/0 postgresql://delayq@127.0.0.1:29415/delayq

Each server has a private directory and a loopback port that stays the same over stop, kill and start. It ends with the
process that started it, even when that process is killed by SIGKILL (see cleaner.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from . import cleaner
from .binaries import PGBOUNCER_ADVICE, POSTGRES_ADVICE, REDIS_ADVICE, find_pgbouncer, find_postgres, find_redis

__all__ = [
    "PgBouncerServer",
    "PostgresServer",
    "RedisServer",
    "Server",
    "ServerFailed",
    "find_pgbouncer",
    "find_postgres",
    "find_redis",
]

# The path of a Unix socket may have about 107 characters (103 on macOS). The parent directory may have this many.
MAX_PARENT_LENGTH = 60
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class ServerFailed(Exception):
    """A server is not installed, or did not start; the message ends with the tail of its log."""


def free_port() -> int:
    """Return a free loopback port outside the range that the kernel gives to outgoing connections.

    With a port inside that range, a client that keeps connecting while the server is down sooner or later gets that
    port as its own: it then talks to itself, and the server cannot start again.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server(ABC):
    """One server process with a directory and a port of its own."""

    clean_signal: ClassVar[signal.Signals]
    abrupt_signal: ClassVar[signal.Signals]

    def __init__(self) -> None:
        self.port = free_port()
        self.account = self._account()
        self.directory = Path(tempfile.mkdtemp(prefix="delayq-", dir=_short_parent()))
        self._cleaner = _start_cleaner(self.directory, self.abrupt_signal)
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        if self.account:
            os.chown(self.directory, self.account.pw_uid, self.account.pw_gid)
        _open.add(self)

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL that a client connects to."""

    @property
    def log(self) -> Path:
        """The file that the server writes its log to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """True while the process exists, frozen or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def frozen(self) -> bool:
        """True while the process is stopped by ``freeze()``."""
        return self._frozen

    def start(self) -> None:
        """Start the server and wait until it answers. A running server goes on, thawed."""
        self.thaw()
        if self.running:
            return
        if self._cleaner.poll() is not None:
            raise ServerFailed(f"{type(self).__name__} was closed, and its directory is gone.")
        with self.log.open("ab") as log:
            self._process = self._popen(self._command(), log.fileno())
        self._pid_file.write_text(str(self._process.pid))
        self._wait_until_ready()

    def stop(self) -> None:
        """Shut down cleanly, even with open connections. The data stay for the next start."""
        self._end(self.clean_signal)

    def kill(self) -> None:
        """End at once, as in a power cut: the server saves nothing and closes no connection in order."""
        self._end(self.abrupt_signal)

    def restart(self) -> None:
        """Stop cleanly and start again on the same data and port."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Suspend all processes of the server: connections stay open, but nothing answers."""
        self._signal_all(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """Resume a frozen server."""
        if self._frozen:
            self._frozen = False
            self._signal_all(signal.SIGCONT)

    def close(self) -> None:
        """Stop and remove everything. The server cannot be started again."""
        self.stop()
        self._cleaner.communicate()
        _open.discard(self)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command line; prepare the directory before the first start."""

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether the server takes commands yet."""

    def _account(self) -> pwd.struct_passwd | None:
        """Return the account to run under; None for the account of this process."""
        return None

    @property
    def _pid_file(self) -> Path:
        return self.directory / cleaner.PID_FILE

    def _popen(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        """Run a program in the directory, in a session of its own: Ctrl-C reaches the owner only."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=self._environment(),
            start_new_session=True,
            user=self.account.pw_uid if self.account else None,
            group=self.account.pw_gid if self.account else None,
            extra_groups=[] if self.account else None,
        )

    def _environment(self) -> dict[str, str]:
        # Not the environment of this process: it may have PGPORT, PGDATA, or a locale that is not installed.
        path = os.environ.get("PATH", os.defpath)
        return {"PATH": path, "HOME": str(self.directory), "LC_ALL": "C", "TZ": "UTC"}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.running and not self._answers():
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)
        if not self.running:
            raise self._failure("did not start")

    def _failure(self, what: str) -> ServerFailed:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return ServerFailed("\n".join([f"{type(self).__name__} {what}. Its log ends with:", *tail]))

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            for pid in cleaner.family(self._process.pid):
                cleaner.send(pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            if self.running:
                self._process.send_signal(number)
                self.thaw()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal_all(signal.SIGKILL)
                self._process.wait()
        self._pid_file.unlink(missing_ok=True)


class RedisServer(Server):
    """A Redis (or Valkey) server. By default it keeps nothing when it ends."""

    clean_signal = signal.SIGTERM
    abrupt_signal = signal.SIGKILL

    PERSISTENCE: ClassVar[dict[str, list[str]]] = {
        "none": ["--save", "", "--appendonly", "no"],
        "rdb": ["--save", "60", "1", "--appendonly", "no"],
        "aof": ["--save", "", "--appendonly", "yes"],
    }

    def __init__(self, *extra: str, persistence: Literal["none", "rdb", "aof"] = "none") -> None:
        # May be changed for the next start.
        self.persistence = persistence
        self._options = extra
        super().__init__()

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        program = find_redis()
        if program is None:
            raise ServerFailed(f"No redis-server found. {REDIS_ADVICE}")
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)]
        return [
            str(program),
            *place,
            "--daemonize",
            "no",
            "--loglevel",
            "warning",
            *self.PERSISTENCE[self.persistence],
            *self._options,
        ]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class PostgresServer(Server):
    """A PostgreSQL server with one empty database, reached over TCP or a socket in its directory.

    ``fsync=False`` is for tests only: the data survive ``kill()``, but not a power cut of the machine.
    """

    clean_signal = signal.SIGINT  # "fast": ends the connections instead of waiting for them
    abrupt_signal = signal.SIGQUIT  # "immediate": no checkpoint, the next start recovers from the log
    user: ClassVar = "delayq"

    SETTINGS: ClassVar[dict[str, str | int]] = {
        "listen_addresses": "127.0.0.1",
        "max_connections": 200,
        "shared_buffers": "32MB",
        "timezone": "UTC",
        # In the directory and not in /dev/shm, which is often tiny in containers and would not be cleaned up.
        "dynamic_shared_memory_type": "mmap",
    }

    def __init__(self, *, dbname: str = "delayq", fsync: bool = False, **settings: str | int) -> None:
        self.dbname = dbname
        # synchronous_commit stays on: without it even kill() would lose the last commits.
        durability = {} if fsync else {"fsync": "off", "full_page_writes": "off"}
        self.settings: dict[str, str | int] = {**self.SETTINGS, **durability, **settings}
        self._bin: Path | None = None
        self._has_database = False
        super().__init__()

    @property
    def url(self) -> str:
        """The URL of its database, over TCP."""
        return self._url(self.dbname)

    @property
    def socket_url(self) -> str:
        """The URL of its database, over the Unix socket."""
        return f"postgresql:///{self.dbname}?host={self.directory}&port={self.port}&user={self.user}"

    def start(self) -> None:
        """Start the server and wait until it answers. The first start makes the cluster and the database."""
        super().start()
        if not self._has_database:
            self._create_database()
            self._has_database = True

    def _url(self, dbname: str) -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{dbname}"

    def _account(self) -> pwd.struct_passwd | None:
        return _account_other_than_root()

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _command(self) -> list[str]:
        if self._bin is None:
            programs = self._reachable_programs()
            self._initdb(programs)
            self._bin = programs
        place = {"port": self.port, "unix_socket_directories": self.directory}
        options = [f"--{name}={value}" for name, value in {**self.settings, **place}.items()]
        return [str(self._bin / "postgres"), "-D", str(self._data), *options]

    def _initdb(self, programs: Path) -> None:
        how = f"--username={self.user} --auth=trust --no-sync --encoding=UTF8 --locale=C".split()
        if not self._run([str(programs / "initdb"), *how, "-D", str(self._data)]):
            raise self._failure("could not make its data directory")

    def _reachable_programs(self) -> Path:
        """Return the folder of the programs; copy them next to the data when the account cannot reach them."""
        programs = find_postgres()
        if programs is None:
            raise ServerFailed(f"No PostgreSQL server found. {POSTGRES_ADVICE}")
        if self.account is None or self._run([str(programs / "initdb"), "--version"]):
            return programs
        return self._copy(programs.parent) / "bin"

    def _run(self, command: Sequence[str]) -> bool:
        try:
            with self.log.open("ab") as log:
                return self._popen(command, log.fileno()).wait(START_SECONDS) == 0
        except PermissionError:
            return False

    def _copy(self, tree: Path) -> Path:
        """Copy an installation, with the shared libraries that a wheel keeps beside its package."""
        package = tree.parent
        copy = self.directory / "site" / package.name / tree.name
        shutil.copytree(tree, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "doc", "man"))
        libraries = package.with_name(package.name + ".libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy.parents[1] / libraries.name)
        self._chown(self.directory / "site")
        return copy

    def _chown(self, tree: Path) -> None:
        assert self.account is not None
        for path in [tree, *tree.rglob("*")]:
            os.chown(path, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)

    def _answers(self) -> bool:
        return _takes_connections(self._url("postgres"))

    def _create_database(self) -> None:
        import psycopg
        from psycopg import sql

        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.dbname)))


class PgBouncerServer(Server):
    """A PgBouncer in front of a PostgreSQL server: in transaction mode, with hardly any connections for its clients."""

    clean_signal = signal.SIGINT
    abrupt_signal = signal.SIGKILL

    def __init__(self, postgres: PostgresServer, *, pool_size: int = 3) -> None:
        self._postgres = postgres
        self.pool_size = pool_size
        super().__init__()

    @property
    def url(self) -> str:
        """The URL of the server's database, by way of the pooler."""
        return f"postgresql://{self._postgres.user}@127.0.0.1:{self.port}/{self._postgres.dbname}"

    def _account(self) -> pwd.struct_passwd | None:
        return _account_other_than_root()

    def _command(self) -> list[str]:
        program = find_pgbouncer()
        if program is None:
            raise ServerFailed(f"No pgbouncer found. {PGBOUNCER_ADVICE}")
        users, settings = self.directory / "users", self.directory / "pgbouncer.ini"
        users.write_text(f'"{self._postgres.user}" ""\n')
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self._postgres.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
            f"default_pool_size = {self.pool_size}\nmax_client_conn = 500\nignore_startup_parameters = options\n"
            # By default it says for 15 s of a database that is back that it is not.
            "server_login_retry = 1\n"
        )
        for file in (users, settings):
            file.chmod(0o644)
        return [str(program), str(settings)]

    def _answers(self) -> bool:
        return _takes_connections(self.url)


def _account_other_than_root() -> pwd.struct_passwd | None:
    """Return an account for a server that refuses to run as root; None when this process does not run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerFailed("The server does not run as root, and there is no account postgres or nobody.")


def _takes_connections(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _short_parent() -> str | None:
    """Return the parent for directories: the default, unless sockets in it would have too long a path."""
    usual = Path(tempfile.gettempdir()).resolve()
    # Another account cannot reach a directory below a private one.
    public = all(folder.stat().st_mode & 0o001 for folder in (usual, *usual.parents))
    if len(str(usual)) > MAX_PARENT_LENGTH or (os.geteuid() == 0 and not public):
        return "/tmp"
    return None


def _start_cleaner(directory: Path, number: signal.Signals) -> subprocess.Popen[bytes]:
    script = [sys.executable, "-I", "-S", cleaner.__file__, str(directory), str(int(number))]
    return subprocess.Popen(script, stdin=subprocess.PIPE, cwd="/", start_new_session=True)


_open: set[Server] = set()


@atexit.register
def _close_all() -> None:
    for server in list(_open):
        server.close()


def _disown_all() -> None:
    """Leave the servers to the parent: a forked child must neither keep their cleaners waiting nor close a server."""
    for server in list(_open):
        for process in (server._cleaner, server._process):
            if process is not None and process.returncode is None:
                process.returncode = 0  # else Popen warns at exit that the process still runs
        if server._cleaner.stdin:
            server._cleaner.stdin.close()
        _open.discard(server)


os.register_at_fork(after_in_child=_disown_all)
