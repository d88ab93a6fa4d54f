"""Rollups: counts of what a worker process does, added to a table every few seconds and compacted when they are old."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta

from ...core.states import State
from ...extensions import HandledMessage, Service
from ...record import reads
from ...record.sql.moves import writing
from ...record.sql.rows import Claimed, Moved
from ...signals import MessageFacts
from ..console_tuning import tuning
from ..models import Rollup
from ..statements import console_statements
from ..statements.portable_console import RollupKey

logger = logging.getLogger("django_delayq")

# The two lengths of time that a rollup covers.
MINUTE_SECONDS = 60
HOUR_SECONDS = 3600


_BOUNDS = [timedelta(milliseconds=bound) for bound in Rollup.BOUNDS]
_SECONDS = [bound / 1000 for bound in Rollup.BOUNDS]

Rollups = dict[RollupKey, Counter[str]]


class UnwrittenCounts:
    """Counts of what happened in this process and is not written yet. A message costs one look-up in a dict.

    While the database takes no rollups, it holds ``most`` of them, and drops the counts for others.
    """

    def __init__(self, most: int = 20_000) -> None:
        self._most = most
        self._rollups: Rollups = {}
        # Several threads of the worker count.
        self._lock = threading.Lock()
        self._dropped = False
        # How far the record's clock was ahead of this host's at the last claim.
        self._ahead = timedelta(0)

    def ended(self, outcome: str, messages: Collection[MessageFacts]) -> None:
        """Count messages that ended with this outcome, one of ``Rollup.OUTCOMES``."""
        at = datetime.now(UTC) + self._ahead
        with self._lock:
            for (queue, topic), number in Counter((m.queue, m.topic) for m in messages).items():
                self._add(_minute(at, queue, topic), {outcome: number})

    def claimed(self, claimed: Iterable[Claimed]) -> None:
        """Count the lateness of messages that were just claimed together; only first deliveries have one."""
        rows = list(claimed)
        if not rows:
            return
        at = rows[-1].claimed_at
        self._ahead = at - datetime.now(UTC)
        first = [row for row in rows if row.deliveries == 1]
        late = Counter((row.queue, row.topic, bisect_left(_BOUNDS, row.claimed_at - row.due_at)) for row in first)
        with self._lock:
            for (queue, topic, place), number in late.items():
                self._add(_minute(at, queue, topic), {Rollup.LATENESS[place]: number})

    def handled(self, messages: Iterable[HandledMessage]) -> None:
        """Count the run times of handlers that have just run, whatever their outcome."""
        at = datetime.now(UTC) + self._ahead
        ran: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for message in messages:
            counts, runtime = ran[message.queue, message.topic], message.runtime
            counts[Rollup.RUNTIME[bisect_left(_SECONDS, runtime)]] += 1
            counts["run_us"] += int(runtime * 1e6)
        with self._lock:
            for names, counts in ran.items():
                self._add(_minute(at, *names), counts)

    def moved(self, moved: Collection[Moved]) -> None:
        """Count messages that became dead or expired without a report of their handler."""
        for state in (State.DEAD, State.EXPIRED):
            self.ended(state.value, [row for row in moved if row.after == state])

    def drain(self) -> Rollups:
        """Return all counts and begin again with none."""
        with self._lock:
            drained, self._rollups = self._rollups, {}
        return drained

    def undrain(self, rollups: Rollups) -> None:
        """Add counts that were drained and could not be written."""
        with self._lock:
            for key, counts in rollups.items():
                self._add(key, counts)

    def _add(self, key: RollupKey, counts: Mapping[str, int]) -> None:
        """Add counts to a rollup; drop them when too many rollups wait already."""
        if key in self._rollups or len(self._rollups) < self._most:
            self._rollups.setdefault(key, Counter()).update(counts)
        elif not self._dropped:
            self._dropped = True
            logger.warning(
                "Counts for the statistics are dropped: %d rollups wait to be written to the database already",
                self._most,
            )


class RollupWriter(Service):
    """Adds the counts of this process to the rollups. An idle process issues no statement."""

    name = "rollup writer"

    def __init__(self, using: str, counts: UnwrittenCounts) -> None:
        self.using = using
        self.counts = counts

    def tick(self) -> float:
        drained = self.counts.drain()
        try:
            write(self.using, drained)
        except BaseException:
            self.counts.undrain(drained)
            raise
        return tuning.rollup_interval


class RollupCompactor(Service):
    """Puts hours in the place of old minutes, and deletes old hours. Once a minute, on a day's minutes at most."""

    name = "rollup compactor"
    is_shared = True
    interval = 60.0
    hours = 24

    def __init__(self, using: str) -> None:
        self.using = using

    def tick(self) -> float:
        return 0.5 if self.compact(self.hours) else self.interval

    def compact(self, hours: int) -> bool:
        """Compact the minutes of ``hours`` hours. Return whether there may be more."""
        now = reads.now(self.using)
        rows = Rollup.objects.using(self.using)
        rows.filter(seconds=HOUR_SECONDS, at__lt=now - tuning.hours_kept).delete()
        for _ in range(hours):
            oldest = rows.filter(seconds=MINUTE_SECONDS).order_by("at").values_list("at", flat=True).first()
            if oldest is None:
                return False
            begin = oldest.replace(minute=0, second=0, microsecond=0)
            if begin + timedelta(hours=1) > now - tuning.minutes_kept:
                return False
            self._compact_hour(begin)
        return True

    def _compact_hour(self, begin: datetime) -> None:
        """Replace the rollups of the minutes of an hour by rollups of the hour."""
        end = begin + timedelta(hours=1)
        rows = Rollup.objects.using(self.using).filter(seconds=MINUTE_SECONDS, at__gte=begin, at__lt=end)
        names = ("queue", "topic", *Rollup.COUNTS)
        sums: Rollups = {}
        with writing(self.using):
            # Locked where the database locks rows: what another process adds meanwhile must not be deleted uncounted.
            locked = rows.select_for_update().order_by("at", "queue", "topic")
            for counts in locked.values(*names):
                key = RollupKey(begin, HOUR_SECONDS, counts.pop("queue"), counts.pop("topic"))
                sums.setdefault(key, Counter()).update(counts)
            console_statements(self.using).add_to_rollups(sums)
            rows.delete()


def write(using: str, rollups: Rollups) -> None:
    """Add counts to the rollups: all of them, or none."""
    if rollups:
        with writing(using):
            console_statements(using).add_to_rollups(rollups)


def _minute(at: datetime, queue: str, topic: str) -> RollupKey:
    return RollupKey(at.replace(second=0, microsecond=0), MINUTE_SECONDS, queue, topic)
