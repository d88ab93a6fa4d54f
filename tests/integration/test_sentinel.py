"""Redis behind Sentinel, as django-redis is set up for it: three real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from django.test import override_settings

from django_delayq.broker import connection
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.workers import eventually


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


def test_commands_follow_the_master_that_sentinel_names(
    trio: tuple[RedisServer, RedisServer, SentinelServer],
) -> None:
    master, replica, sentinel = trio
    caches = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "guarded": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://main/0",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": [("127.0.0.1", sentinel.port)],
            },
        },
    }
    with override_settings(
        CACHES=caches,
        DJANGO_REDIS_CONNECTION_FACTORY="django_redis.pool.SentinelConnectionFactory",
        DELAYQ={"REDIS": "guarded"},
    ):
        client = connection.connect(conf.get(), timeout=1.0)
        eventually(lambda: port_of(client) == master.port)

        master.kill()

        eventually(lambda: port_of(client) == replica.port)
        client.connection_pool.disconnect()


def port_of(client: redis.Redis) -> int | None:
    try:
        return int(client.config_get("port")["port"] or 0)
    except redis.RedisError:
        return None
