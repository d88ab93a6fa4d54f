"""Values that go into the console's statements and come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

Scalar = str | int | float | bool | None


class RollupKey(NamedTuple):
    """The key of one rollup: begin (seconds since 1970) and length in seconds, queue and topic."""

    at: int
    seconds: int
    queue: str
    topic: str


class RollupWindow(NamedTuple):
    """A time to sum rollups over: from ``start`` on, in steps of ``step`` seconds."""

    name: str
    start: datetime
    step: int


class StepCounts(NamedTuple):
    """The sums of one queue in one step of a window, in the order of ``Rollup.COUNTS``."""

    window: str
    step: int
    queue: str
    counts: list[int]


class DueRange(NamedTuple):
    """The scheduled messages of a queue that fall due from ``start`` on and before ``end``; they belong to a bar."""

    bar: int
    queue: str
    start: datetime
    end: datetime


class DueCount(NamedTuple):
    """A range with the number of its messages (at most one more than the cap) and the topics of the first of them."""

    range: DueRange
    number: int
    topics: Sequence[str]


class Vacuum(NamedTuple):
    """The state of the message table's storage: how many dead rows it has, and when it was last vacuumed."""

    dead_rows: int | None = None
    at: datetime | None = None
