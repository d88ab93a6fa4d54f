"""Quarantine: a message that kept crashing its worker runs alone in its process, and harms only itself."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ...core.outcomes import Release
from ...record import crashes
from ..parts.delivery import Delivery
from ..parts.lifetime import Budget, ProcessLock
from ..run.pool import Pool

logger = logging.getLogger("django_delayq")

# A message that is to run alone waits in its process for this long at first, and twice as long the next time, up to
# some minutes: longer than most handlers run. The process takes nothing meanwhile; the supervisor soon starts another
# in its place. Seconds.
FIRST_WAIT = 5.0
# A message that has waited in vain is postponed by this much. Seconds.
POSTPONED = 30.0
# While another process of this worker runs a message alone, a further one is put off for a random part of this time,
# which doubles each time, up to POSTPONED: if every process ran one alone, nothing else would be delivered. Seconds.
FIRST_DETOUR = 1.0
REASON = "is to run alone"


class Quarantine:
    """The message that waits in this process to run alone, and the right to run it.

    The right is ``lock`` (None: there is no other process). The thread that makes the consumer's turns uses this
    object; other threads see the message that waits as ``Pool.quarantined``.
    """

    def __init__(self, pool: Pool, worker: str, budget: Budget, lock: ProcessLock | None) -> None:
        self.pool = pool
        self.budget = budget
        self._worker = worker
        self._actor = f"worker:{worker}"
        self._lock = lock
        # True when a message of the last claim waits here, or waited: others that are to run alone often come with it,
        # so the process takes one message at a time.
        self.had_the_last = False
        # The moment until which the message may wait (monotonic).
        self._wait_ends = 0.0

    @property
    def is_waiting(self) -> bool:
        """True when a message waits here to run alone."""
        return self.pool.quarantined is not None

    @property
    def seconds_left(self) -> float:
        """The seconds for which the message may still wait."""
        return max(0.0, self._wait_ends - time.monotonic())

    def is_suspect(self, delivery: Delivery) -> bool:
        """Return whether a message is to run alone."""
        return delivery.crashes >= crashes.SUSPECT_CRASHES

    def admit(self, suspects: Sequence[Delivery]) -> None:
        """Let the first suspect wait here, unless another process has the right; release the others.

        A message that only waits must not be held when another one kills the process: the crash would count for both.
        """
        admitted = self.had_the_last = bool(suspects) and (self._lock is None or self._lock.acquire(wait=False))
        if admitted:
            self.pool.quarantined = suspects[0]
            self.budget.count(1)
            # A process whose last message this is takes nothing else anyway, and ends after it.
            self.pool.page.suspect_since = 0.0 if self.budget.empty else time.monotonic()
            self._wait_ends = time.monotonic() + FIRST_WAIT * 2.0 ** _times_put_off(suspects[0])
        for delivery in suspects[admitted:]:
            self.pool.recorder.submit(delivery, Release(REASON, None if admitted else _detour(delivery)), self._actor)

    def run(self, begin: Callable[[], None], give_up: Callable[[], bool]) -> None:
        """Run the message that waits, unless another one runs, and return when it has ended.

        ``begin`` is called first; the wait for the end stops as soon as ``give_up`` returns True.
        """
        delivery = self.pool.quarantined
        if delivery is None or give_up():
            return
        if delivery.cancel_requested:
            self.release(Release(REASON))
            return
        if self.pool.is_busy or not self.pool.recorder.flush(1.0):
            if not self.seconds_left:
                self.release(Release(REASON, timedelta(seconds=POSTPONED)))
            return
        crashes.mark_alone(delivery.using, delivery.id, delivery.deliveries, self._worker)
        begin()
        logger.warning(
            "%r runs alone in its process, because %d deliveries before it crashed", delivery, delivery.crashes
        )
        self.pool.submit([delivery])
        self.pool.quarantined = None
        self.pool.wait_idle(float("inf"), give_up)
        # An outcome that is not recorded yet would be evidence against the next message.
        self.pool.recorder.flush(1.0)
        self._return_right()

    def release(self, outcome: Release) -> None:
        """Release the message that waits here, if there is one."""
        delivery = self.pool.quarantined
        if delivery is not None:
            self.pool.recorder.submit(delivery, outcome, self._actor)
            self.budget.refund()
            self.pool.quarantined = None
            self._return_right()

    def _return_right(self) -> None:
        self.pool.page.suspect_since = 0.0
        if self._lock is not None:
            self._lock.release()


def _detour(delivery: Delivery) -> timedelta:
    """Return a random time to put a message off: messages that are put off together must not come back together."""
    return timedelta(seconds=random.uniform(0, min(POSTPONED, FIRST_DETOUR * 2.0 ** _times_put_off(delivery))))


def _times_put_off(delivery: Delivery) -> int:
    """Return how often a message was put off at most, up to six: other deliveries that cost no attempt count too."""
    return min(6, delivery.claimed.reported - delivery.claimed.attempts)
