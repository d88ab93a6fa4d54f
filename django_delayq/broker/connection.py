"""Connections to the Redis that the settings name, with timeouts of our own and without retries.

No caller waits longer than one timeout to be connected, whatever the connection takes: see ``TimedConnection``. Those
by TCP lead to the right node where Redis is a cluster: see ``SlotConnection``.

redis-py 8 by default waits 5 s and sends a command again up to ten times. A producer must not keep a web request
waiting that long, and a worker can take messages from the database meanwhile.

It also turns what Redis says, or does not say, into the exceptions of a broker.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import socket
from collections import deque
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from inspect import isfunction, isgeneratorfunction
from typing import Any, ParamSpec, TypeVar

import redis
from django.db import Error as DatabaseError
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..core.exceptions import (
    BrokerFailing,
    BrokerFull,
    BrokerMoved,
    BrokerRubbish,
    BrokerUnavailable,
    ClusterBroker,
    DelayqError,
    ForeignBroker,
)
from ..project.conf import forget_on_change
from .cluster import Cluster, SlotConnection, SlotMoved, SlotPool
from .nodes import nodes_in
from .timed import ANSWERS, TimedConnection

# How the kernel finds out that the network has dropped a connection without notice: it probes an idle one after 15 s,
# and gives up one whose data was not received for 5 s (TCP_USER_TIMEOUT is in ms). Not every system has each of these.
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
# A pool of fewer connections than this gets each of them back after a call, or other users of the pool would have none.
MIN_POOL_TO_PIN = 10

# The options of a connection that say who connects. Older releases of redis-py have others.
WHO = ("driver_info",) if hasattr(redis, "DriverInfo") else ("lib_name", "lib_version")

# The answers of a node of a cluster to a connection that finds no other node.
CLUSTER_ERRORS = (redis.exceptions.MovedError, redis.exceptions.AskError, redis.exceptions.ClusterDownError)
# The beginnings of these answers, for older releases of redis-py, which know such errors in a client of a cluster only.
CLUSTER_WORDS = ("MOVED ", "ASK ", "CLUSTERDOWN ")
# What Redis says when a key, a score or a field is not what this package writes there.
NOT_OURS = re.compile("WRONGTYPE|not an integer|not a valid float|overflow|attempt to")

# Errors that stay what they are. Some calls read the identity of the database, which may not answer.
OURS = (DelayqError, DatabaseError)

# A class, the parameters and the result of a method, and a kind of connection.
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="PinnedConnection")


def connect(address: str, *, timeout: float, cluster: Cluster | None = None) -> redis.Redis:
    """Make a client for a URL or an alias, with ``timeout`` seconds to be connected, and for each answer.

    ``cluster`` is for all clients of one broker, should Redis be a cluster.
    """
    options: dict[str, Any] = {
        "address": address,
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "decode_responses": False,
        "encoding": "utf-8",
        "encoding_errors": "strict",
        "protocol": 2,
    }
    # Else redis-py tells the server its name and its version, in two more round trips.
    options |= dict.fromkeys(WHO, None)
    cluster = cluster or Cluster("")
    if "://" in address:
        found = nodes_in(address)
        if found is not None:
            address, cluster.seeds = found
            cluster.is_seen = True
        # Not from_url(): there the options of the URL win.
        given = {**redis.connection.parse_url(address), **options}
        kind = given.pop("connection_class", redis.Connection)
        return redis.Redis(connection_pool=_pool(kind, given, cluster))
    return redis.Redis(connection_pool=_like(_pool_of(address), options, cluster))


def _pool(kind: Any, given: dict[str, Any], cluster: Cluster) -> redis.ConnectionPool:
    """Make a pool of connections of this kind. Those by TCP find the right node where Redis is a cluster."""
    is_by_tcp = issubclass(kind, redis.Connection)
    given |= _keepalive(kind)
    if not is_by_tcp:
        return redis.ConnectionPool(connection_class=_timed(kind), **given)
    cluster.seeds = cluster.seeds or ((given.get("host", "localhost"), given.get("port", 6379)),)
    return SlotPool(connection_class=_routed(kind), cluster=cluster, **given)


@cache
def _timed(kind: type[redis.connection.AbstractConnection]) -> type[Any]:
    """Return a timed connection of this kind."""
    return type(kind.__name__, (TimedConnection, kind), {})


@cache
def _routed(kind: type[redis.connection.AbstractConnection]) -> type[Any]:
    """Return a connection of this kind that leads to the owner of a slot."""
    return type(kind.__name__, (SlotConnection, kind), {"_read": kind.read_response})


@lru_cache(maxsize=1)
def _pool_of(alias: str) -> Any:
    """Return the pool of a django-redis cache. Django would make a cache for each thread that asks."""
    from django_redis import get_redis_connection

    client = get_redis_connection(alias)
    if isinstance(client, redis.RedisCluster):
        raise redis.exceptions.RedisClusterException
    return client.connection_pool


forget_on_change(_pool_of, "CACHES")


def _keepalive(kind: type[redis.connection.AbstractConnection]) -> dict[str, Any]:
    """Return the options of connections of this kind that keep dead ones from staying: of TCP only."""
    if not issubclass(kind, redis.Connection):
        return {}
    found = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
    return {"socket_keepalive": True, "socket_keepalive_options": found}


def _like(pool: Any, options: dict[str, Any], cluster: Cluster) -> redis.ConnectionPool:
    """Make a pool to the same server as the pool of a django-redis cache, with our own options."""
    given = dict(pool.connection_kwargs)
    # redis-py adds these to a pool's options, and each new pool makes its own.
    for name in ("connection_pool", "parser_class", "driver_info", "maint_notifications_config", "event_dispatcher"):
        given.pop(name, None)
    given.update(options)
    kind = pool.connection_class
    if not isinstance(pool, SentinelConnectionPool):
        return _pool(kind, given, cluster)
    given |= _keepalive(kind) | {"connection_class": _timed(kind)}
    sentinel = _with_timeouts(pool.sentinel_manager, options)
    return SentinelConnectionPool(pool.service_name, sentinel, is_master=True, check_connection=False, **given)


def _with_timeouts(theirs: Sentinel, options: dict[str, Any]) -> Sentinel:
    """Copy a Sentinel client, with our own timeouts: when a whole site is away, so are the sentinels."""
    # Unlike a connection, a client no longer takes retry_on_timeout.
    ours = {name: value for name, value in options.items() if name not in ("address", "retry_on_timeout", *WHO)}
    copied = copy.copy(theirs)
    copied.sentinel_kwargs = {**theirs.sentinel_kwargs, **ours}
    addresses = [sentinel.connection_pool.connection_kwargs for sentinel in theirs.sentinels]
    copied.sentinels = [redis.Redis(a["host"], a["port"], **copied.sentinel_kwargs) for a in addresses]
    return copied


# --- connections that are kept ----------------------------------------------------------------------------------------


class PinnedConnection:
    """A connection that is kept out of its pool between commands. One thread at a time uses it."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.pool = pool
        # The connection of redis-py.
        self.raw: Any = pool.get_connection()
        # The process that made the connection, which is of no use to a process that was forked from it.
        self.pid = os.getpid()

    def close(self) -> None:
        """Disconnect, and return the connection to its pool."""
        with contextlib.suppress(Exception):
            self.raw.disconnect()
            if self.pid == os.getpid():
                self.pool.release(self.raw)


