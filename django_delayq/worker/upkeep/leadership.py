"""The leader: of all processes that would do the same upkeep, one does it while Redis answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence

from ... import __version__
from ...core.exceptions import BrokerUnavailable
from ...extensions import Service
from ...record import reads
from ..shared.broker_switch import BrokerSwitch
from .upkeep_tuning import USUAL, UpkeepTuning


class Leadership(Service):
    """Makes this process the leader of a duty, or waits until nobody leads.

    A leader only saves work: any process may do what the duty covers. Two processes have the same duty when they would
    do the same work: they run the same version, serve the same queues, know the same topics and have the same roles. So
    an old worker has a leader beside that of a new one. While Redis is away, or there is none, every process leads.
    """

    name = "duty"

    def __init__(
        self,
        brokers: BrokerSwitch,
        worker: str,
        queues: Sequence[str] | None,
        topics: Iterable[str],
        roles: Iterable[str],
        tuning: UpkeepTuning = USUAL,
    ) -> None:
        self.brokers = brokers
        self.worker = worker
        covered = json.dumps([__version__, queues, sorted(topics), sorted(roles)])
        self.name_in_redis = hashlib.sha256(covered.encode()).hexdigest()[:16]
        self.tuning = tuning
        self._leads = True

    def is_leader(self) -> bool:
        """Return whether this process does the work. Any thread may ask."""
        return self._leads

    @property
    def uses_database(self) -> bool:  # type: ignore[override]
        """True in the leader: a process that only waits for the duty keeps no connection for that."""
        return self._leads

    def tick(self) -> float:
        """Ask Redis who leads. A failure is reported to the broker switch.

        A leader that does not reach the database raises its error, and so the duty is free when its lease is over.
        """
        broker = self.brokers.redis
        if broker is None:
            return 3600.0
        if self.brokers.is_away:
            self._leads = True
            return self.tuning.leader_interval
        if self._leads:
            reads.now(self.brokers.database.using)
        try:
            # ``take_duty`` costs Redis half as many commands, and most processes do not lead.
            ask = broker.hold_duty if self._leads else broker.take_duty
            self._leads = ask(self.name_in_redis, self.worker, self.tuning.leader_lease)
        except BrokerUnavailable as error:
            self._leads = True
            self.brokers.report_failure(error)
            return self.tuning.leader_interval
        return self.tuning.leader_interval if self._leads else self.tuning.standby_interval

    def release(self) -> None:
        """Give up the duty, so that another process leads as soon as it asks."""
        broker = self.brokers.redis
        if broker is not None and self._leads:
            with contextlib.suppress(BrokerUnavailable):
                broker.hold_duty(self.name_in_redis, self.worker, None)
