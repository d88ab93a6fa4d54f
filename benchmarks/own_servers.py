"""A Redis and a PostgreSQL for measurements, as their packages start them for a user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from testproject.servers import PostgresServer, RedisServer

# What both do as installed: Redis writes snapshots, and PostgreSQL has 128 MB of buffers. It has its usual checkpoints
# and flushes every commit. The servers of tests have less of that.
REDIS_SAVES = ("--save", "3600", "1", "--save", "300", "100", "--save", "60", "10000")
POSTGRES: dict[str, str] = {"shared_buffers": "128MB"}
# A server that has run for a while writes its log into old files, which each checkpoint keeps for that. A new one makes
# a file for each 16 MB, and no commit ends meanwhile.
OLD_FILES = "SELECT count(pg_logical_emit_message(false, '', repeat('x', 1000000))) FROM generate_series(1, 1000)"


@contextmanager
def servers(**settings: str) -> Iterator[tuple[RedisServer, PostgresServer]]:
    """Start both servers. ``settings`` are those of PostgreSQL."""
    with RedisServer(*REDIS_SAVES) as redis, PostgresServer(fsync=True, **POSTGRES | settings) as postgres:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(OLD_FILES)
            connection.execute("CHECKPOINT")
        yield redis, postgres


@contextmanager
def own_servers(project: str = "benchmarks.settings", **settings: str) -> Iterator[tuple[RedisServer, PostgresServer]]:
    """Start both servers, and set up Django on them in this process, with the settings of ``project``."""
    with servers(**settings) as (redis, postgres):
        os.environ.update(DJANGO_SETTINGS_MODULE=project, REDIS_URL=redis.url, DATABASE_URL=postgres.url, DEBUG="0")
        set_up_django()
        yield redis, postgres


def set_up_django() -> None:
    """Set up Django, and make the tables in the empty database that its settings name."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
