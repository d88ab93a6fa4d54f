"""Renews the leases of long-running handlers, and shows these handlers that a cancel was requested."""

from __future__ import annotations

import logging
import time

from ...core.states import State
from ...extensions import Service
from ...record import transitions
from ...record.sql import statements
from ...record.sql.rows import LeaseRenewal
from ..parts.delivery import Delivery
from .pool import Pool

logger = logging.getLogger("django_delayq")

# The time between two queries about each handler that has run for at least this long: was a cancel requested, and is
# its lease still ours? Seconds.
RENEWAL_INTERVAL = 1.0
# The time between two searches for leases that are half over. A search needs no query. Seconds.
LEASE_CHECK_INTERVAL = 0.25


class LeaseRenewer(Service):
    """Renews leases: one query a second while handlers run for long, and none otherwise.

    It runs in the recorder's thread, on its connection: neither waits for a locked row, so neither keeps the other
    waiting for longer than a statement takes.
    """

    name = "lease renewer"
    longest_backoff = 1.0

    def __init__(self, using: str, pool: Pool) -> None:
        self.using = using
        self.pool = pool
        self._renew_at = 0.0

    def tick(self) -> float:
        """Renew the leases of long-running handlers once a second, and at once when a lease is half over."""
        now = time.monotonic()
        held = [d for d in self.pool.held() if not d.lost]
        # A lease of one or two seconds cannot wait for its turn.
        if now >= self._renew_at or any(_is_half_over(d, now) for d in held):
            self._renew_at = now + RENEWAL_INTERVAL
            self._renew([d for d in held if now - d.claimed_mono > RENEWAL_INTERVAL or _is_half_over(d, now)])
        return LEASE_CHECK_INTERVAL

    def _renew(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        now = time.monotonic()
        holdings = [
            # A lease is renewed in its last two thirds; before that the record is only read.
            LeaseRenewal(d.id, d.deliveries, d.lease if now - d.leased_mono > d.lease / 3 else 0.0)
            for d in deliveries
        ]
        # A row that somebody's long transaction has locked must not cost the others their leases.
        answers = statements(self.using).extend(holdings, wait=False)
        locked = self._still_ours([d for d in deliveries if d.id not in answers])
        for delivery, holding in zip(deliveries, holdings, strict=True):
            cancel_requested = answers.get(delivery.id)
            if cancel_requested is not None:
                delivery.note_renewal(now if holding.lease else None, cancel_requested=cancel_requested)
            elif delivery not in locked:
                self._note_lost(delivery)

    def _still_ours(self, unanswered: list[Delivery]) -> list[Delivery]:
        """Return the deliveries whose rows are locked and still ours: the reaper passes over locked rows, too."""
        rows = transitions.live_deliveries(self.using, [d.id for d in unanswered]) if unanswered else {}
        return [d for d in unanswered if rows.get(d.id) == (State.RUNNING, d.deliveries)]

    def _note_lost(self, delivery: Delivery) -> None:
        # A delivery that has ended meanwhile has no lease to lose.
        if delivery in self.pool.held():
            delivery.lost = True
            logger.warning("The lease of %r is lost; its failure will be refused, its success accepted", delivery)


def _is_half_over(delivery: Delivery, now: float) -> bool:
    return now - delivery.leased_mono > delivery.lease / 2
