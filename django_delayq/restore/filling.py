"""Puts messages into Redis, batch by batch: for the loader of a worker and for a restore."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ..broker.base import Entry, Index, Put
from ..core import failpoints
from ..core.clock import to_tenths

# The time that a loader may be silent before another process may load instead. Seconds.
LOADER_LEASE = 10.0
# The time between two messages to Redis by which a restore renews the lease. Redis answers them after the batch that is
# being put. Seconds.
MARK_INTERVAL = 0.5

# The last due time (None when reading by id) and the last id of a batch.
BatchEnd = tuple[datetime | None, int]


class Batch(NamedTuple):
    """Messages that are put into Redis together. ``end`` is where reading goes on after this batch."""

    entries: list[Entry]
    end: BatchEnd = (None, 0)


@dataclass(frozen=True, slots=True)
class Load:
    """The loading of all queues up to the horizon, which ``worker`` has begun as the loader."""

    broker: Index
    worker: str
    horizon_tenths: int

    def mark(self, upto: datetime | None = None) -> bool:
        """Renew the lease, and tell Redis up to which due time all queues are loaded (None: no further than before).

        Return whether ``worker`` is still the loader.
        """
        upto_tenths = None if upto is None else to_tenths(upto)
        return self.broker.loaded(worker=self.worker, upto_tenths=upto_tenths, lease=LOADER_LEASE)

    def finish(self) -> None:
        """Tell Redis that all queues are loaded up to the horizon."""
        self.broker.loaded(worker=self.worker, upto_tenths=self.horizon_tenths, lease=None)

    def abandon(self) -> None:
        """Let another process load: something was left out."""
        self.broker.loaded(worker=self.worker, upto_tenths=None, lease=None)


def fill(
    batches: Iterable[Batch],
    put: Callable[[list[Entry]], Put],
    *,
    load: Load | None = None,
    read_ahead: int = 0,
) -> Generator[tuple[Batch, Put]]:
    """Put each batch, and yield it with the answer. Afterwards renew the lease of ``load`` if it is time.

    While one batch is being put, up to ``read_ahead`` others are read, so that neither waits for the other.
    """
    done = _put_reading_ahead(batches, put, read_ahead) if read_ahead else _put_in_turn(batches, put)
    marked = time.monotonic()
    with closing(done):
        for batch, answer in done:
            yield batch, answer
            failpoints.reach("mid_restore")
            if load is not None and time.monotonic() - marked >= MARK_INTERVAL:
                if not load.mark():
                    # The lease has run out, and another process may be the loader now. It begins where Redis says.
                    load = None
                marked = time.monotonic()


def _put_in_turn(batches: Iterable[Batch], put: Callable[[list[Entry]], Put]) -> Generator[tuple[Batch, Put]]:
    for batch in batches:
        yield batch, put(batch.entries)


def _put_reading_ahead(
    batches: Iterable[Batch], put: Callable[[list[Entry]], Put], most: int
) -> Generator[tuple[Batch, Put]]:
    with ThreadPoolExecutor(1, thread_name_prefix="delayq-restore") as pool:
        waiting: deque[tuple[Batch, Future[Put]]] = deque()
        try:
            for batch in batches:
                while waiting and (len(waiting) == most or waiting[0][1].done()):
                    first, answer = waiting.popleft()
                    yield first, answer.result()
                waiting.append((batch, pool.submit(put, batch.entries)))
            for batch, answer in waiting:
                yield batch, answer.result()
        finally:
            # Puts that have not begun are dropped: if Redis is away, each of them would wait for its timeout.
            for _batch, answer in waiting:
                answer.cancel()