def pop_idle(idle: deque[C]) -> C | None:
    """Take a connection of this process out of the idle ones; None when there is none."""
    while idle:
        try:
            pinned = idle.pop()
        except IndexError:
            # Another thread took the last one.
            break
        if pinned.pid == os.getpid():
            return pinned
        pinned.close()
    return None


def is_closed(raw: Any) -> bool:
    """Return whether the server has closed a connection that waits for no answer. Servers may close idle ones.

    While no answer is outstanding, the only thing to read is the end of the connection.
    """
    try:
        return bool(raw.can_read(0))
    except Exception:  # noqa: BLE001
        return True


class ScriptConnections:
    """Calls scripts in place of a client, whose work around a short call would take a third of its time.

    Between calls it keeps one connection and gives others back to the pool. So a process has no more
    connections than threads that call Redis at one moment, and this one. Any thread may call it. The idle connection is
    in a deque, whose operations are atomic: the thread that pops it owns it until it appends it again.
    """

    def __init__(self, pool: Callable[[], redis.ConnectionPool]) -> None:
        self._pool = pool
        self._idle: deque[PinnedConnection] = deque()

    def execute_command(self, *command: Any) -> Any:
        """Send a command and wait for the answer. Raises ``RedisError`` and ``OSError``; sends nothing twice."""
        pinned = self._pop_idle() or PinnedConnection(self._pool())
        try:
            pinned.raw.send_command(*command)
            answer = pinned.raw.read_response()
        except BaseException:
            # Closed, because a server that refuses a call may have become a replica, and an answer may still be on its
            # way.
            pinned.close()
            raise
        if self._idle or pinned.pool.max_connections < MIN_POOL_TO_PIN:
            pinned.pool.release(pinned.raw)
        else:
            self._idle.append(pinned)
        return answer

    def _pop_idle(self) -> PinnedConnection | None:
        """Take an idle connection that works and leads to the right server; close the others. None: none is left."""
        while (pinned := pop_idle(self._idle)) is not None:
            # After a failover a pool that asks Sentinel disowns its connections to the former master.
            if pinned.pool.owns_connection(pinned.raw) and not is_closed(pinned.raw):
                return pinned
            pinned.close()
        return None


# --- errors -----------------------------------------------------------------------------------------------------------


def translated(method: Callable[P, R]) -> Callable[P, R]:
    """Have a method turn every error of Redis, its client and its answers into ``BrokerUnavailable`` or a kind of it.

    An answer that is not what it should be raises anything: a server need not be Redis, and people write into keys.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OURS:
            raise
        except Exception as error:
            raise _translate(error) from error

    return call


def all_translated(kind: type[T]) -> type[T]:
    """Have every public method of a class translate errors. A generator has to translate its own itself."""
    for name, method in [*vars(kind).items()]:
        if isfunction(method) and not isgeneratorfunction(method) and not name.startswith("_"):
            setattr(kind, name, translated(method))
    return kind


def _translate(error: Exception) -> BrokerUnavailable:
    """Return the exception of a broker that stands for an error of redis-py."""
    if isinstance(error, SlotMoved):
        return BrokerMoved(str(error))
    if isinstance(error, CLUSTER_ERRORS) or str(error).startswith(CLUSTER_WORDS):
        return ClusterBroker()
    if str(error).startswith("FOREIGN "):
        # From scripts/include/owner.lua.
        foreign = ForeignBroker()
        foreign.refused = str(error).rpartition(" ")[2]
        return foreign
    kind: type[BrokerUnavailable] = BrokerFailing if isinstance(error, ANSWERS) else BrokerUnavailable
    if "used memory > 'maxmemory'" in str(error):
        kind = BrokerFull
    elif NOT_OURS.search(str(error)) or not isinstance(error, redis.RedisError | OSError):
        kind = BrokerRubbish
    return kind(f"{type(error).__name__}: {error}")
