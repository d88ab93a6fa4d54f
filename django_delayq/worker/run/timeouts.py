"""Ends handlers that run longer than their timeout, and releases deliveries that wait too long for a thread."""

from __future__ import annotations

from collections.abc import Callable

from ...extensions import Service
from ..parts.delivery import Delivery
from .pool import Pool

# The time between two checks of timeouts. A check needs no query. Seconds.
TIMEOUT_CHECK_INTERVAL = 0.25
# A delivery that waits for a thread longer than this is released: the handlers before it turned out slow, and other
# processes may be idle. Seconds.
LONGEST_QUEUED = 1.0
# A handler that runs on for this long after its timeout is stuck: its process is replaced. Seconds.
STUCK_AFTER = 5.0


class TimeoutWatch(Service):
    """Checks deliveries. It uses no database: a handler must end in time also while the database does not answer."""

    name = "timeout watch"
    thread = "timeout-watch"
    longest_backoff = 1.0

    def __init__(
        self, pool: Pool, on_stuck: Callable[[list[Delivery]], None], stuck_after: float = STUCK_AFTER
    ) -> None:
        """``on_stuck`` is called with the deliveries that run on ``stuck_after`` seconds after their timeout."""
        self.pool = pool
        self.on_stuck = on_stuck
        self.stuck_after = stuck_after

    def tick(self) -> float:
        """Interrupt handlers past their timeout; return when the next timeout ends, or a quarter of a second."""
        held = self.pool.held()
        self._end_overtime(held)
        self.pool.release_queued(LONGEST_QUEUED)
        return min([TIMEOUT_CHECK_INTERVAL, *(-over for d in held if (over := d.overtime) is not None and over < 0)])

    def _end_overtime(self, held: list[Delivery]) -> None:
        overtime = [d for d in held if d.is_overtime()]
        for delivery in overtime:
            delivery.interrupt()
        stuck = [d for d in overtime if d.is_overtime(self.stuck_after)]
        if stuck:
            self.on_stuck(stuck)
