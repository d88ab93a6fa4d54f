"""The table of the systems that take part: django-delayq, its peers with their versions, and the floors."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class System:
    """One system. ``adapter`` is a module that runs in the system's own environment (see peers/adapter_process.py)."""

    name: str
    title: str
    kind: Literal["ours", "peer", "floor"]
    adapter: str
    # True when a scheduled message is on disk in a database; False when it is in the memory of Redis.
    durable: bool
    # Pinned packages of a peer, which has an environment of its own.
    packages: tuple[str, ...] = ()
    # True when Node.js runs it, with packages of npm.
    is_node: bool = False
    # The workloads that it takes part in; empty: all that it can do.
    only: frozenset[str] = frozenset()

    def home(self, peers: Path) -> Path:
        """Return the folder of a peer's environment."""
        return peers / self.name

    def program(self, peers: Path) -> Path:
        """Return the Python or the Node.js that runs the system."""
        if self.is_node:
            return Path(shutil.which("node") or "node")
        return self.home(peers) / "bin" / "python" if self.kind == "peer" else Path(sys.executable)

    def installed(self, peers: Path) -> bool:
        if self.is_node:
            return shutil.which("node") is not None and self.modules(peers).exists()
        return self.program(peers).exists()

    def modules(self, peers: Path) -> Path:
        """Return the folder of the packages for Node.js. It exists when all of them are installed."""
        return self.home(peers) / "node_modules"

    def command(self, peers: Path) -> list[str]:
        """Return the command of the process that answers the driver's calls."""
        if self.kind == "peer":
            process = HERE / "peers" / f"adapter_process.{'mjs' if self.is_node else 'py'}"
            return [str(self.program(peers)), str(process), self.adapter]
        return [sys.executable, "-m", "benchmarks.peers.adapter_process", self.adapter]


_HIREDIS = "hiredis==3.5.0"
# Peers that use only Redis need it for a handler that inserts a row.
_PSYCOPG = "psycopg[binary]==3.3.9"
_DJANGO = "Django==5.2.19"
# The driver of PostgreSQL for Node.js.
_PG = "pg@8.23.1"
_WAITS = frozenset({"async"})

SYSTEMS = (
    System("delayq", "django-delayq", "ours", "benchmarks.ours", True),
    System(
        "graphile",
        "Graphile Worker 0.17 (Node.js)",
        "peer",
        "graphile_worker",
        True,
        ("graphile-worker@0.17.3", _PG),
        is_node=True,
    ),
    System(
        "procrastinate",
        "Procrastinate 3.10",
        "peer",
        "procrastinate_pg",
        True,
        ("procrastinate==3.10.0", _PSYCOPG),
    ),
    System(
        "django-q2",
        "django-q2 1.11 (ORM)",
        "peer",
        "django_q2_orm",
        True,
        ("django-q2==1.11.1", _DJANGO, _PSYCOPG),
    ),
    System(
        "django-tasks-db",
        "django-tasks-db 0.13",
        "peer",
        "django_tasks_database",
        True,
        ("django-tasks-db[compat]==0.13.0", "django-tasks==0.12.0", _DJANGO, _PSYCOPG),
    ),
    System(
        "bullmq",
        "BullMQ 6.7 (Node.js, Redis)",
        "peer",
        "bullmq_redis",
        False,
        ("bullmq@6.7.0", "ioredis@6.0.0", _PG),
        is_node=True,
    ),
    System(
        "celery",
        "Celery 5.7 (Redis)",
        "peer",
        "celery_redis",
        False,
        ("celery[redis]==5.7.0", "redis==8.1.0", _HIREDIS, _PSYCOPG),
    ),
    System(
        "huey",
        "Huey 3.5 (Redis)",
        "peer",
        "huey_redis",
        False,
        ("huey[redis]==3.5.4", "redis==8.1.0", _HIREDIS, _PSYCOPG),
    ),
    System(
        "rq",
        "RQ 3.0",
        "peer",
        "rq_redis",
        False,
        ("rq==3.0.0", "redis==8.1.0", _HIREDIS, _PSYCOPG),
    ),
    System(
        "dramatiq",
        "Dramatiq 2.2 (Redis)",
        "peer",
        "dramatiq_redis",
        False,
        ("dramatiq[redis]==2.2.1", "redis==8.1.0", _HIREDIS, _PSYCOPG),
    ),
    System("arq", "arq 0.28", "peer", "arq_redis", False, ("arq==0.28.0", _HIREDIS), only=_WAITS),
    System(
        "taskiq",
        "taskiq 0.13 (Redis)",
        "peer",
        "taskiq_stream",
        False,
        ("taskiq==0.13.0", "taskiq-redis==1.2.4", _HIREDIS),
        only=_WAITS,
    ),
    System("postgres", "floor: INSERT and COPY by psycopg", "floor", "benchmarks.floors.postgres_alone", True),
    System("orm", "floor: create() of a narrow row", "floor", "benchmarks.floors.orm_alone", True),
)

BY_NAME = {system.name: system for system in SYSTEMS}
