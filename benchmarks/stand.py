"""A Redis and a PostgreSQL of its own for what measures django-delayq alone, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from testproject.servers import PostgresServer, RedisServer


@contextmanager
def stand(**settings: str) -> Iterator[tuple[RedisServer, PostgresServer]]:
    """Both servers, fsync on, and Django set up on them; ``settings`` are PostgreSQL's."""
    with RedisServer() as redis, PostgresServer(fsync=True, **settings) as postgres:
        os.environ.update(
            DJANGO_SETTINGS_MODULE="benchmarks.settings", REDIS_URL=redis.url, DATABASE_URL=postgres.url, DEBUG="0"
        )
        from . import ours

        ours.setup()
        yield redis, postgres
