"""A migration with a column and an index while the old version works, both versions side by side, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connection

from testproject.servers import PostgresServer, RedisServer

from .upgrade import versions
from .upgrade.trial import Trial


@pytest.mark.timeout(600)
def test_an_upgrade_under_traffic_and_the_way_back_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    path = tmp_path / "delayq.sqlite3"
    with RedisServer() as redis:
        environment = {"REDIS_URL": redis.url}
        if connection.vendor == "sqlite":
            try_on(None, path, environment | {"SQLITE_PATH": str(path), "DATABASE_URL": ""})
        else:
            with PostgresServer() as postgres:
                try_on(postgres, path, environment | {"DATABASE_URL": postgres.url})


def try_on(server: PostgresServer | None, path: Path, environment: dict[str, str]) -> None:
    old, new = versions.old(environment), versions.new(environment, path.parent / "new")
    old.call("migrate")
    Trial(old, new, path.parent, server, path).run()
