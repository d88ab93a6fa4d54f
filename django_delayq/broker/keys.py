"""Every Redis key, in one place. One hash tag per queue and partition, so that a script's keys share a slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

# One partition per queue for now; the number is part of the keys and of the log so that more can follow.
PARTITION = 0

# Scores, as in scripts/include/places.lua.
RANKS = 256
BAND = 2**45


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one queue."""

    delayed: str  # zset: id → due tenth of a ms, and in the fraction the rank (0 best … 200), in 256ths
    ready: str  # zset: id → rank × 2^45 + the tenth of a ms at which it became ready
    meta: str  # hash: horizon, loaded, run_id, replid, identity, tick, loader, loader_until
    wake: str  # list: holds a token when somebody should look


@cache
def keys(namespace: str, queue: str) -> Keys:
    """The keys of a queue in a namespace."""
    tag = f"{{{namespace}:{queue}:{PARTITION}}}"
    return Keys(f"{tag}:delayed", f"{tag}:ready", f"{tag}:meta", f"{tag}:wake")


def namespace(prefix: str, using: str) -> str:
    """Messages of another database alias have ids of their own, so they get keys of their own."""
    return prefix if using == "default" else f"{prefix}@{using}"
