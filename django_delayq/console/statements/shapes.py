"""Values that go into the console's statements and come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

Scalar = str | int | float | bool | None


class RollupKey(NamedTuple):
    """The key of one rollup: begin and length in seconds, queue and topic."""

    at: datetime
    seconds: int
    queue: str
    topic: str


class DueCount(NamedTuple):
    """The messages of one queue that fall due in the span at ``place``, with the topics of the first of them."""

    place: int
    # At most one more than the cap.
    number: int
    topics: Sequence[str]


class Vacuum(NamedTuple):
    """The state of the message table's storage: how many dead rows it has, and when it was last vacuumed."""

    dead_rows: int | None = None
    at: datetime | None = None
