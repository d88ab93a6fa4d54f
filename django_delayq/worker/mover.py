"""Moves what falls due from delayed to ready, in a process without consumers."""

from __future__ import annotations

from collections.abc import Callable

from ..exceptions import BrokerUnavailable
from ..extensions import Service
from .broker_switch import Source

# A message scheduled meanwhile may be due earlier than what was seen: look again. Seconds.
LOOK = 0.5


class Mover(Service):
    """Sleeps until the next message falls due. A consumer moves on its way too: this is for processes without one."""

    name = "mover"
    thread = "timing"

    def __init__(self, source: Source, queues: Callable[[], tuple[str, ...]]) -> None:
        assert source.redis is not None
        self.source = source
        self.broker = source.redis
        self.queues = queues

    def tick(self) -> float:
        if self.source.current() is not self.broker:
            return LOOK
        try:
            looked = [self.broker.promote(queue) for queue in self.queues()]
        except BrokerUnavailable as error:
            self.source.failed(error)
            return LOOK
        return min([LOOK, *(wait for taken in looked if (wait := taken.wait) is not None)])
