"""The cache alias of a Redis behind a Sentinel, in the form of django-redis."""

from __future__ import annotations

from typing import Any

FACTORY = "django_redis.pool.SentinelConnectionFactory"


def guarded(port: int) -> dict[str, Any]:
    """Return the cache of the master that the Sentinel on this port calls "main"."""
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://main/0",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": FACTORY,
            "SENTINELS": [("127.0.0.1", port)],
        },
    }
