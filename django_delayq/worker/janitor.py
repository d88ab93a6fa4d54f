"""Deletes finished messages, with their log, when their time of retention is over; forgets dead workers."""

from __future__ import annotations

import logging
from datetime import timedelta

from .. import conf, transitions
from ..extensions import Service
from ..models import Worker
from ..purge import PURGED_PER_TRANSACTION, purge
from ..states import FINAL, State

logger = logging.getLogger("django_delayq")


class Janitor(Service):
    """Once a minute, a few batches."""

    name = "janitor"
    interval = 60.0
    batches = 20

    def __init__(self, using: str) -> None:
        self.using = using

    def tick(self) -> float:
        settings = conf.get()
        full = False
        kept = ((FINAL - {State.DEAD}, settings.RETENTION), ({State.DEAD}, settings.DEAD_RETENTION))
        for states, retention in kept:
            if retention is None:
                continue
            deleted = sum(purge(self.using, states, retention, limit=self.batches * PURGED_PER_TRANSACTION))
            if deleted:
                logger.info("Purged %d finished messages older than %g s", deleted, retention)
            full = full or deleted >= self.batches * PURGED_PER_TRANSACTION
        gone = transitions.now(self.using) - timedelta(days=1)
        Worker.objects.using(self.using).filter(seen_at__lt=gone).delete()
        return 0.5 if full else self.interval
