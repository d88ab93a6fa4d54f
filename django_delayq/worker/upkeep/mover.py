"""Moves ids that fall due from delayed to ready, and wakes a worker while ids are ready."""

from __future__ import annotations

from ...core.exceptions import BrokerUnavailable
from ...extensions import Service
from ..shared.broker_switch import BrokerSwitch
from .upkeep_tuning import USUAL, UpkeepTuning


class Mover(Service):
    """Sleeps until the next message falls due, in a process without a consumer.

    A consumer itself moves the ids that it takes. Beside one, the mover of the leader looks from time to time, and
    wakes a worker while ids are ready or blocked: a process that died, froze or stopped may have taken their wake-up.
    """

    name = "mover"

    def __init__(
        self,
        brokers: BrokerSwitch,
        queues: tuple[str, ...] | None,
        *,
        beside_consumer: bool,
        tuning: UpkeepTuning = USUAL,
    ) -> None:
        """``queues``: those that the worker names; None: it serves all."""
        assert brokers.redis is not None
        self.brokers = brokers
        self.broker = brokers.redis
        self.queues = queues
        self.is_shared = beside_consumer
        self.tuning = tuning

    def tick(self) -> float:
        """Move the due ids of each queue that has some."""
        if self.brokers.current() is not self.broker:
            return self.tuning.move_interval
        try:
            due = self.broker.due_queues(self.queues)
            answers = self.broker.take_many(due.queues, 0)
            if any(queue.ready for queue in due.queues) or self.broker.any_blocked():
                # The process that got their wake-up, or that blocked them and would look again, may have died.
                self.broker.notify(self.queues)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
            return self.tuning.move_interval
        if self.is_shared:
            return self.tuning.repeat_interval
        waits = [due.wait, *(taken.wait for taken in answers.values())]
        return min([self.tuning.move_interval, *(wait for wait in waits if wait is not None)])
