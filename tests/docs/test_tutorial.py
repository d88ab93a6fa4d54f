"""The tutorial works from its first line to its last, with a real Redis and a real worker."""

from __future__ import annotations

from pathlib import Path

import redis

from testproject.servers import RedisServer

from .blocks import DOCS, blocks
from .project import Project


def test_the_tutorial_ends_with_a_message_that_survived_flushall(
    tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    # A reader needs half a minute to go to the other terminal and back; a test does not.
    with Project(
        tmp_path, redis_server.url, quicker={'delay="5s"': 'delay="1s"', 'delay="30s"': 'delay="20s"'}
    ) as project:
        for block in blocks(DOCS / "tutorial.rst"):
            project.follow(block)
        assert "Order 3 was not paid and is closed" in project.log
