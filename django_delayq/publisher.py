"""Tells Redis what was committed. Nothing here ever raises into the caller: Redis is a hint, a sweep repairs it."""

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
from .broker.base import Entry
from .broker.redis import RedisBroker
from .exceptions import BrokerUnavailable

logger = logging.getLogger("django_delayq")

# After Redis did not answer, callers do not wait for it again before this many seconds have passed.
REST = 1.0


class Publisher:
    """The producers' door to Redis for one database alias: short timeouts, no retries, and a rest after a failure."""

    def __init__(self, settings: conf.Settings, using: str) -> None:
        self.broker = RedisBroker(settings, using, timeout=settings.REDIS_TIMEOUT)
        self._rest_until = 0.0
        self._away = False
        self._lock = threading.Lock()

    def put(self, queue: str, entries: list[Entry]) -> None:
        def tell() -> bool:
            failpoints.reach("before_put")
            answers = self.broker.tell(queue, entries)
            failpoints.reach("after_put")
            return answers > 0

        self._try(tell)

    def remove(self, queue: str, ids: list[int]) -> None:
        def remove() -> bool:
            self.broker.remove(queue, ids)
            return True

        self._try(remove)

    def _try(self, call: Callable[[], bool]) -> None:
        """``call`` says whether Redis has answered."""
        if time.monotonic() < self._rest_until:
            return
        try:
            answered = call()
        except BrokerUnavailable as error:
            self._rest_until = time.monotonic() + REST
            with self._lock:
                first, self._away = not self._away, True
            if first:
                logger.warning("Redis does not answer; the record alone holds new messages meanwhile: %s", error)
        except Exception:
            self._rest_until = time.monotonic() + REST
            logger.exception("Could not tell Redis about committed messages; a sweep will")
        else:
            if answered:
                self._away = False


@lru_cache(maxsize=16)
def get(using: str) -> Publisher | None:
    """The get of a database alias; None when no Redis is configured."""
    settings = conf.get()
    return None if settings.REDIS is None else Publisher(settings, using)


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("DELAYQ", "CACHES"):
        get.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_delayq.publisher")


def put(using: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Announce rows that are committed already, given with their queues."""
    there = get(using)
    if there is not None:
        for queue, group in by_queue(entries).items():
            there.put(queue, group)


def put_on_commit(using: str, queue: str, entries: list[Entry]) -> None:
    """Announce rows when the transaction that wrote them commits; at once outside of one."""
    there = get(using)
    if there is None:
        return
    connection = connections[using]
    if not connection.in_atomic_block:
        there.put(queue, entries)
        return
    # Many messages in one transaction become one call: a batch is joined while it is the last thing registered, with
    # the same savepoints, so that it is dropped by a rollback exactly when each of its rows is.
    if connection.run_on_commit:
        savepoints, last = connection.run_on_commit[-1][:2]
        batch = getattr(last, "delayq_batch", None)
        if batch is not None and batch[0] == queue and savepoints == set(connection.savepoint_ids):
            batch[1].extend(entries)
            return
    entries = [*entries]

    # A nested function, not a partial: Django 5.2 and 6.0 cannot log the failure of a robust partial.
    def put_batch() -> None:
        there.put(queue, entries)

    put_batch.delayq_batch = (queue, entries)  # type: ignore[attr-defined]
    transaction.on_commit(put_batch, using=using, robust=True)


def remove_on_commit(using: str, queue: str, ids: list[int]) -> None:
    """Have Redis forget rows when the transaction commits."""
    there = get(using)
    if there is None:
        return

    def remove() -> None:
        there.remove(queue, ids)

    transaction.on_commit(remove, using=using, robust=True)


def by_queue(entries: Iterable[tuple[str, Entry]]) -> dict[str, list[Entry]]:
    """Entries grouped by their queue."""
    groups: dict[str, list[Entry]] = {}
    for queue, entry in entries:
        groups.setdefault(queue, []).append(entry)
    return groups
