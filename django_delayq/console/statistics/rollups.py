"""Counts what a worker process does, and adds it to the rollups every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple

from django.db import connections

from ... import transitions
from ...extensions import Service
from ...signals import MessageFacts
from ...sql.moves import writing
from ...sql.rows import Claimed, Moved
from ...states import State
from ..models import Rollup

logger = logging.getLogger("django_delayq")

MINUTE = 60
HOUR = 3600
INTERVAL = 10.0
# Minutes are kept for this long before hours take their place; hours for that long.
MINUTES_FOR = timedelta(days=2)
HOURS_FOR = timedelta(days=90)
# Counts of a process whose database does not take them: those of further minutes and topics are dropped. Keys.
MOST = 20_000
# Rows in one statement: SQLite takes some 32,000 parameters.
BATCH = 500


class CountedOutcome(IntEnum):
    """The outcomes that are counted besides the lateness; the value is the place in a row of counts."""

    CONSUMED = 0
    RETRIED = 1
    DEAD = 2
    EXPIRED = 3


COLUMNS = (
    *(what.name.lower() for what in CountedOutcome),
    *(f"late_{bound}" for bound in Rollup.BOUNDS),
    "late_more",
)
_LATE = len(CountedOutcome)
_BOUNDS = [timedelta(milliseconds=bound) for bound in Rollup.BOUNDS]


class Key(NamedTuple):
    """Which row: begin and length in seconds, queue, topic."""

    at: int
    seconds: int
    queue: str
    topic: str


Rows = dict[Key, list[int]]


class Counts:
    """CountedOutcome happened in this process and is not written yet. Costs a look-up in a dict per message."""

    def __init__(self) -> None:
        self._rows: Rows = {}
        self._lock = threading.Lock()
        self._dropped = False

    def __bool__(self) -> bool:
        return bool(self._rows)

    def ended(self, outcome: CountedOutcome, messages: Collection[MessageFacts]) -> None:
        """Count messages that ended like this."""
        if not messages:
            return
        at = _minute(time.time())
        with self._lock:
            for (queue, topic), number in Counter((m.queue, m.topic) for m in messages).items():
                self._add(at, queue, topic, outcome, number)

    def claimed(self, claimed: Iterable[Claimed]) -> None:
        """Messages that were just claimed together: the lateness of those that were never before."""
        first = [row for row in claimed if row.deliveries == 1]
        if not first:
            return
        at = _minute(first[0].claimed_at.timestamp())
        late = Counter((row.queue, row.topic, bisect_left(_BOUNDS, row.claimed_at - row.due_at)) for row in first)
        with self._lock:
            for (queue, topic, place), number in late.items():
                self._add(at, queue, topic, _LATE + place, number)

    def moved(self, moved: Collection[Moved]) -> None:
        """Messages that ended without their handler's word."""
        for state, outcome in ((State.DEAD, CountedOutcome.DEAD), (State.EXPIRED, CountedOutcome.EXPIRED)):
            self.ended(outcome, [row for row in moved if row.after == state])

    def take(self) -> Rows:
        """All of it; from here on it is the caller's."""
        with self._lock:
            rows, self._rows = self._rows, {}
        return rows

    def give_back(self, rows: Rows) -> None:
        """CountedOutcome could not be written."""
        with self._lock:
            for key, counts in rows.items():
                mine = self._row(key)
                if mine is not None:
                    mine[:] = map(sum, zip(mine, counts, strict=True))

    def _add(self, at: int, queue: str, topic: str, place: int, number: int) -> None:
        row = self._row(Key(at, MINUTE, queue, topic))
        if row is not None:
            row[place] += number

    def _row(self, key: Key) -> list[int] | None:
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MOST:
                self._complain()
                return None
            row = self._rows[key] = [0] * len(COLUMNS)
        return row

    def _complain(self) -> None:
        if not self._dropped:
            self._dropped = True
            logger.warning("The database takes no statistics; some are dropped")


class RollupWriter(Service):
    """Adds the counts of this process to the rollups. An idle process issues no statement."""

    name = "rollup writer"

    def __init__(self, using: str, counts: Counts) -> None:
        self.using = using
        self.counts = counts

    def tick(self) -> float:
        rows = self.counts.take()
        try:
            write(self.using, rows)
        except BaseException:
            self.counts.give_back(rows)
            raise
        return INTERVAL


class Folder(Service):
    """Puts hours in the place of minutes that are old, and forgets old hours. Once a minute, a day's worth at most."""

    name = "rollup folder"
    interval = 60.0
    hours = 24

    def __init__(self, using: str) -> None:
        self.using = using

    def tick(self) -> float:
        return 0.5 if self.fold(self.hours) else self.interval

    def fold(self, hours: int) -> bool:
        """At most so many hours of minutes; whether there may be more."""
        now = transitions.now(self.using)
        rows = Rollup.objects.using(self.using)
        rows.filter(seconds=HOUR, at__lt=now - HOURS_FOR).delete()
        for _ in range(hours):
            oldest = rows.filter(seconds=MINUTE).order_by("at").values_list("at", flat=True).first()
            if oldest is None:
                return False
            begin = oldest.replace(minute=0, second=0, microsecond=0)
            if begin + timedelta(hours=1) > now - MINUTES_FOR:
                return False
            self._fold(begin)
        return True

    def _fold(self, begin: datetime) -> None:
        rows = Rollup.objects.using(self.using).filter(seconds=MINUTE, at__gte=begin, at__lt=begin + timedelta(hours=1))
        sums: Rows = {}
        with writing(self.using):
            if connections[self.using].features.has_select_for_update:
                rows = rows.select_for_update()
            for queue, topic, *counts in rows.order_by("at", "queue", "topic").values_list("queue", "topic", *COLUMNS):
                key = Key(int(begin.timestamp()), HOUR, queue, topic)
                sums[key] = [a + b for a, b in zip(sums.get(key, [0] * len(counts)), counts, strict=True)]
            _insert(self.using, sums)
            rows.delete()


def write(using: str, rows: Mapping[Key, list[int]]) -> None:
    """Add counts to the rollups: all of them, or none."""
    if rows:
        with writing(using):
            _insert(using, rows)


def _insert(using: str, rows: Mapping[Key, list[int]]) -> None:
    # In one order everywhere, so that two processes cannot wait for each other in a circle.
    ordered = sorted(rows.items())
    connection = connections[using]
    with connection.cursor() as cursor:
        for start in range(0, len(ordered), BATCH):
            batch = ordered[start : start + BATCH]
            values: list[Any] = []
            for key, counts in batch:
                at = connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(key.at, UTC))
                values += [key.seconds, at, key.queue, key.topic, *counts]
            cursor.execute(_upsert(len(batch)), values)


def _upsert(rows: int) -> str:
    """One that PostgreSQL and SQLite understand."""
    names = ("seconds", "at", "queue", "topic", *COLUMNS)
    row = f"({', '.join(['%s'] * len(names))})"
    added = ", ".join(f"{name} = delayq_rollup.{name} + excluded.{name}" for name in COLUMNS)
    return (
        f"INSERT INTO delayq_rollup ({', '.join(names)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
        f" ON CONFLICT (seconds, at, queue, topic) DO UPDATE SET {added}"
    )


def _minute(moment: float) -> int:
    return int(moment) // MINUTE * MINUTE
