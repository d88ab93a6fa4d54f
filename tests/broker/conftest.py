"""Brokers for the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from django_delayq.broker.base import Broker
from django_delayq.broker.redis import RedisBroker
from testproject.servers import RedisServer

from .bench import Bench, database_broker, redis_broker

MAKERS: dict[str, Callable[[], Broker]] = {"redis": redis_broker, "database": database_broker}


@pytest.fixture(params=sorted(MAKERS))
def make_broker(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[Callable[[], Broker]]:
    """Make brokers of one kind, and close them after the test."""
    made: list[Broker] = []

    def make() -> Broker:
        made.append(MAKERS[request.param]())
        return made[-1]

    yield make
    for broker in made:
        if isinstance(broker, RedisBroker):
            broker.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that the tests of a module may stop without disturbing others."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def bench(make_broker: Callable[[], Broker]) -> Bench:
    return Bench(make_broker())
