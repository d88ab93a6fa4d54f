"""Tells Redis about messages that were committed. No error reaches the caller: a sweep puts what Redis missed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from django.db import connections

from ..core import in_tests
from ..core.commits import on_commit
from ..core.exceptions import BrokerUnavailable, ForeignBroker, UnusableBroker
from ..core.known_record import doubt_identity, known_identity, last_identity
from ..core.outages import Outage
from ..project import conf, pulled
from . import RedisBroker, index
from .base import CallCount, Entry
from .broker_tuning import USUAL, BrokerTuning

logger = logging.getLogger("django_delayq")

T = TypeVar("T")

# The numbers of the publishers that are made from now on.
usual = USUAL
# The identity of a database that has none.
NOBODY = "nobody"
SAFE = "Messages are safe in the record: workers deliver them by query, or put them later."


def run_at_once(using: str, ids: list[int]) -> None:
    """Run messages at the end of the call that made them wait, where a test wants that. Else workers deliver them."""
    if in_tests.run_at_once is not None:
        in_tests.run_at_once(using, ids)


class Publisher:
    """Announces and removes messages of one database alias: short timeouts, no retries, and a pause after a failure.

    Any thread may call it. ``_lock`` guards the outage. ``_retry_at``, ``_is_failing`` and ``_refused`` are replaced as
    a whole without it: a thread that reads an older value tries Redis once more, or once less, and loses no message.
    """

    def __init__(self, using: str, broker: RedisBroker, tuning: BrokerTuning = USUAL) -> None:
        self.using = using
        self.broker = broker
        self.tuning = tuning
        # No call before this time (monotonic, seconds).
        self._retry_at = 0.0
        self._is_failing = False
        self._outage = Outage()
        # The identity with which Redis refused a call the last time; "" after it took one.
        self._refused = ""
        self._lock = threading.Lock()

    def announce(self, queue: str, entries: list[Entry], *, new: bool = False) -> None:
        """Announce messages that were committed. ``new``: for the first time, so a loader brings those due late."""
        if pulled.terms(queue) is not None:
            # Redis holds no ids of a pulled queue. Programs that wait there find by query what falls due later.
            soon_us = (time.time() + self.tuning.pullers_look) * 1e6
            if any(entry.due_us <= soon_us for entry in entries):
                self._try(self._wake, queue)
            return
        if new:
            # This host's clock is read after the commit. No loader has yet set a horizon as late as this: the one that
            # does so reads the record afterwards, and finds the message.
            farthest_us = (time.time() + conf.get().HORIZON + self.tuning.clock_margin) * 1e6
            entries = [entry for entry in entries if entry.due_us <= farthest_us]
        if entries:
            self._try(self.broker.send_put, queue, entries)

    def _wake(self, queue: str) -> bool:
        self.broker.notify([queue])
        # It tells nothing of whose Redis this is.
        return False

    def remove(self, queue: str, ids: list[int]) -> None:
        """Remove messages whose end was committed."""
        if pulled.terms(queue) is None:
            self._try(self.broker.remove, queue, ids)

    def count_call(self, *call: Any) -> CallCount | None:
        """Count a call, or take one back: see ``RedisBroker``. None: Redis does not answer."""
        answers: list[CallCount] = []

        def ask() -> bool:
            answers.append(self.broker.count_call(*call))
            # It tells nothing of whose Redis this is.
            return False

        self._try(ask)
        return answers[0] if answers else None

    def _try(self, call: Callable[..., bool | None], *given: Any) -> None:
        """Make a call, and log the first of several like failures.

        A call returns False when its answer does not tell that Redis takes messages of this database.
        """
        if time.monotonic() < self._retry_at:
            return
        failed = self._is_failing
        if failed:
            # Other calls do not wait while this one tries Redis again.
            self._retry_at = time.monotonic() + self.tuning.retry_after
        try:
            answered = call(*given) is not False
            if failed:
                # Redis is back if it answers this call too. A worker then loads what it was not told meanwhile.
                self.broker.flush()
                self.broker.request_load()
                answered = True
        except ForeignBroker as error:
            if error.refused == self._refused == known_identity(self.using):
                self._fail(logging.CRITICAL, "%s %s", error, SAFE)
            elif error.refused == last_identity(self.using):
                # Somebody may have emptied the tables, as tests do. The next message that is written reads it again.
                self._refused = error.refused
                doubt_identity(self.using)
        except UnusableBroker as error:
            self._fail(logging.CRITICAL, "%s %s", error, SAFE)
        except BrokerUnavailable as error:
            self._fail(logging.WARNING, "%s. %s %s", error.what, SAFE, error)
        except Exception as error:  # noqa: BLE001
            self._fail(logging.ERROR, "Redis could not be told about messages. %s %s", SAFE, error, exc_info=error)
        else:
            if answered:
                self._is_failing, self._refused = False, ""
                self._retry_at = 0.0
                self._outage.end()

    def _fail(self, level: int, text: str, *values: object, exc_info: Exception | None = None) -> None:
        """Make no call for a while, and log the failure unless it is like those before it."""
        self._retry_at = time.monotonic() + self.tuning.retry_after
        with self._lock:
            self._is_failing, is_news = True, self._outage.is_news(text % values)
        if is_news:
            logger.log(level, text, *values, exc_info=exc_info)


@lru_cache(maxsize=16)
def get(using: str) -> Publisher | None:
    """Return the publisher of a database alias; None when no Redis is configured."""

    # The identity is read without a query, since this may be the caller's transaction: every statement that writes
    # messages brings it along. A database that has none yet owns no queue in Redis.
    def identity() -> str:
        return last_identity(using) or NOBODY

    broker = index(using, timeout=usual.timeout, identity=identity)
    return None if broker is None else Publisher(using, broker, usual)


conf.forget_on_change(get, "DELAYQ", "CACHES")


def announce(using: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Announce messages that are committed already, given with their queues."""
    publisher = get(using)
    if publisher is not None:
        for queue, group in by_queue(entries).items():
            publisher.announce(queue, group)


def announce_on_commit(using: str, queue: str, entries: list[Entry], *, new: bool = False) -> None:
    """Announce messages when the transaction that wrote them commits; outside of a transaction at once.

    ``new``: the messages did not exist before, so Redis holds no former due time of theirs.
    """
    publisher = get(using)
    if publisher is None:
        return
    connection = connections[using]
    if not connection.in_atomic_block and connection.get_autocommit():
        publisher.announce(queue, entries, new=new)
        return
    # Many messages in one transaction become one call. A batch grows while it is the last callback registered, with the
    # same savepoints, so that a rollback drops the batch exactly when it drops each of the rows.
    if waiting := getattr(connection, "run_on_commit", None):
        savepoints, last = waiting[-1][:2]
        batch = getattr(last, "delayq_batch", None)
        if batch is not None and batch[:2] == (queue, new) and savepoints == set(connection.savepoint_ids):
            batch[2].extend(entries)
            return
    entries = [*entries]

    def announce_batch() -> None:
        publisher.announce(queue, entries, new=new)

    announce_batch.delayq_batch = (queue, new, entries)  # type: ignore[attr-defined]
    on_commit(using, announce_batch)


def remove_on_commit(using: str, queue: str, ids: list[int]) -> None:
    """Remove messages from Redis when the transaction commits."""
    publisher = get(using)
    if publisher is not None:
        on_commit(using, publisher.remove, queue, ids)


def by_queue(entries: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Group entries, or ids, by their queue."""
    groups: dict[str, list[T]] = {}
    for queue, entry in entries:
        groups.setdefault(queue, []).append(entry)
    return groups
