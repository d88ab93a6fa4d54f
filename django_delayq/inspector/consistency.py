"""Compares the record with Redis, and mends what differs."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from .. import actors, conf, restore, transitions
from ..broker.base import IDS_PER_CALL, Entry, Index, Place
from ..clock import SECOND, to_tenths
from ..models import Message
from ..states import LIVE, State

# Suspects remembered until they are looked at again: 8 bytes each.
SUSPECTS = 100_000
# A worker puts an id whose topic it does not know, or that is locked, aside for this long at most. Seconds.
PARKED = 60.0
# A lease that ran out is ended by any worker's reaper within seconds; after this time none did. Seconds.
STUCK_AFTER = 30.0
# Ids shown of each kind.
EXAMPLES = 5


class Kind(StrEnum):
    """How the record and Redis can differ."""

    # Scheduled and due within the horizon, but not in Redis: it would be late.
    MISSING = "missing"
    # In Redis, but its row is finished, gone, or in another queue: costs a look-up.
    EXTRA = "extra"
    # In Redis with another due time than in the record.
    DIFFERENT = "different"


class Row(NamedTuple):
    """What the record says of an id."""

    queue: str
    state: str
    due_at: datetime
    priority: int


@dataclass(slots=True)
class Discrepancies:
    """What differs in one queue, how much of it was mended, and some ids of each kind."""

    compared: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    fixed: int = 0
    examples: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in Kind})

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Stuck:
    """Running messages whose lease ran out long ago."""

    count: int
    oldest: datetime | None


def classify(row: Row | None, place: Place, queue: str, *, now_tenths: int, horizon_tenths: int) -> Kind | None:
    """How an id differs, seen from one queue; None: it does not."""
    nowhere = place == (None, None)
    if row is None or row.queue != queue or row.state not in (State.SCHEDULED, State.RUNNING):
        return None if nowhere else Kind.EXTRA
    if row.state == State.RUNNING:
        return None
    due_tenths = to_tenths(row.due_at)
    if nowhere:
        return Kind.MISSING if due_tenths <= horizon_tenths else None
    if due_tenths <= now_tenths:
        late = (
            place.ready_tenths is None
            and place.delayed_tenths is not None
            and place.delayed_tenths > now_tenths + PARKED * SECOND
        )
        return Kind.DIFFERENT if late else None
    return None if place.delayed_tenths == due_tenths else Kind.DIFFERENT


class Comparison:
    """The record against one queue in Redis, in constant memory.

    What seems to differ is looked at again after ``pause`` seconds (default: the grace): a message may have been on
    its way. ``fix`` puts what is missing or different and removes what is extra.
    """

    def __init__(self, using: str, broker: Index, queue: str, *, fix: bool = False, pause: float | None = None) -> None:
        self.using = using
        self.broker = broker
        self.queue = queue
        self.fix = fix
        self.pause = conf.get().GRACE if pause is None else pause
        self.drift = Discrepancies()
        self._horizon_tenths = 0

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Discrepancies:
        """Compare; with ``fix``, mend. Raises ``ForeignBroker``, ``BrokerUnavailable``."""
        self._look()
        suspects = array("q")
        for found, compared in self._suspects():
            suspects.extend(found)
            self.drift.compared += compared
            progress(compared)
            if len(suspects) >= SUSPECTS:
                self._confirm(suspects)
                suspects = array("q")
        self._confirm(suspects)
        return self.drift

    def _look(self) -> None:
        meta = self.broker.read_meta(self.queue)
        restore.refuse_foreign(self.using, meta)
        if self.fix:
            worker = f"verify:{actors.host()}/{os.getpid()}"
            self._horizon_tenths, _loading = restore.ensure_horizon(
                self.using, self.broker, self.queue, lease=0.001, worker=worker
            )
        elif meta.horizon_tenths is None:
            # Redis was lost, and no worker has loaded it since: what ought to be there is missing.
            self._horizon_tenths = meta.now_tenths + int(conf.get().HORIZON * SECOND)
        else:
            self._horizon_tenths = meta.horizon_tenths

    def _suspects(self) -> Iterator[tuple[list[int], int]]:
        """Ids that seem to differ, in batches, each with how many were compared."""
        for page in restore.pages(self.using, self.queue, start_tenths=None, end_tenths=self._horizon_tenths):
            yield self._misplaced(page), len(page)
        for ids in self.broker.ids(self.queue):
            live = Message.objects.using(self.using).filter(pk__in=ids, queue=self.queue, state__in=sorted(LIVE))
            known = set(live.values_list("pk", flat=True))
            yield [pk for pk in ids if pk not in known], len(ids)

    def _misplaced(self, page: list[Entry]) -> list[int]:
        now_tenths, places = self.broker.now_tenths(), self.broker.places(self.queue, [entry.id for entry in page])
        found = []
        for entry, place in zip(page, places, strict=True):
            row = Row(self.queue, State.SCHEDULED, entry.due_at, entry.priority)
            if classify(row, place, self.queue, now_tenths=now_tenths, horizon_tenths=self._horizon_tenths) is not None:
                found.append(entry.id)
        return found

    def _differing(self, ids: Sequence[int]) -> list[tuple[int, Kind | None, Row | None]]:
        # Redis first: what is scheduled in between is then in the record and merely seems to be missing.
        now_tenths, places = self.broker.now_tenths(), self.broker.places(self.queue, ids)
        rows = self._rows(ids)
        found = []
        for pk, place in zip(ids, places, strict=True):
            kind = classify(rows.get(pk), place, self.queue, now_tenths=now_tenths, horizon_tenths=self._horizon_tenths)
            found.append((pk, kind, rows.get(pk)))
        return found

    def _rows(self, ids: Sequence[int]) -> dict[int, Row]:
        rows = Message.objects.using(self.using).filter(pk__in=ids)
        values = rows.values_list("pk", "queue", "state", "due_at", "priority")
        return {pk: Row(queue, state, due_at, priority) for pk, queue, state, due_at, priority in values}

    def _confirm(self, suspects: Sequence[int]) -> None:
        if not suspects:
            return
        time.sleep(self.pause)
        # An id may have been met on both ways.
        ids = sorted(set(suspects))
        for start in range(0, len(ids), IDS_PER_CALL):
            self._settle(self._differing(ids[start : start + IDS_PER_CALL]))

    def _settle(self, differing: list[tuple[int, Kind | None, Row | None]]) -> None:
        extra: list[int] = []
        missing: list[Entry] = []
        different: list[Entry] = []
        for pk, kind, row in differing:
            if kind is None:
                continue
            self.drift.counts[kind] += 1
            if len(self.drift.examples[kind]) < EXAMPLES:
                self.drift.examples[kind].append(pk)
            if row is None or kind == Kind.EXTRA:
                extra.append(pk)
            else:
                (missing if kind == Kind.MISSING else different).append(Entry.at(pk, row.due_at, row.priority))
        if not self.fix:
            return
        self.broker.remove(self.queue, extra)
        self.broker.put(self.queue, missing, fill=True)
        # Not "fill": what Redis has too early has to become later. Should the row move just now, its mover puts it.
        self.broker.put(self.queue, different)
        self.drift.fixed += len(extra) + len(missing) + len(different)


def stuck(using: str, queues: Sequence[str] = ()) -> Stuck:
    """Running messages whose lease ran out long ago: no worker's reaper is at work."""
    before = transitions.now(using) - timedelta(seconds=STUCK_AFTER)
    rows = Message.objects.using(using).filter(state=State.RUNNING, leased_until__lt=before)
    if queues:
        rows = rows.filter(queue__in=queues)
    return Stuck(rows.count(), rows.order_by("leased_until").values_list("leased_until", flat=True).first())
