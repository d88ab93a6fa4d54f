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
    uses: frozenset[str]
    # Pinned packages of a peer, which has an environment of its own.
    packages: tuple[str, ...] = ()
    # Its features, of: transaction (schedules in the caller's transaction), log (of each attempt), cancel (a waiting
    # message, for good), reschedule (a waiting message), crash (redelivers messages of a killed worker).
    has: frozenset[str] = frozenset()
    note: str = ""
    # "waits": it takes part where handlers wait, hundreds at once; "only waits": there alone.
    traits: frozenset[str] = frozenset()
    # True when Node.js runs it, with packages of npm.
    is_node: bool = False
    # The workloads that it takes part in; empty: all.
    only: frozenset[str] = frozenset()
    # The system whose environment it shares; "" for one of its own.
    lives_with: str = ""

    def home(self, peers: Path) -> Path:
        """Return the folder of a peer's environment."""
        return peers / (self.lives_with or self.name)

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


# The features that a system may have, with their titles in the table.
FEATURES = {
    "transaction": "in the caller's transaction",
    "log": "log of each attempt",
    "cancel": "cancel for good",
    "reschedule": "reschedule",
    "crash": "redelivers after a crash",
}

REDIS, POSTGRES = frozenset({"redis"}), frozenset({"postgres"})
BOTH = REDIS | POSTGRES
_HIREDIS = "hiredis==3.5.0"
# Peers that use only Redis need it for a handler that inserts a row.
_PSYCOPG = "psycopg[binary]==3.3.9"
_DJANGO = "Django==5.2.19"
# The driver of PostgreSQL for Node.js.
_PG = "pg@8.23.1"

_CELERY = ("celery[redis]==5.7.0", "gevent==26.9.0", "redis==8.1.0", _HIREDIS, _PSYCOPG)
_WAITS = frozenset({"waits"})
_ONLY_WAITS = frozenset({"waits", "only waits"})

