"""Deletes finished messages with their log when their retention time is over, old leases, and rows of dead workers."""

from __future__ import annotations

import logging
from datetime import timedelta

from .. import admission, conf, transitions
from ..extensions import Service
from ..models import Worker
from ..purge import PURGED_PER_TRANSACTION, finished, purge
from ..states import FINAL, State

logger = logging.getLogger("django_delayq")

# The row of a worker that has shown no sign of life for this long is deleted.
DEAD_WORKER_RETENTION = timedelta(days=1)


class Janitor(Service):
    """Deletes a few batches once a minute."""

    name = "janitor"
    is_shared = True
    interval = 60.0
    batches = 2

    def __init__(self, using: str) -> None:
        self.using = using

    def tick(self) -> float:
        """Delete up to ``batches`` batches of each kind; come back soon when there is more."""
        settings = conf.get()
        is_more = False
        kept = ((FINAL - {State.DEAD}, settings.RETENTION), ({State.DEAD}, settings.DEAD_RETENTION))
        for states, retention in kept:
            if retention is None:
                continue
            deleted = sum(purge(finished(self.using, states, retention), limit=self.batches * PURGED_PER_TRANSACTION))
            if deleted:
                logger.info("Pruned %d messages that finished more than %g s ago", deleted, retention)
            is_more = is_more or deleted >= self.batches * PURGED_PER_TRANSACTION
        transitions.drop_leases(self.using)
        admission.tidy(self.using)
        dead_since = transitions.now(self.using) - DEAD_WORKER_RETENTION
        Worker.objects.using(self.using).filter(seen_at__lt=dead_since).delete()
        return 0.1 if is_more else self.interval
