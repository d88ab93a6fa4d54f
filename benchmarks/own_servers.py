"""A private Redis and PostgreSQL for measurements of django-delayq alone, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from testproject.servers import PostgresServer, RedisServer

from . import wal


@contextmanager
def own_servers(**settings: str) -> Iterator[tuple[RedisServer, PostgresServer]]:
    """Start both servers, with fsync on, and set up Django on them. ``settings`` are those of PostgreSQL."""
    with RedisServer() as redis, PostgresServer(fsync=True, **wal.KEPT | settings) as postgres:
        os.environ.update(
            DJANGO_SETTINGS_MODULE="benchmarks.settings", REDIS_URL=redis.url, DATABASE_URL=postgres.url, DEBUG="0"
        )
        wal.fill(postgres.url)
        set_up_django()
        yield redis, postgres


def set_up_django() -> None:
    """Set up Django, and make the tables in the empty database that its settings name."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
