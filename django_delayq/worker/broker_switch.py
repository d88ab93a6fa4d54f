"""Switches a worker between Redis and the database: while Redis is away, due messages come from the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from ..broker import index
from ..broker.base import Broker, Index
from ..broker.database import DatabaseBroker
from ..exceptions import BrokerUnavailable

logger = logging.getLogger("django_delayq")

# A process without a loader tries Redis again this long after it failed. Seconds.
RETRY_REDIS_AFTER = 5.0


class BrokerSwitch:
    """Gives the broker to use now, and logs once when Redis goes away and once when it is back.

    Any thread may report and ask. ``_lock`` guards changes of ``_away_since`` and ``_is_foreign``; ``current`` reads
    ``_away_since`` once without the lock: one more turn with the former broker does no harm.
    """

    def __init__(self, using: str, topics: Callable[[], Iterable[str]], *, redis: bool = True) -> None:
        self.database = DatabaseBroker(using, topics)
        self.redis: Index | None = index(using) if redis else None
        self._away_since: float | None = None
        self._is_foreign = False
        # True: the loader asks Redis every second and reports, so no other thread has to wait for a Redis that may be
        # away. Set once, before the threads start.
        self.has_loader = False
        self._lock = threading.Lock()

    def current(self) -> Broker:
        """Return Redis, or the database when there is no Redis or it failed a moment ago."""
        if self.redis is None:
            return self.database
        away_since = self._away_since
        if away_since is not None and (self.has_loader or time.monotonic() - away_since < RETRY_REDIS_AFTER):
            return self.database
        return self.redis

    def report_failure(self, error: BrokerUnavailable) -> None:
        """Switch to the database: Redis did not answer."""
        with self._lock:
            first, self._away_since = self._away_since is None, time.monotonic()
        if self.redis is not None:
            self.redis.reset_listener()
        if first:
            logger.warning("Redis is away; messages are delivered from the database meanwhile: %s", error)
            # A thread that waits for a wake-up through Redis asks the database instead.
            self.wake()

    def report_answer(self, asked: float) -> None:
        """Switch back to Redis: it answered every call since ``asked`` (monotonic)."""
        away_since = self._away_since
        # A failure since then, perhaps in another thread, is newer than this answer.
        if away_since is None or away_since > asked or self._is_foreign:
            return
        with self._lock:
            if self._away_since != away_since or self._is_foreign:
                return
            self._away_since = None
        logger.warning("Redis is back")

    def report_foreign(self, error: BrokerUnavailable) -> None:
        """Switch to the database until ``report_own``: the loader found that this Redis belongs to another record."""
        with self._lock:
            first, self._is_foreign = not self._is_foreign, True
            self._away_since = time.monotonic()
        if first:
            self.wake()
            logger.critical("%s Messages are delivered from the database.", error)

    def report_own(self) -> None:
        """Allow Redis again: the loader found that it belongs to this record."""
        with self._lock:
            was_foreign, self._is_foreign = self._is_foreign, False
        if was_foreign:
            self.report_answer(time.monotonic())

    def wake(self) -> None:
        """End the wait of the consumer."""
        self.database.wake()
        if self.redis is not None:
            self.redis.wake()

    def close(self) -> None:
        """Close the connections to Redis."""
        if self.redis is not None:
            self.redis.close()
