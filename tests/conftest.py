"""The servers of this run, as fixtures. Tests may kill, restart and freeze them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest
import redis
from django.db import connections
from django_redis.pool import ConnectionFactory

from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from testproject.servers import PostgresServer, RedisServer, Server
from tests import settings

AServer = TypeVar("AServer", bound=Server)


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Leave the names of the databases alone: each worker of pytest-xdist has a server of its own."""


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """The running Redis server; it runs again after the test, whatever the test does to it."""
    assert settings.REDIS_SERVER is not None
    yield from _running(settings.REDIS_SERVER)


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    """The running PostgreSQL server; it runs again after the test, whatever the test does to it."""
    if settings.POSTGRES_SERVER is None:
        pytest.skip("needs PostgreSQL")
    yield from _running(settings.POSTGRES_SERVER)
    # Those of before are dead, and the next thing to happen is the flush of the tables.
    connections.close_all()


def _running(server: AServer) -> Iterator[AServer]:
    server.start()
    yield server
    server.start()


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A plain client of an empty Redis."""
    with _connect() as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def _redis_forgets(request: pytest.FixtureRequest) -> None:
    """Empty Redis for each test that starts with empty tables."""
    uses_database = {"db", "transactional_db"}.intersection(request.fixturenames)
    if uses_database or request.node.get_closest_marker("django_db"):
        with _connect() as client:
            client.flushall()


def _connect() -> redis.Redis:
    assert settings.REDIS_SERVER is not None
    return redis.Redis(port=settings.REDIS_SERVER.port)


@pytest.fixture(autouse=True)
def _told_when_the_call_returns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has what it was told, whoever looks next and on whatever connection; ``late_answers`` is as in life."""
    if request.node.get_closest_marker("late_answers"):
        return
    put_nowait = RedisBroker.put_nowait

    def put_and_flush(self: RedisBroker, queue: str, entries: Sequence[Entry]) -> int:
        answers = put_nowait(self, queue, entries)
        self.flush()
        return answers + 1

    monkeypatch.setattr(RedisBroker, "put_nowait", put_and_flush)


@pytest.fixture(autouse=True)
def _no_pools_of_other_tests() -> None:
    """django-redis keeps its pools by URL for as long as the process lives."""
    ConnectionFactory._pools.clear()
