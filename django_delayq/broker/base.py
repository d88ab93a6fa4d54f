"""What a broker promises. It holds ids and due times only; the record decides everything else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol

from ..clock import from_us, to_us

# Ids in one call to the broker, so that no call keeps others waiting for long.
BATCH = 1000


class Entry(NamedTuple):
    """One message for the broker: its id, when it falls due (microseconds since 1970), how urgent it is then."""

    id: int
    due_us: int
    priority: int

    @classmethod
    def at(cls, pk: int, due_at: datetime, priority: int) -> Entry:
        return cls(pk, to_us(due_at), priority)

    @property
    def due_at(self) -> datetime:
        return from_us(self.due_us)


class DueTicket(NamedTuple):
    """An id taken, when it became ready (tenths of a ms, by the broker; None: not known), its rank among those."""

    id: int
    ready_tenths: int | None
    partition: int | None
    rank: int = 0
    # Seconds until it falls due; not above 0 for one that is.
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Put:
    """What became of the entries of a put."""

    put: int = 0
    present: int = 0
    beyond: int = 0

    def __add__(self, other: Put) -> Put:
        return Put(self.put + other.put, self.present + other.present, self.beyond + other.beyond)


@dataclass(frozen=True, slots=True)
class Taken:
    """Ids taken, how many more are ready, and in how many seconds the next one falls due (None: none waits).

    ``behind``: more is due than one call makes ready, and only what is ready is taken by its priority.
    """

    tickets: list[DueTicket] = field(default_factory=list)
    left: int = 0
    next_due: float | None = None
    behind: bool = False
    # When the answer came, from where next_due counts (monotonic).
    at: float = field(default_factory=time.monotonic)

    @property
    def wait(self) -> float | None:
        """``next_due`` as of now; 0 when it has passed."""
        return None if self.next_due is None else max(0.0, self.at + self.next_due - time.monotonic())


class Broker(Protocol):
    """Every verb may be called again when its answer was lost, and from any number of processes at once.

    Each raises ``BrokerUnavailable`` when the broker does not answer.
    """

    def put(self, queue: str, entries: Sequence[Entry], *, fill: bool = False) -> Put:
        """Make ids known. ``fill=True`` adds what is missing and never makes anything later than it is."""

    def remove(self, queue: str, ids: Sequence[int]) -> None:
        """Forget ids. A hint that saves a look-up: the claim refuses them anyway."""

    def take(self, queue: str, limit: int, within: float = 0.0) -> Taken:
        """Up to ``limit`` ids that are due, best priority first; then what falls due ``within`` so many seconds.

        A broker that is asked by polling leaves out what is not due yet.
        """

    def exclusively(self) -> AbstractContextManager[object]:
        """Hold what ``take`` returns until it is claimed."""

    def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Sleep until ``timeout`` seconds have passed, something may be due earlier (True), or ``wake`` is called."""

    def stop_listening(self) -> None:
        """Until the next ``wait``, leave wake-ups to others."""

    def wake(self) -> None:
        """End a ``wait`` in another thread of this process."""

    def ring(self, queue: str) -> None:
        """Let another process look at a queue, because this one is busy."""

    def close(self) -> None:
        """Give back connections."""
