"""Where a worker hears what is due: Redis, or the database while Redis is away."""

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

# In a process without a loader to find out, Redis that is away is tried again this often. Seconds.
RETRY = 5.0


class Source:
    """Gives the broker to use now. Says once that Redis is away, and once that it is back."""

    def __init__(self, using: str, topics: Callable[[], Iterable[str]], *, redis: bool = True) -> None:
        self.database = DatabaseBroker(using, topics)
        self.redis: Index | None = index(using) if redis else None
        self._away_since: float | None = None
        self._refused = False
        # The loader looks every second and calls answered(): then nobody else need find out by waiting.
        self.has_loader = False
        self._lock = threading.Lock()

    def current(self) -> Broker:
        """Redis, unless there is none or it did not answer a moment ago."""
        if self.redis is None:
            return self.database
        away = self._away_since
        if away is not None and (self.has_loader or time.monotonic() - away < RETRY):
            return self.database
        return self.redis

    def failed(self, error: BrokerUnavailable) -> None:
        """Redis did not answer."""
        with self._lock:
            first, self._away_since = self._away_since is None, time.monotonic()
        if self.redis is not None:
            self.redis.reset_listener()
        if first:
            logger.warning("Redis is away; messages are delivered from the database meanwhile: %s", error)
            # Who waits for its word looks into the database instead.
            self.wake()

    def answered(self, asked: float) -> None:
        """Redis answered all that it was asked since then (monotonic)."""
        away_since = self._away_since
        # A failure since then, in another thread or on the way, is the newer word.
        if away_since is None or away_since > asked or self._refused:
            return
        with self._lock:
            if self._away_since != away_since:
                return
            self._away_since = None
        logger.warning("Redis is back")

    def refuse(self, error: BrokerUnavailable) -> None:
        """This Redis is not ours: leave it alone until the loader finds otherwise."""
        with self._lock:
            first, self._refused = not self._refused, True
            self._away_since = time.monotonic()
        if first:
            self.wake()
            logger.critical("%s Messages are delivered from the database.", error)

    def accept(self) -> None:
        """The loader found Redis to be ours."""
        if self._refused:
            self._refused = False
            self.answered(time.monotonic())

    def wake(self) -> None:
        """End the wait of the consumer or mover."""
        self.database.wake()
        if self.redis is not None:
            self.redis.wake()

    def close(self) -> None:
        if self.redis is not None:
            self.redis.close()
