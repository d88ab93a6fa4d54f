"""Connections to the Redis that the settings name, each kind with the patience it may have.

redis-py 8 by default waits 5 s and sends a command again up to ten times. None of ours does: who schedules must not
keep a web request waiting, and a worker goes on by the database instead.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..conf import Settings

# How long a worker waits for an answer before it takes Redis for away. Seconds.
WORKER_TIMEOUT = 2.0


def connect(settings: Settings, *, timeout: float) -> redis.Redis:
    """A client with ``timeout`` seconds for connecting and for each answer."""
    assert settings.REDIS is not None
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "decode_responses": False,
        "protocol": 2,
    }
    if "://" in settings.REDIS:
        return redis.Redis(connection_pool=redis.ConnectionPool.from_url(settings.REDIS, **options))
    return redis.Redis(connection_pool=_like(_alias_pool(settings.REDIS), options))


def _alias_pool(alias: str) -> Any:
    from django_redis import get_redis_connection

    return get_redis_connection(alias).connection_pool


def _like(pool: Any, options: dict[str, Any]) -> redis.ConnectionPool:
    """A pool to the same server as a django-redis cache, with our own patience."""
    given = dict(pool.connection_kwargs)
    # A pool remembers things of its own here that a new pool makes for itself.
    for name in (
        "connection_pool",
        "parser_class",
        "driver_info",
        "maint_notifications_config",
        "event_dispatcher",
    ):
        given.pop(name, None)
    given.update(options)
    if isinstance(pool, SentinelConnectionPool):
        return SentinelConnectionPool(
            pool.service_name, _patient(pool.sentinel_manager, options), is_master=True, check_connection=False, **given
        )
    return redis.ConnectionPool(connection_class=pool.connection_class, **given)


def _patient(theirs: Sentinel, options: dict[str, Any]) -> Sentinel:
    """The same sentinels, asked with our own patience: they are what is away first when a whole site is."""
    # A client, other than a connection, no longer takes retry_on_timeout.
    patience = {name: value for name, value in options.items() if name != "retry_on_timeout"}
    places = [sentinel.connection_pool.connection_kwargs for sentinel in theirs.sentinels]
    return Sentinel(
        [(place["host"], place["port"]) for place in places],
        min_other_sentinels=theirs.min_other_sentinels,
        sentinel_kwargs={**theirs.sentinel_kwargs, **patience},
        force_master_ip=getattr(theirs, "_force_master_ip", None),
        **theirs.connection_kwargs,
    )


class PinnedConnection:
    """A connection that is kept out of its pool between commands, by one thread at a time."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.pool = pool
        self.raw: Any = pool.get_connection()
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Not another process', from which this one was forked."""
        return self._pid == os.getpid()

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self.raw.disconnect()
            if self.is_ours:
                self.pool.release(self.raw)


H = TypeVar("H", bound=PinnedConnection)


def rested(resting: deque[H]) -> H | None:
    """One of those that no thread is using, if there is one that is ours."""
    while resting:
        try:
            pinned = resting.pop()
        except IndexError:
            # Another thread was quicker.
            break
        if pinned.is_ours:
            return pinned
        pinned.close()
    return None


def has_ended(connection: Any) -> bool:
    """Nothing is being asked on it, so whatever there is to read is the end: servers may close what is idle."""
    try:
        return bool(connection.can_read(0))
    except (redis.RedisError, OSError):
        return True


def describe(settings: Settings) -> str:
    """Where Redis is, without secrets."""
    if settings.REDIS is None:
        return "none (delivery by query)"
    if "://" not in settings.REDIS:
        return f"cache alias {settings.REDIS!r}"
    with contextlib.suppress(ValueError):
        parts = redis.connection.parse_url(settings.REDIS)
        if "path" in parts:
            return f"unix:{parts['path']} db {parts.get('db', 0)}"
        return f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)} db {parts.get('db', 0)}"
    return "an URL"
