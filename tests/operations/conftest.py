"""Fixtures that start workers on a Redis of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from django_delayq.broker import publisher
from testproject.servers import RedisServer
from tests.integration.test_sentinel import trio
from tests.workers import Worker

__all__ = ["trio"]

HASTY: dict[str, Any] = {"GRACE": 0.3, "POLL_INTERVAL": 0.1}

Configure = Callable[..., None]
Start = Callable[..., Worker]


class ThisRedis(RedisServer):
    """A Redis server by another program than the usual one."""

    def __init__(self, program: Path, *extra: str) -> None:
        super().__init__(*extra)
        self.program = program

    def _command(self) -> list[str]:
        return [str(self.program), *super()._command()[1:]]


@pytest.fixture
def configure(settings: Any) -> Configure:
    """Change DELAYQ, for this process and for the workers started from now on."""

    def change(**values: Any) -> None:
        settings.DELAYQ = {**settings.DELAYQ, **values}
        publisher.get.cache_clear()

    change(**HASTY)
    return change


@pytest.fixture
def start(transactional_db: None, configure: Configure) -> Iterator[Start]:
    """Start workers, which are killed after the test."""
    with ExitStack() as stack:

        def begin(*arguments: str, **options: Any) -> Worker:
            return stack.enter_context(Worker("--processes", "1", *arguments, **options))

        yield begin


def of(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port)
