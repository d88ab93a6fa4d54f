"""The names of all Redis keys. One hash tag per queue puts the keys of a script into one slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

# Factors in the scores, as in scripts/include/places.lua.
RANKS = 256
BAND = 2**45


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one queue."""

    delayed: str  # sorted set: id → due tenth of a ms, plus the rank (0 best … 200 worst) in 256ths
    ready: str  # sorted set: id → rank × 2^45 + due tenth of a ms
    meta: str  # hash: horizon, loaded, run_id, replid, identity, tick, skew, loader, loader_until
    wake: str  # list: holds one token while a worker should take from this queue


@cache
def keys(namespace: str, queue: str) -> Keys:
    """Return the keys of a queue in a namespace."""
    tag = f"{{{namespace}:{queue}}}"
    return Keys(f"{tag}:delayed", f"{tag}:ready", f"{tag}:meta", f"{tag}:wake")


def namespace(prefix: str, using: str) -> str:
    """Return the namespace of a database alias. Each alias has ids of its own, so each gets keys of its own."""
    return prefix if using == "default" else f"{prefix}@{using}"
