"""Moves ids that fall due from delayed to ready, in a process without a consumer."""

from __future__ import annotations

from ..exceptions import BrokerUnavailable
from ..extensions import Service
from .broker_switch import BrokerSwitch
from .queue_finder import QueueFinder

# The longest sleep: a message scheduled meanwhile may be due earlier than the next one known. Seconds.
MOVE_INTERVAL = 0.5


class Mover(Service):
    """Sleeps until the next message falls due. A consumer moves messages too: this is for processes without one."""

    name = "mover"
    thread = "timing"

    def __init__(self, brokers: BrokerSwitch, queues: QueueFinder) -> None:
        assert brokers.redis is not None
        self.brokers = brokers
        self.broker = brokers.redis
        self.queues = queues

    def tick(self) -> float:
        """Move the due ids of each queue that has some."""
        if self.brokers.current() is not self.broker:
            return MOVE_INTERVAL
        try:
            due = self.broker.due_queues(self.queues.named)
            answers = self.broker.take_many(due.queues, 0)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
            return MOVE_INTERVAL
        waits = [due.wait, *(taken.wait for taken in answers.values())]
        return min([MOVE_INTERVAL, *(wait for wait in waits if wait is not None)])
