"""Fixtures with the Redis of this run. Where the packages of Redis are missing, ``without_redis`` takes their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import redis
from django_redis.pool import ConnectionFactory

from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from testproject.servers import RedisServer
from tests import settings
from tests.conftest import running, uses_database


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """The running Redis server. It is started again after the test if the test has ended it."""
    assert settings.REDIS_SERVER is not None
    yield from running(settings.REDIS_SERVER)


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A plain client of an empty Redis."""
    with _connect() as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def _redis_is_empty(request: pytest.FixtureRequest, _no_database_of_other_tests: None) -> None:
    """Empty Redis for each test that starts with empty tables."""
    if uses_database(request.node):
        with _connect() as client:
            client.flushall()


@pytest.fixture(autouse=True)
def _no_pools_of_other_tests() -> None:
    """Drop the pools that django-redis keeps by URL for as long as the process lives."""
    ConnectionFactory._pools.clear()


@pytest.fixture
def puts_are_flushed(monkeypatch: pytest.MonkeyPatch, redis_has_time: None) -> None:
    """Make each put wait for Redis's answer, for tests that look into Redis right after a call.

    In production, and in all other tests, the answer is still on its way when the call returns.
    """
    put = RedisBroker.send_put

    def put_and_flush(self: RedisBroker, queue: str, entries: Sequence[Entry]) -> bool:
        put(self, queue, entries)
        self.flush()
        return True

    monkeypatch.setattr(RedisBroker, "send_put", put_and_flush)


def _connect() -> redis.Redis:
    assert settings.REDIS_SERVER is not None
    return redis.Redis(port=settings.REDIS_SERVER.port)
