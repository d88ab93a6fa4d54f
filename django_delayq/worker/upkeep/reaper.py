"""Ends deliveries whose lease ran out, and messages that were not started in their time."""

from __future__ import annotations

import time

from ...core import failpoints
from ...extensions import Service, WorkerExtensions
from ...record import crashes, transitions
from ...record.low_water import LowWater
from ...record.sql import statements
from ...record.sql.rows import Moved
from ..run.reporting import SignalSender, report_moves
from .upkeep_tuning import USUAL, UpkeepTuning


class Reaper(Service):
    """Takes messages back and expires messages every few seconds. A message taken back is due at once.

    While a table is locked (by VACUUM FULL or a migration), no worker can renew a lease. While a row is locked, no
    worker can record the outcome of its delivery. So a lease that ran out is ended only if a second look,
    ``confirm_after`` seconds later, finds it over too, both looks find the row free, and none waits for a lock on a
    table: until then the renewals and the outcomes that waited have been written.
    """

    name = "reaper"

    def __init__(
        self, using: str, actor: str, extensions: WorkerExtensions, sender: SignalSender, tuning: UpkeepTuning = USUAL
    ) -> None:
        self.using = using
        self.actor = actor
        self.extensions = extensions
        self.sender = sender
        self.tuning = tuning
        # The deliveries whose lease was over at the last look, with the time of the first such look (monotonic).
        self._suspects: dict[crashes.Held, float] = {}
        # Where the looks at leases, and at messages that may expire, begin.
        self._marks = LowWater(), LowWater()

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        """False while leases may have run out: the second look comes soon from the process that made the first.

        A look of long ago would confirm nothing, since leases may have been renewed after it.
        """
        return not self.is_confirming

    @property
    def is_confirming(self) -> bool:
        """True when leases have run out that the next tick may end."""
        return bool(self._suspects)

    def tick(self) -> float:
        """End a batch of each kind; come back at once when there is more. One query while there is nothing to do."""
        began = time.monotonic()
        leased, expiring = crashes.anything_expired(self.using, *self._marks)
        moved: list[Moved] = []
        confirmed = self._confirmed(began) if leased else set()
        if not leased:
            self._suspects = {}
        if confirmed and crashes.may_reap(self.using):
            suspects, self._suspects = self._suspects, {}
            moved += crashes.reap(self.using, actor=self.actor, among=confirmed)
            # After an error, such as a wait for a lock that was too long, the two looks begin anew.
            self._suspects = suspects
            failpoints.reach("after_reap")
        if expiring and not self.sender.is_behind:
            moved += transitions.expire(self.using, actor=self.actor)
        report_moves(self.using, moved, self.extensions, self.sender.send)
        if len(moved) >= transitions.MOVES_PER_TRANSACTION:
            return 0.0
        return self.tuning.confirm_after if self._suspects.keys() - confirmed else self.tuning.reap_interval

    def _confirmed(self, began: float) -> set[crashes.Held]:
        """Return the deliveries whose leases may be ended, and remember the others. ``began``: when the tick did."""
        # Some locks let everybody read, and keep renewals waiting: a renewal of nothing waits with them.
        statements(self.using).extend([])
        expired = crashes.expired_leases(self.using)
        now = time.monotonic()
        known = self._suspects if now - began < self.tuning.longest_look else {}
        self._suspects = {held: known.get(held, now) for held in expired}
        return {held for held, since in self._suspects.items() if began - since >= self.tuning.confirm_after}
