"""Redis behind Sentinel, as django-redis is set up for it: three real processes."""

from __future__ import annotations

import redis
from django.test import override_settings

from django_delayq.broker import connection
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.redis_servers import SentinelServer
from tests.support.workers import eventually


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
