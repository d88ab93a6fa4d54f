"""Deletes finished messages with their log when their retention time is over, old leases, and rows of dead workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from ...core.durations import brief
from ...core.states import FINAL, State
from ...extensions import Service
from ...models import Worker
from ...project import conf
from ...record import admission, crashes, reads, unannounced
from ...record.purge import finished, passed_over, purge, referred_to
from .heartbeat import delete_rows
from .upkeep_tuning import USUAL, UpkeepTuning

logger = logging.getLogger("django_delayq")


class Janitor(Service):
    """Prunes from time to time: a batch at a time, with a rest after each."""

    name = "janitor"
    is_shared = True

    def __init__(self, using: str, tuning: UpkeepTuning = USUAL) -> None:
        self.using = using
        self.tuning = tuning
        # Prunes a batch at each ``next``. None: nothing is being pruned.
        self._pruning: Iterator[int] | None = None
        # The foreign keys that the log has named.
        self._named: set[str] = set()

    def tick(self) -> float:
        """Delete a batch; come back soon when there is more."""
        pruning, self._pruning = self._pruning, None
        if pruning is None:
            self._tidy()
            pruning = self._prune()
        began = time.monotonic()
        if next(pruning, None) is None:
            return self.tuning.prune_interval
        # The next tick goes on with it. After an error the next tick begins anew.
        self._pruning = pruning
        return self.tuning.rest * (time.monotonic() - began)

    def _prune(self) -> Iterator[int]:
        """Delete the messages whose retention time is over; yield the size of each batch."""
        settings = conf.get()
        kept = ((FINAL - {State.DEAD}, settings.RETENTION), ({State.DEAD}, settings.DEAD_RETENTION))
        for states, retention in kept:
            if retention is False:
                continue
            deleted = 0
            doomed = finished(self.using, states, retention)
            for size in purge(doomed, batch_size=self.tuning.prune_batch):
                deleted += size
                yield size
            if deleted:
                logger.info("Pruned %d messages that finished more than %s ago", deleted, brief(retention))
            self._name(referred_to(doomed))

    def _name(self, kept: dict[str, list[int]]) -> None:
        """Log the foreign keys that keep messages, each once."""
        for name in kept.keys() - self._named:
            logger.warning("%s", passed_over(name, kept[name]))
        self._named |= kept.keys()

    def _tidy(self) -> None:
        """Delete old leases, unused limits, and the rows of workers that are gone."""
        crashes.drop_leases(self.using)
        unannounced.drop_useless(self.using)
        admission.tidy(self.using)
        dead_since = reads.now(self.using) - self.tuning.dead_worker_retention
        dead = Worker.objects.using(self.using).filter(seen_at__lt=dead_since)
        delete_rows(self.using, dead.values_list("name", flat=True))
