"""Redis servers of a test's own: by another program, or three that a Sentinel watches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from testproject.servers import RedisServer
from tests.support.workers import eventually


class ThisRedis(RedisServer):
    """A Redis server by another program than the usual one."""

    def __init__(self, program: Path, *extra: str) -> None:
        super().__init__(*extra)
        self.program = program

    def _command(self) -> list[str]:
        return [str(self.program), *super()._command()[1:]]


class SentinelServer(RedisServer):
    """redis-server as a sentinel, which keeps its state in its configuration file."""

    def __init__(self, watched: RedisServer) -> None:
        super().__init__()
        self.watched = watched

    def _command(self) -> list[str]:
        file = self.directory / "sentinel.conf"
        if not file.exists():
            file.write_text(
                f"port {self.port}\n"
                "bind 127.0.0.1\n"
                f"sentinel monitor main 127.0.0.1 {self.watched.port} 1\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 2000\n"
            )
        return [super()._command()[0], str(file), "--sentinel"]


@pytest.fixture
def trio() -> Iterator[tuple[RedisServer, RedisServer, SentinelServer]]:
    with RedisServer() as master, RedisServer() as replica:
        follower = redis.Redis.from_url(replica.url)
        follower.replicaof("127.0.0.1", master.port)
        eventually(lambda: follower.info("replication")["master_link_status"] == "up")
        with SentinelServer(master) as sentinel:
            watcher = redis.Redis.from_url(sentinel.url)
            eventually(lambda: watcher.sentinel_slaves("main"))
            watcher.close()
            follower.close()
            yield master, replica, sentinel


def of(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port)
