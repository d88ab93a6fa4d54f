"""Reads the report of a Redis server about itself."""

from __future__ import annotations

from typing import Any

import redis

from .base import ServerInfo


def read(client: redis.Redis) -> ServerInfo:
    """Ask the server about itself. A value that the server does not know, or does not permit to read, is None."""
    server, memory = _info(client, "server"), _info(client, "memory")
    persistence, replication = _info(client, "persistence"), _info(client, "replication")
    cluster = _info(client, "cluster")
    return ServerInfo(
        version=_text(server.get("valkey_version") or server.get("redis_version")),
        role=_text(replication.get("role")),
        uptime=server.get("uptime_in_seconds"),
        memory=memory.get("used_memory"),
        max_memory=memory.get("maxmemory"),
        policy=_text(memory.get("maxmemory_policy")) or _config(client, "maxmemory-policy"),
        cluster=None if not cluster else bool(cluster.get("cluster_enabled")),
        evicted=_info(client, "stats").get("evicted_keys"),
        persistence="aof" if persistence.get("aof_enabled") else _snapshots(client),
    )


def _snapshots(client: redis.Redis) -> str | None:
    save = _config(client, "save")
    if save is None:
        return None
    return "rdb" if save else "none"


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.info(section)
    except redis.exceptions.ResponseError:
        # The server does not permit the command, or does not know it.
        return {}
    return found


def _config(client: redis.Redis, name: str) -> str | None:
    try:
        found = client.config_get(name)
    except redis.exceptions.ResponseError:
        return None
    return _text(found.get(name))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
