"""Puts the messages of one queue into Redis, batch by batch: for the loader of a worker and for a restore."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from .. import failpoints
from ..broker.base import Entry, Index, Put
from ..clock import to_tenths
from ..exceptions import BrokerUnavailable

# The time that the loader of a queue may be silent before another process may load the queue instead. Seconds.
LOADER_LEASE = 10.0

# The last due time (None when reading by id) and the last id of a batch.
BatchEnd = tuple[datetime | None, int]


class Batch(NamedTuple):
    """Messages that are put into Redis together. ``end`` is where reading goes on after this batch."""

    entries: list[Entry]
    end: BatchEnd = (None, 0)


@dataclass(frozen=True, slots=True)
class Load:
    """The loading of a queue up to its horizon, which ``worker`` has begun as the queue's loader."""

    broker: Index
    queue: str
    worker: str
    horizon_tenths: int
    # Redis is told after a batch how far the queue is loaded, but not more often than this. Seconds; 0: every batch.
    mark_interval: float = 0.0
    # True: stop with ``BrokerUnavailable`` when Redis does not know this loader any more.
    required: bool = True

    def mark(self, upto: datetime) -> bool:
        """Tell Redis up to which due time the queue is loaded. Return whether ``worker`` is still the loader."""
        upto_tenths = to_tenths(upto)
        return self.broker.loaded(self.queue, worker=self.worker, upto_tenths=upto_tenths, lease=LOADER_LEASE)

    def finish(self) -> None:
        """Tell Redis that the queue is loaded up to its horizon."""
        self.broker.loaded(self.queue, worker=self.worker, upto_tenths=self.horizon_tenths, lease=None)


def fill(
    batches: Iterable[Batch],
    put: Callable[[list[Entry]], Put],
    *,
    load: Load | None = None,
    read_ahead: int = 0,
    failpoint: str,
) -> Generator[tuple[Batch, Put]]:
    """Put each batch, and yield it with the answer. With a ``load``, tell Redis afterwards how far the queue is loaded.

    While one batch is being put, up to ``read_ahead`` others are read, so that neither waits for the other.
    """
    done = _put_reading_ahead(batches, put, read_ahead) if read_ahead else _put_in_turn(batches, put)
    marked = time.monotonic()
    with closing(done):
        for batch, answer in done:
            yield batch, answer
            failpoints.reach(failpoint)
            if load is None or time.monotonic() - marked < load.mark_interval:
                continue
            if not load.mark(batch.entries[-1].due_at):
                if load.required:
                    raise BrokerUnavailable("Redis was lost while it was being loaded")
                # The lease has run out, and another process may be the loader now. It goes on from the last mark.
                load = None
            marked = time.monotonic()
    if load is not None:
        load.finish()


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
