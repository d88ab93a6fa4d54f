"""Tells Redis about messages that were committed. No error reaches the caller: a sweep puts what Redis missed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from django.core.signals import setting_changed
from django.db import connections, transaction

from . import conf, failpoints
from .broker import index
from .broker.base import Entry, Index
from .exceptions import BrokerUnavailable

logger = logging.getLogger("django_delayq")

# After Redis failed to answer, no caller tries it again for this long. Seconds.
RETRY_AFTER = 1.0


class Publisher:
    """Puts and removes messages of one database alias, with short timeouts, no retries, and a pause after a failure."""

    def __init__(self, broker: Index) -> None:
        self.broker = broker
        # No call before this time (monotonic, seconds).
        self._retry_at = 0.0
        self._is_failing = False
        self._lock = threading.Lock()

    def put(self, queue: str, entries: list[Entry]) -> None:
        """Put messages that were committed."""

        def put() -> bool:
            failpoints.reach("before_put")
            answers = self.broker.put_nowait(queue, entries)
            failpoints.reach("after_put")
            return answers > 0

        self._try(put)

    def remove(self, queue: str, ids: list[int]) -> None:
        """Remove messages whose end was committed."""

        def remove() -> bool:
            self.broker.remove(queue, ids)
            return True

        self._try(remove)

    def _try(self, call: Callable[[], bool]) -> None:
        """Make a call that returns whether Redis has answered. Log only the first of several failures in a row."""
        if time.monotonic() < self._retry_at:
            return
        try:
            answered = call()
        except BrokerUnavailable as error:
            self._retry_at = time.monotonic() + RETRY_AFTER
            with self._lock:
                first, self._is_failing = not self._is_failing, True
            if first:
                logger.warning(
                    "Redis does not answer; messages are safe in the record, and a worker puts them later: %s", error
                )
        except Exception:
            self._retry_at = time.monotonic() + RETRY_AFTER
            logger.exception("Redis could not be told about committed messages; the sweep of a worker puts them later")
        else:
            if answered:
                self._is_failing = False


@lru_cache(maxsize=16)
def get(using: str) -> Publisher | None:
    """Return the publisher of a database alias; None when no Redis is configured."""
    broker = index(using, timeout=conf.get().REDIS_TIMEOUT)
    return None if broker is None else Publisher(broker)


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("DELAYQ", "CACHES"):
        get.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_delayq.publisher")


def put(using: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Put messages that are committed already, given with their queues."""
    publisher = get(using)
    if publisher is not None:
        for queue, group in by_queue(entries).items():
            publisher.put(queue, group)


def put_on_commit(using: str, queue: str, entries: list[Entry]) -> None:
    """Put messages when the transaction that wrote them commits; outside of a transaction at once."""
    publisher = get(using)
    if publisher is None:
        return
    connection = connections[using]
    if not connection.in_atomic_block:
        publisher.put(queue, entries)
        return
    # Many messages in one transaction become one call. A batch grows while it is the last callback registered, with the
    # same savepoints, so that a rollback drops the batch exactly when it drops each of the rows.
    if connection.run_on_commit:
        savepoints, last = connection.run_on_commit[-1][:2]
        batch = getattr(last, "delayq_batch", None)
        if batch is not None and batch[0] == queue and savepoints == set(connection.savepoint_ids):
            batch[1].extend(entries)
            return
    entries = [*entries]

    # A nested function, not a partial: Django 5.2 and 6.0 cannot log the failure of a robust partial.
    def put_batch() -> None:
        publisher.put(queue, entries)

    put_batch.delayq_batch = (queue, entries)  # type: ignore[attr-defined]
    transaction.on_commit(put_batch, using=using, robust=True)


def remove_on_commit(using: str, queue: str, ids: list[int]) -> None:
    """Remove messages from Redis when the transaction commits."""
    publisher = get(using)
    if publisher is None:
        return

    def remove() -> None:
        publisher.remove(queue, ids)

    transaction.on_commit(remove, using=using, robust=True)


def by_queue(entries: Iterable[tuple[str, Entry]]) -> dict[str, list[Entry]]:
    """Group entries by their queue."""
    groups: dict[str, list[Entry]] = {}
    for queue, entry in entries:
        groups.setdefault(queue, []).append(entry)
    return groups