SYSTEMS = (
    System("delayq", "django-delayq", "ours", "benchmarks.ours", True, BOTH, has=frozenset(FEATURES)),
    System(
        "celery",
        "Celery 5.7 (Redis)",
        "peer",
        "celery_redis",
        False,
        REDIS,
        _CELERY,
        frozenset({"crash"}),
        "delayed tasks wait in the worker's memory; after a crash they come back an hour later; revoke is a broadcast",
        _WAITS,
    ),
    System(
        "celery-gevent",
        "Celery 5.7 (Redis), gevent",
        "peer",
        "celery_gevent",
        False,
        REDIS,
        _CELERY,
        frozenset({"crash"}),
        "as above",
        _ONLY_WAITS,
        lives_with="celery",
    ),
    System(
        "huey",
        "Huey 3.5 (Redis)",
        "peer",
        "huey_redis",
        False,
        REDIS,
        ("huey[redis]==3.5.4", "redis==8.1.0", _HIREDIS, _PSYCOPG),
        frozenset({"cancel"}),
        "at most once: what a killed worker held is lost; looks for due tasks once a second",
    ),
    System(
        "rq",
        "RQ 3.0",
        "peer",
        "rq_redis",
        False,
        REDIS,
        ("rq==3.0.0", "redis==8.1.0", _HIREDIS, _PSYCOPG),
        frozenset({"log", "cancel"}),
        "due times are whole seconds; what a killed worker held is marked as failed",
    ),
    System(
        "dramatiq",
        "Dramatiq 2.2 (Redis)",
        "peer",
        "dramatiq_redis",
        False,
        REDIS,
        ("dramatiq[redis]==2.2.1", "redis==8.1.0", _HIREDIS, _PSYCOPG),
        frozenset({"crash"}),
        "delayed messages wait in the worker's memory",
    ),
    System(
        "django-q2",
        "django-q2 1.11 (ORM)",
        "peer",
        "django_q2_orm",
        True,
        POSTGRES,
        ("django-q2==1.11.1", _DJANGO, _PSYCOPG),
        frozenset({"transaction", "cancel", "reschedule", "crash"}),
        "looks for due schedules every 30 s",
    ),
    System(
        "procrastinate",
        "Procrastinate 3.10",
        "peer",
        "procrastinate_pg",
        True,
        POSTGRES,
        ("procrastinate==3.10.0", _PSYCOPG),
        frozenset({"transaction", "log", "cancel"}),
        "looks for due jobs every 5 s; a crash needs a task of your own; measured without a caller's transaction",
        _WAITS,
    ),
    System(
        "django-tasks-db",
        "django-tasks-db 0.13",
        "peer",
        "django_tasks_database",
        True,
        POSTGRES,
        ("django-tasks-db[compat]==0.13.0", "django-tasks==0.12.0", _DJANGO, _PSYCOPG),
        frozenset({"transaction"}),
        "looks for due tasks once a second; what a killed worker held stays running",
    ),
    System(
        "tasktiger",
        "TaskTiger 0.26",
        "peer",
        "tasktiger_redis",
        False,
        REDIS,
        ("tasktiger==0.26.3", "redis==4.6.0", _HIREDIS, _PSYCOPG),
        frozenset({"cancel", "reschedule", "crash"}),
        "",
    ),
    System(
        "saq",
        "SAQ 0.26 (Redis)",
        "peer",
        "saq_redis",
        False,
        REDIS,
        # This package needs typing_extensions, but does not declare it.
        ("saq[redis,hiredis]==0.26.4", "redis==7.4.1", _HIREDIS, _PSYCOPG, "typing_extensions==4.16.0"),
        frozenset({"cancel", "crash"}),
        "due times are whole seconds",
        _WAITS,
    ),
    System(
        "arq",
        "arq 0.28",
        "peer",
        "arq_redis",
        False,
        REDIS,
        ("arq==0.28.0", _HIREDIS),
        frozenset({"cancel", "crash"}),
        "looks for due jobs every 0.5 s",
        _ONLY_WAITS,
    ),
    System(
        "taskiq",
        "taskiq 0.13 (Redis)",
        "peer",
        "taskiq_stream",
        False,
        REDIS,
        ("taskiq==0.13.0", "taskiq-redis==1.2.4", _HIREDIS),
        frozenset({"crash"}),
        "delays need a scheduler, a process of its own",
        _ONLY_WAITS,
    ),
    System(
        "bullmq",
        "BullMQ 6.7 (Node.js, Redis)",
        "peer",
        "bullmq_redis",
        False,
        REDIS,
        ("bullmq@6.7.0", "ioredis@6.0.0", _PG),
        frozenset({"cancel", "reschedule", "crash"}),
        "finished jobs stay in Redis until they are removed; 50 handlers at once",
        is_node=True,
    ),
    System(
        "graphile",
        "Graphile Worker 0.17 (Node.js)",
        "peer",
        "graphile_worker",
        True,
        POSTGRES,
        ("graphile-worker@0.17.3", _PG),
        frozenset({"transaction", "cancel", "reschedule", "crash"}),
        "deletes finished jobs; looks for due ones every 2 s; what a killed worker held comes back after 4 hours",
        is_node=True,
    ),
    System(
        "graphile-tuned",
        "Graphile Worker 0.17, tuned",
        "peer",
        "graphile_worker_tuned",
        True,
        POSTGRES,
        ("graphile-worker@0.17.3", _PG),
        frozenset({"transaction", "cancel", "reschedule", "crash"}),
        "24 handlers at once, takes 500 jobs at a time, completes in batches",
        is_node=True,
        lives_with="graphile",
    ),
    System(
        "apscheduler",
        "APScheduler 3.11 (PostgreSQL)",
        "peer",
        "apscheduler_pg",
        True,
        POSTGRES,
        ("apscheduler==3.11.3", "sqlalchemy==2.1.9", _PSYCOPG),
        frozenset({"cancel", "reschedule"}),
        "one process at a time may have the schedules; runs functions in that process",
        only=frozenset({"recurring"}),
    ),
    System("redis", "floor: Redis alone", "floor", "benchmarks.floors.redis_alone", False, REDIS),
    System("postgres", "floor: PostgreSQL alone", "floor", "benchmarks.floors.postgres_alone", True, POSTGRES),
    System("orm", "floor: the ORM alone", "floor", "benchmarks.floors.orm_alone", True, POSTGRES),
)

BY_NAME = {system.name: system for system in SYSTEMS}
