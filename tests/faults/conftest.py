"""Networks between a worker and its servers that tests make bad."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testproject.servers import PostgresServer, RedisServer
from tests.support.proxy import Proxy


@pytest.fixture
def to_redis(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as network:
        yield network


@pytest.fixture
def to_database(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as network:
        yield network
