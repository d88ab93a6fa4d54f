"""Puts messages into Redis again that got lost between the record and Redis."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import chain, islice

from ...broker.base import Entry
from ...broker.publisher import by_queue
from ...core.exceptions import BrokerUnavailable
from ...core.known_record import doubt_identity
from ...extensions import Service
from ...project import conf
from ...record import unannounced
from ...record.low_water import LowWater
from ...record.sql.rows import BEGINNING, IndexPosition, Span, ToAnnounce
from ...restore import reading
from ...restore.filling import fill
from ..shared.broker_switch import BrokerSwitch
from .upkeep_tuning import USUAL, UpkeepTuning

logger = logging.getLogger("django_delayq")


class Sweeper(Service):
    """Searches the record for messages overdue by more than half the grace, and puts the ones that Redis lacks.

    It also puts those that SQL has scheduled since the last tick: what is due later than that is on time.

    A lost message, however it got lost, is late by twice the grace at most: half of it until a sweep looks for it, once
    the grace until that sweep, and the rest for the sweep itself, the services that it waits for, and the claim.
    The work of a tick is bounded: a long backlog is swept in pages, in the order of the due times, whatever the queues.
    """

    name = "sweeper"
    is_shared = True

    def __init__(
        self,
        using: str,
        brokers: BrokerSwitch,
        queues: Callable[[], tuple[str, ...]],
        topics: Callable[[], Iterable[str]],
        tuning: UpkeepTuning = USUAL,
    ) -> None:
        assert brokers.redis is not None
        self.using = using
        self.brokers = brokers
        self.broker = brokers.redis
        self.queues = queues
        self.topics = topics
        self.tuning = tuning
        # The position in the order of (due, id) where the round began, and where it goes on; None: the next tick begins
        # a round.
        self.began_at = BEGINNING
        self._cursor: IndexPosition | None = None
        # Where a round begins that is no full scan.
        self._low = LowWater(tuning.parts_of_time, tuning.late_commit)
        # At the last tick, the messages due up to this time were overdue.
        self._looked: datetime | None = None

    def tick(self) -> float:
        """Sweep some pages, unless no message is overdue or Redis is away."""
        grace, began = conf.get().GRACE, time.monotonic()
        if self.brokers.current() is not self.broker:
            return grace
        found = unannounced.look(self.using, self.tuning.announced_together)
        try:
            is_announced = bool(found.ids) and self._announce(found)
            put = self.sweep(found.now - timedelta(seconds=grace / 2))
            if put:
                # For delayq_check: projects whose announcements do not arrive here may use another Redis.
                self.broker.note_sweep()
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
            return grace
        for queue, number in sorted(put.items()):
            logger.warning("The sweep of queue %s put %d messages that Redis had lost", queue, number)
        if put:
            # Producers may know another identity: somebody has emptied the tables, or loaded a dump over them.
            doubt_identity(self.using)
        if is_announced and len(found.ids) == self.tuning.announced_together:
            # There may be more.
            return 0.0
        # The grace counts from the beginning of this sweep. But after a long one, other services get half of it.
        return max(grace / 2, grace - (time.monotonic() - began))

    def _announce(self, found: ToAnnounce) -> bool:
        """Tell Redis of messages that SQL has scheduled, unless it is to be loaded, which tells it of them too."""
        if self._is_loading():
            return False
        entries = by_queue((queue, Entry(*values)) for queue, *values in found.waiting)
        list(fill(self.broker, [reading.Batch(entries)] if entries else []))
        unannounced.forget(self.using, found.ids)
        return True

    def sweep(self, overdue_since: datetime) -> Counter[str]:
        """Go on with the round, for some pages at most. Return how many messages of each queue were put."""
        if self._cursor is None:
            self._cursor = self.began_at = self._low.begin()
        queues, topics = self.queues(), list(self.topics())
        span = Span(overdue_since, self._cursor, self.tuning.page, topics)
        missing: defaultdict[str, list[Entry]] = defaultdict(list)
        pages, asked, rows = reading.merged(self.using, queues, span), time.monotonic(), 0
        first = next(pages, None)
        if self._cursor == self.began_at:
            # The first page of a round has passed the dead rows.
            took = time.monotonic() - asked
            self._low.note(self.began_at, None if first is None else (first.first, 0), overdue_since, took)
        if first is not None and self._is_loading():
            # Redis has not lost them: the load brings them first. The next tick begins here.
            return Counter()
        for page in chain([] if first is None else [first], pages):
            self._note_missing(page.by_queue, missing)
            due_at, pk = page.end
            assert due_at is not None
            self._cursor = (due_at, pk)
            rows += page.size
            if rows >= self.tuning.rows_per_tick:
                break
        else:
            self._cursor = None
        if self._cursor is not None:
            # A round over a backlog takes long. What has become overdue since the last tick does not wait for it.
            after = max(self._cursor, (self._looked or overdue_since, 0))
            for page in islice(reading.merged(self.using, queues, span._replace(after=after)), self.tuning.new_pages):
                self._note_missing(page.by_queue, missing)
        self._looked = overdue_since
        return self._fill(missing)

    def _is_loading(self) -> bool:
        """Return whether Redis is still to be loaded from the beginning."""
        meta = self.broker.read_meta()
        return meta.horizon_tenths is None or meta.is_loading

    def _note_missing(self, entries: dict[str, list[Entry]], missing: defaultdict[str, list[Entry]]) -> None:
        """Add the messages that Redis lacks to those that are ``missing``."""
        for queue, ids in self.broker.missing(entries).items():
            if ids:
                lacking = set(ids)
                missing[queue] += [entry for entry in entries[queue] if entry.id in lacking]

    def _fill(self, missing: dict[str, list[Entry]]) -> Counter[str]:
        """Put the messages of these that are still scheduled a moment later."""
        put: Counter[str] = Counter()
        if not missing:
            return put
        # Most likely a consumer has just taken these ids and is about to claim them.
        time.sleep(self.tuning.claiming)
        still = reading.still_scheduled(self.using, reading.Batch(missing).ids)
        left = {queue: [entry for entry in entries if entry.id in still] for queue, entries in missing.items()}
        for _batch, answers in fill(self.broker, [reading.Batch(left)]):
            put.update({queue: answer.put for queue, answer in answers.items()})
        return +put
