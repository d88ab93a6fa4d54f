"""Questions that tests ask Redis, past the broker."""

from __future__ import annotations

from typing import Any

import redis

from django_delayq.broker.keys import keys


def held(client: redis.Redis, queue: str = "default", namespace: str = "delayq") -> set[int]:
    """Return the ids in both sets of a queue."""
    of_queue = keys(namespace, queue)
    members: Any = [id_ for name in (of_queue.delayed, of_queue.ready) for id_ in client.zrange(name, 0, -1)]
    return {int(id_) for id_ in members}


def texts(client: redis.Redis) -> bytes:
    """Return all that stands in Redis as one text: keys, fields, members and values."""
    found: list[Any] = []
    for key in client.scan_iter():
        kind = client.type(key)
        found.append(key)
        if kind == b"hash":
            found += [part for pair in client.hgetall(key).items() for part in pair]
        elif kind == b"zset":
            found += client.zrange(key, 0, -1)
        elif kind == b"list":
            found += client.lrange(key, 0, -1)
        else:
            found.append(client.get(key))
    return b"\n".join(part for part in found if part is not None)


def content(client: redis.Redis) -> dict[Any, Any]:
    """Return all keys, each with its value as Redis dumps it."""
    return {key: client.dump(key) for key in client.scan_iter()}


def calls(client: redis.Redis) -> int:
    """Return how many scripts ran since the last call."""
    stats = client.info("commandstats")
    client.config_resetstat()
    return sum(int(stats.get(name, {}).get("calls", 0)) for name in ("cmdstat_evalsha", "cmdstat_eval"))
