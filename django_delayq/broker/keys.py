"""The names of all Redis keys. They share one hash tag, since scripts work on several queues."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

# Factors in the scores, as in scripts/include/scores.lua.
RANKS = 256
BAND = 2**45


@dataclass(frozen=True)
class Keys:
    """The keys of one queue, and those that all queues share."""

    delayed: str  # sorted set: id → due tenth of a ms, plus the rank (0 best … 200 worst) in 256ths
    ready: str  # sorted set: id → rank × 2^45 + due tenth of a ms
    wake: str  # list: holds one token while a worker that names its queues should take from this queue
    blocked: str  # hash: id → the name under which it is blocked; followed by a name, sorted set: id → score in ready
    queues: str  # of all queues; sorted set: queue → 0 while ids are ready, else the due tenth of its first delayed id
    wake_all: str  # of all queues; list: holds one token while a worker that serves all queues should take
    blocked_counts: str  # of all queues; hash: queue, colon, name → number of ids that are blocked there
    duty: str  # of all queues, and followed by the digest of a duty; string: the worker that has it
    calls: str  # of all queues, and followed by the digest of a token and a verb; hash: window, count
    # of all queues; hash: horizon, loaded, run_id, replid, identity, tick, cleared, requested, loader, loader_until,
    # swept
    meta: str

    @cached_property
    def queue(self) -> str:
        """The name of the queue, which holds no colon."""
        return self.delayed.rsplit(":", 2)[1]


@cache
def keys(namespace: str, queue: str) -> Keys:
    """Return the keys of a queue in a namespace."""
    tag = f"{{{namespace}}}"
    return Keys(
        f"{tag}:{queue}:delayed",
        f"{tag}:{queue}:ready",
        f"{tag}:{queue}:wake",
        f"{tag}:{queue}:aside",
        f"{tag}:queues",
        f"{tag}:wake",
        f"{tag}:asides",
        f"{tag}:duty",
        f"{tag}:calls",
        f"{tag}:meta",
    )


def namespace(prefix: str, using: str) -> str:
    """Return the namespace of a database alias. Each alias has ids of its own, so each gets keys of its own."""
    return prefix if using == "default" else f"{prefix}@{using}"
