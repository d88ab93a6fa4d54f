"""The duty: of all processes that would do the same periodic work, one does it while Redis answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence

from ... import __version__
from ...core.exceptions import BrokerUnavailable
from ...extensions import Service
from ...record import transitions
from ..shared.broker_switch import BrokerSwitch

# The holder asks Redis this often whether it still holds the duty. Seconds.
HOLDER_INTERVAL = 2.0
# The others ask this often whether it is free. Seconds.
STANDBY_INTERVAL = 2.5
# The duty of a process that died, hangs or was cut off is free after this time. Seconds.
DUTY_LEASE = 4.0


class Duty(Service):
    """Holds the duty, or waits for it. The duty only saves work: what it covers may be done by any process.

    Two processes have the same duty when they would do the same work: they run the same version, serve the same queues,
    know the same topics and have the same roles. So the duty of an old worker stands beside that of a new one. While
    Redis is away, or there is none, every process holds its duty.
    """

    name = "duty"

    def __init__(
        self,
        brokers: BrokerSwitch,
        worker: str,
        queues: Sequence[str] | None,
        topics: Iterable[str],
        roles: Iterable[str],
    ) -> None:
        self.brokers = brokers
        self.worker = worker
        covered = json.dumps([__version__, queues, sorted(topics), sorted(roles)])
        self.name_in_redis = hashlib.sha256(covered.encode()).hexdigest()[:16]
        self._is_held = True

    def is_held(self) -> bool:
        """Return whether this process does the work. Any thread may ask."""
        return self._is_held

    def tick(self) -> float:
        """Ask Redis for the duty. A failure is reported to the broker switch.

        A holder that does not reach the database raises its error, and so the duty is free when its lease is over.
        """
        broker = self.brokers.redis
        if broker is None:
            return 3600.0
        if self.brokers.is_away:
            self._is_held = True
            return HOLDER_INTERVAL
        if self._is_held:
            transitions.now(self.brokers.database.using)
        try:
            # Half of the calls inside Redis, and most processes do not hold it.
            ask = broker.hold_duty if self._is_held else broker.take_duty
            self._is_held = ask(self.name_in_redis, self.worker, DUTY_LEASE)
        except BrokerUnavailable as error:
            self._is_held = True
            self.brokers.report_failure(error)
            return HOLDER_INTERVAL
        return HOLDER_INTERVAL if self._is_held else STANDBY_INTERVAL

    def release(self) -> None:
        """Give up the duty, so that another process takes it with its next question."""
        broker = self.brokers.redis
        if broker is not None and self._is_held:
            with contextlib.suppress(BrokerUnavailable):
                broker.hold_duty(self.name_in_redis, self.worker, None)
