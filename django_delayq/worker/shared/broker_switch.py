"""Switches a worker between Redis and the database: while Redis is away, due messages come from the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from ...broker import RedisBroker, index
from ...broker.base import Broker
from ...broker.database import DatabaseBroker
from ...core.exceptions import BrokerFailing, BrokerMoved, BrokerRubbish, BrokerUnavailable, FarBroker, UnusableBroker
from ...core.outages import Outage

logger = logging.getLogger("django_delayq")

# A process without a loader tries Redis again this long after it failed. Seconds.
RETRY_REDIS_AFTER = 5.0
# A Redis that fails within this time after it was back is flapping: some calls succeed and others fail. From the second
# such failure on the switch waits before it uses Redis again, each time longer. Seconds.
FLAPPING = 10.0
# The switch waits no longer than this. Seconds.
LONGEST_HOLD = 60.0


class BrokerSwitch:
    """Gives the broker to use now, and logs when Redis goes away, when the reason is another one, and when it is back.

    Any thread may report and ask. ``_lock`` guards what begins with an underscore; ``current`` and ``report_answer``
    read it once without the lock: one more round with the former broker does no harm. ``rubbish_seen`` is set by the
    first thread that meets some, and cleared by the loader. The rest does not change after the threads have started.
    """

    def __init__(self, using: str, topics: Callable[[], Iterable[str]], *, redis: bool = True) -> None:
        self.database = DatabaseBroker(using, topics)
        self.redis: RedisBroker | None = index(using) if redis else None
        self._away_since: float | None = None
        self._outage = Outage()
        # When this process met in Redis what is not ours (tenths, by the record's clock). The loader deletes it.
        self.rubbish_seen: int | None = None
        self._is_unusable = False
        # When Redis was back the last time (monotonic), how often in a row it failed again soon after that, and until
        # when it is not used (monotonic).
        self._back_at = -FLAPPING
        self._flaps = 0
        self._held_until = 0.0
        # True: the loader asks Redis every second and reports, so no other thread has to wait for a Redis that may be
        # away. Set before the threads start.
        self.has_loader = False
        self._lock = threading.Lock()

    @property
    def is_away(self) -> bool:
        """True while messages are delivered from the database though there is a Redis."""
        return self._away_since is not None

    def current(self) -> Broker:
        """Return Redis, or the database when there is no Redis or it failed a moment ago."""
        if self.redis is None:
            return self.database
        away_since = self._away_since
        if away_since is not None and (self.has_loader or time.monotonic() - away_since < RETRY_REDIS_AFTER):
            return self.database
        return self.redis

    def report_failure(self, error: BrokerUnavailable) -> None:
        """Switch to the database: Redis did not answer, or answered nonsense, or must not be used."""
        if isinstance(error, UnusableBroker):
            self._report_unusable(error)
            return
        with self._lock:
            now = time.monotonic()
            first, self._away_since = self._away_since is None, now
            is_news = self._outage.is_news(error)
            if isinstance(error, BrokerMoved):
                # The new address of Redis is known: there is nothing to wait for.
                self._flaps, self._held_until = 0, 0.0
            elif first:
                self._flaps = self._flaps + 1 if now - self._back_at < FLAPPING else 0
                self._held_until = now + (min(LONGEST_HOLD, 2.0**self._flaps) if self._flaps > 1 else 0.0)
        if self.redis is not None:
            if isinstance(error, BrokerRubbish) and self.rubbish_seen is None:
                self.rubbish_seen = self.redis.now_tenths()
            self.redis.reset_listener()
        if is_news:
            what = "Redis answers, and cannot be used" if isinstance(error, BrokerFailing) else "Redis is away"
            logger.warning("%s; messages are delivered from the database meanwhile: %s", what, error)
        if first:
            # A thread that waits for a wake-up through Redis asks the database instead.
            self.wake()

    def report_answer(self, asked: float, *, is_usable: bool = False) -> None:
        """Switch back to Redis: it answered every call since ``asked`` (monotonic).

        ``is_usable``: the loader has found that it belongs to this record.
        """
        away_since = self._away_since
        # A failure since then, perhaps in another thread, is newer than this answer.
        if away_since is None or away_since > asked or time.monotonic() < self._held_until:
            return
        with self._lock:
            # Only the loader looks whether Redis may be used. Without one, an id that was taken shows it.
            is_barred = self._is_unusable and self.has_loader and not is_usable
            if self._away_since != away_since or is_barred:
                return
            self._away_since, self._is_unusable = None, False
            self._outage.end()
            self._back_at = time.monotonic()
        logger.warning("Redis is back")

    def _report_unusable(self, error: UnusableBroker) -> None:
        """Switch to the database until the loader says otherwise: this Redis is another record's, or far away."""
        with self._lock:
            first, self._is_unusable = not self._is_unusable, True
            self._away_since = time.monotonic()
        if first:
            self.wake()
            level = logging.WARNING if isinstance(error, FarBroker) else logging.CRITICAL
            logger.log(level, "%s Messages are delivered from the database.", error)

    def wake(self) -> None:
        """End the wait of the consumer."""
        self.database.wake()
        if self.redis is not None:
            self.redis.wake()

    def close(self) -> None:
        """Close the connections to Redis."""
        if self.redis is not None:
            self.redis.close()
