"""Deletes finished messages with their log when their retention time is over, old leases, and rows of dead workers."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from django.db.models import QuerySet

from ...core.durations import brief
from ...core.retention import Rule, rules
from ...core.states import FINAL, State
from ...extensions import Service
from ...models import Message, Worker
from ...project import conf
from ...record import admission, crashes, reads, unannounced
from ...record.purge import finished, of_rule, passed_over, purge, referred_to, spans
from .heartbeat import delete_rows
from .upkeep_tuning import USUAL, UpkeepTuning

logger = logging.getLogger("django_delayq")

# No message ended before this time.
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)


class Janitor(Service):
    """Prunes from time to time: a batch at a time, with a rest after each."""

    name = "janitor"
    is_shared = True

    def __init__(self, using: str, tuning: UpkeepTuning = USUAL) -> None:
        self.using = using
        self.tuning = tuning
        # Prunes a batch at each ``next``. None: nothing is being pruned.
        self._pruning: Iterator[int] | None = None
        # By rule: the time before which all messages that ended are deleted, except those that had to stay. And when
        # (monotonic) the janitor searches from the beginning again.
        self._walked: dict[tuple[frozenset[State], Rule], datetime] = {}
        self._walk_anew_at = 0.0
        # The foreign keys that the log has named.
        self._named: set[str] = set()

    def tick(self) -> float:
        """Delete a batch; come back soon when there is more."""
        pruning, self._pruning = self._pruning, None
        if pruning is None:
            self._tidy()
            pruning = self._prune()
        began = time.monotonic()
        while (deleted := next(pruning, None)) == 0 and time.monotonic() < began + self.tuning.walk:
            pass
        if deleted is None:
            return self.tuning.prune_interval
        # The next tick goes on with it. After an error the next tick begins anew.
        self._pruning = pruning
        return self.tuning.rest * (time.monotonic() - began)

    def _prune(self) -> Iterator[int]:
        """Delete the messages whose retention time is over; yield the size of each batch."""
        settings = conf.get()
        kept = (FINAL - {State.DEAD}, settings.RETENTION), (frozenset({State.DEAD}), settings.DEAD_RETENTION)
        for states, retention in kept:
            every = rules(retention)
            # In any order: a process that ticks only once is to come to each of them in time.
            for number, rule in random.sample([*enumerate(every)], len(every)):
                if rule.span is False:
                    continue
                deleted = 0
                for doomed in self._doomed(states, every, number):
                    for size in purge(doomed, batch_size=self.tuning.prune_batch):
                        deleted += size
                        yield size
                    self._name(referred_to(doomed))
                    if len(every) > 1:
                        yield 0
                if deleted:
                    of = f" of {rule.pattern}" if rule.pattern else ""
                    logger.info("Pruned %d messages%s that finished more than %s ago", deleted, of, brief(rule.span))

    def _doomed(self, states: frozenset[State], kept: Sequence[Rule], number: int) -> Iterator[QuerySet[Message]]:
        """Yield the messages of a rule whose time is over: of all names together, else of one span after another.

        Messages of other rules lie between those of one. Each is looked at once a day, and not at each pruning.
        """
        span = kept[number].span
        doomed = finished(self.using, states, span)
        if len(kept) == 1:
            yield doomed
            return
        if time.monotonic() > self._walk_anew_at:
            self._walk_anew_at = time.monotonic() + self.tuning.walk_anew
            self._walked.clear()
        place, until = (states, kept[number]), reads.now(self.using) - timedelta(seconds=span)
        where = of_rule(kept, number)
        for begin, end in spans(self.using, self._walked.get(place, EARLIEST), until, self.tuning.walked_together):
            yield doomed.filter(where, finished_at__gte=begin, finished_at__lt=end)
        self._walked[place] = until

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
