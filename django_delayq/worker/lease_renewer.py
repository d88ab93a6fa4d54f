"""Ends handlers past their timeout, keeps the leases of long ones, and tells them of a cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .. import transitions
from ..extensions import Service
from ..sql.rows import LeaseRenewal
from ..states import State
from .delivery import Delivery
from .pool import Pool

logger = logging.getLogger("django_delayq")

# A handler that has run this long is asked about once a second: is it cancelled, is its lease still ours? Seconds.
LONG = 1.0
# Timeouts are looked at this often, without a query. Seconds.
WATCH = 0.25
# What waits this long for a thread is given back: the handlers before it turned out slow, and others may be idle.
# Seconds.
WAITED = 1.0
# A handler that did not end this long after its timeout does not let go: its process is replaced. Seconds.
HARD = 5.0


class Watch(Service):
    """Looks at what runs. It asks no database: a handler must end in time although that does not answer."""

    name = "watch"
    thread = "watch"
    longest_backoff = 1.0

    def __init__(self, pool: Pool, stuck: Callable[[list[Delivery]], None], hard: float = HARD) -> None:
        self.pool = pool
        self.stuck = stuck
        self.hard = hard

    def tick(self) -> float:
        held = self.pool.held()
        self._end_overtime(held)
        self.pool.give_back_waiting(WAITED)
        return min([WATCH, *(-over for d in held if (over := d.overtime) is not None and over < 0)])

    def _end_overtime(self, held: list[Delivery]) -> None:
        late = [d for d in held if d.is_late()]
        for delivery in late:
            delivery.interrupt()
        gone = [d for d in late if d.is_late(self.hard)]
        if gone:
            self.stuck(gone)


class LeaseRenewer(Service):
    """Costs one query a second while long handlers run, and none otherwise."""

    name = "lease renewer"
    thread = "lease-renewer"
    longest_backoff = 1.0

    def __init__(self, using: str, pool: Pool) -> None:
        self.using = using
        self.pool = pool
        self._keep_at = 0.0

    def tick(self) -> float:
        now = time.monotonic()
        kept = [d for d in self.pool.held() if not d.lost]
        # A lease of a second or two cannot wait for its turn.
        if now >= self._keep_at or any(_half_gone(d, now) for d in kept):
            self._keep_at = now + LONG
            self._keep([d for d in kept if now - d.claimed_mono > LONG or _half_gone(d, now)])
        return WATCH

    def _keep(self, deliveries: list[Delivery]) -> None:
        now = time.monotonic()
        holdings = [
            # A lease is renewed in its last two thirds; before that this is only a look.
            LeaseRenewal(d.id, d.deliveries, d.handler.lease if now - d.leased_mono > d.handler.lease / 3 else 0.0)
            for d in deliveries
        ]
        # A row that somebody's long transaction has locked must not cost the others their leases.
        answers = transitions.extend(self.using, holdings, wait=False)
        locked = self._locked([d for d in deliveries if d.id not in answers])
        for delivery, holding in zip(deliveries, holdings, strict=True):
            requested = answers.get(delivery.id)
            if requested is None:
                if delivery not in locked:
                    self._lost(delivery)
                continue
            delivery.requested = requested
            if holding.lease:
                delivery.leased_mono = now

    def _locked(self, missed: list[Delivery]) -> list[Delivery]:
        """Those that are ours still: nobody reaps a locked row either."""
        rows = transitions.live_deliveries(self.using, [d.id for d in missed]) if missed else {}
        return [d for d in missed if rows.get(d.id) == (State.RUNNING, d.deliveries)]

    def _lost(self, delivery: Delivery) -> None:
        if (delivery.id, delivery.deliveries) in {(d.id, d.deliveries) for d in self.pool.held()}:
            delivery.lost = True
            logger.warning("The lease of %r is lost; its failure will be refused, its success accepted", delivery)


def _half_gone(delivery: Delivery, now: float) -> bool:
    return now - delivery.leased_mono > delivery.handler.lease / 2
