"""The queues that programs pull: what the settings declare of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from . import values

# A name that ends with it stands for all queues whose names begin like it.
PREFIX = "*"
# ``Message.worker`` begins with this while a program has the message. No name of a worker does.
PULLER = "pull:"


class PullQueue(NamedTuple):
    """The terms of a queue that is pulled, for messages and calls that have none of their own."""

    # A message whose lease ran out, or that was answered by a retry, this number of times is dead.
    max_attempts: Annotated[int, values.whole, {"lowest": 1, "highest": 10_000}] = 3
    # Seconds.
    lease: Annotated[float, values.span, {"lowest": 1, "highest": values.YEAR}] = 60.0


def matching(declared: Mapping[str, PullQueue], queue: str) -> PullQueue | None:
    """Return the terms of a queue: of its own name, else of the longest prefix; None when it is not declared."""
    if queue in declared:
        return declared[queue]
    prefixes = [name for name in declared if name.endswith(PREFIX) and queue.startswith(name[:-1])]
    return declared[max(prefixes, key=len)] if prefixes else None
