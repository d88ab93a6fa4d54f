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
def bench(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[Bench]:
    """Return a bench with a broker of each kind."""
    made = MAKERS[request.param]()
    yield Bench(made)
    if isinstance(made, RedisBroker):
        made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that the tests of a module may stop without disturbing others."""
    with RedisServer() as running:
        yield running
