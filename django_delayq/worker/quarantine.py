"""Messages that seem to kill their workers run with nothing else in the process: they harm only themselves."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from .. import conf
from ..outcomes import Release
from .budget import Budget
from .delivery import Delivery
from .pool import Pool
from .processlock import ProcessLock

logger = logging.getLogger("django_delayq")

# After so many deliveries that ended without a word a message runs alone, or after one less than MAX_CRASHES.
SUSPECT = 2
# While one waits for that, its process takes nothing. When that takes longer than this, it is put off, and may wait for
# twice as long the next time, up to some minutes: for longer than most handlers run. Seconds.
PATIENCE = 5.0
PUT_OFF = 30.0
# While another process of this worker runs one alone, it makes way for a moment within this time, which doubles each
# time, up to PUT_OFF: were each process to run one alone, nothing else would be delivered. Seconds.
TURN = 1.0
REASON = "is to run alone"


class Quarantine:
    """The one that waits in this process, and the right to run it: ``lock`` (None: there is no other process)."""

    def __init__(self, pool: Pool, worker: str, budget: Budget, lock: ProcessLock | None) -> None:
        self.pool = pool
        self.budget = budget
        self._actor = f"worker:{worker}"
        self._lock = lock
        self._suspect = max(1, min(SUSPECT, conf.get().MAX_CRASHES - 1))
        # Until when it may wait (monotonic).
        self._until = 0.0

    @property
    def waits(self) -> bool:
        """Whether one is here."""
        return self.pool.aside is not None

    @property
    def patience(self) -> float:
        """For how many seconds it may wait yet."""
        return max(0.0, self._until - time.monotonic())

    def concerns(self, delivery: Delivery) -> bool:
        return delivery.crashes >= self._suspect

    def keep(self, suspects: Sequence[Delivery]) -> bool:
        """Let one of those that were claimed wait here, if none does in another process; give back the others.

        One that only waits must not be here when another one kills the process: it would be held against it.
        """
        mine = bool(suspects) and (self._lock is None or self._lock.acquire(wait=False))
        if mine:
            self.pool.aside = suspects[0]
            self._until = time.monotonic() + PATIENCE * 2.0 ** _times_put_off(suspects[0])
        for delivery in suspects[mine:]:
            self.pool.recorder.submit(delivery, Release(REASON, None if mine else _moment(delivery)), self._actor)
        return mine

    def run(self, begin: Callable[[], None], give_up: Callable[[], bool]) -> None:
        """Run the one that waits, unless something else runs. Returns when it has ended."""
        delivery = self.pool.aside
        if delivery is None or give_up():
            return
        if self.pool.busy or not self.pool.recorder.flush(1.0):
            if not self.patience:
                self.give_back(Release(REASON, timedelta(seconds=PUT_OFF)))
            return
        begin()
        logger.warning("%r runs alone: %d deliveries before it ended without a word", delivery, delivery.crashes)
        self.pool.submit([delivery])
        self.pool.aside = None
        self.pool.wait_idle(float("inf"), give_up)
        self._leave_to_another()

    def give_back(self, outcome: Release) -> None:
        """End the wait of the one that is here, if there is one."""
        delivery = self.pool.aside
        if delivery is not None:
            self.pool.recorder.submit(delivery, outcome, self._actor)
            self.budget.give_back()
            self.pool.aside = None
            self._leave_to_another()

    def _leave_to_another(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _moment(delivery: Delivery) -> timedelta:
    """For how long it makes way. At random: what makes way together is not to come back together."""
    return timedelta(seconds=random.uniform(0, min(PUT_OFF, TURN * 2.0 ** _times_put_off(delivery))))


def _times_put_off(delivery: Delivery) -> int:
    """How often at the most it was put off so far, up to six: other deliveries that cost no attempt count too."""
    return min(6, delivery.claimed.reported - delivery.claimed.attempts)
