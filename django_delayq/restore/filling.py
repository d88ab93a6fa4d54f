"""Puts messages into Redis, batch by batch: for the loader and the sweeper of a worker, and for a restore."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import NamedTuple, Self

from django.db import connections

from ..broker import RedisBroker
from ..broker.base import Entry, Put
from ..core.exceptions import BrokerFailing, BrokerUnavailable
from .reading import Batch

# The time that a loader may be silent before another process may load instead. Seconds.
LOADER_LEASE = 10.0
# The time between two renewals of the lease, in seconds. Redis may answer one late: after the batch that is being put.
RENEWAL_INTERVAL = LOADER_LEASE / 20


class Load(NamedTuple):
    """The loading of all queues up to the horizon, which ``worker`` has begun as the loader."""

    broker: RedisBroker
    worker: str
    horizon_tenths: int

    def renew(self) -> bool:
        """Renew the lease. Return whether ``worker`` is still the loader."""
        return self.broker.loaded(worker=self.worker, upto_tenths=None, lease=LOADER_LEASE)

    def finish(self) -> None:
        """Tell Redis that all queues are loaded up to the horizon."""
        self.broker.loaded(worker=self.worker, upto_tenths=self.horizon_tenths, lease=None)

    def abandon(self) -> None:
        """Let another process load at once what this one has left out."""
        with suppress(BrokerUnavailable):
            self.broker.loaded(worker=self.worker, upto_tenths=None, lease=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # While Redis is away, no answer would come. A load that the garbage collector ends may ask nobody: this thread
        # may be in the middle of a query, on the same connection.
        if error is not None and not isinstance(error, BrokerUnavailable | GeneratorExit):
            self.abandon()


def fill(
    broker: RedisBroker, batches: Iterable[Batch], *, load: Load | None = None, read_ahead: int = 0
) -> Generator[tuple[Batch, dict[str, Put]]]:
    """Put what is missing of each batch into Redis, and yield it with the answers by queue.

    Renews the lease of ``load``. While one batch is being put, up to ``read_ahead`` others are read, so that neither
    waits for the other. Raises ``BrokerFailing`` when Redis is lost meanwhile.
    """
    done = ((batch, broker.fill(batch.by_queue)) for batch in batches)
    if read_ahead:
        done = _put_reading_ahead(broker, batches, read_ahead)
    renewed = time.monotonic()
    with closing(done):
        for batch, answers in done:
            if any(answer.beyond for answer in answers.values()) and broker.read_meta().horizon_tenths is None:
                raise BrokerFailing("Redis was lost while it was being filled")
            yield batch, answers
            if load is not None and time.monotonic() - renewed >= RENEWAL_INTERVAL:
                if not load.renew():
                    # The lease has run out, and another process may be the loader now. It begins where Redis says.
                    load = None
                renewed = time.monotonic()


def _fill_in_thread(broker: RedisBroker, entries: dict[str, list[Entry]]) -> dict[str, Put]:
    try:
        return broker.fill(entries)
    finally:
        # The broker may have asked the record for the time, on a connection of this thread.
        connections.close_all()


def _put_reading_ahead(
    broker: RedisBroker, batches: Iterable[Batch], most: int
) -> Generator[tuple[Batch, dict[str, Put]]]:
    """Put batches in another thread while this one reads up to ``most`` others. Yields them with their answers."""
    with ThreadPoolExecutor(1, thread_name_prefix="delayq-restore") as pool:
        waiting: deque[tuple[Batch, Future[dict[str, Put]]]] = deque()
        try:
            for batch in batches:
                while waiting and (len(waiting) == most or waiting[0][1].done()):
                    first, answer = waiting.popleft()
                    yield first, answer.result()
                waiting.append((batch, pool.submit(_fill_in_thread, broker, batch.by_queue)))
            for batch, answer in waiting:
                yield batch, answer.result()
        finally:
            # Puts that have not begun are dropped: if Redis is away, each of them would wait for its timeout.
            for _batch, answer in waiting:
                answer.cancel()
