"""The consistency check: it compares the record with Redis, and repairs the mismatches if asked to."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from django.db.models import Count, Min, OuterRef
from django.db.models.functions import Coalesce

from ..broker import RedisBroker
from ..broker.base import IDS_PER_CALL, Entry, Location
from ..core import actors
from ..core.callables import nothing
from ..core.chunks import chunks
from ..core.clock import SECOND, from_tenths, to_tenths
from ..core.states import LIVE, State
from ..core.values import CENTURY
from ..models import Message
from ..models.fields import UTCDateTimeField
from ..models.messages import IS_CONSISTENT, Lease, lease_is_over
from ..project import conf
from ..record import reads
from ..record.sql import statements
from ..record.sql.rows import Facts, Span
from ..restore import reading
from ..restore.filling import fill
from ..restore.horizon import ensure_horizon, refuse_foreign
from .numbers import AGES, CAPS


class Mismatch(StrEnum):
    """The ways in which the record and Redis can differ."""

    # Scheduled and due within the horizon, but not in Redis: the message would be late.
    MISSING = "missing"
    # In Redis, but finished, deleted or in another queue: this costs a look-up in the record.
    EXTRA = "extra"
    # In Redis with another due time than in the record.
    DIFFERENT = "different"


@dataclass(slots=True)
class Mismatches:
    """The mismatches of one queue: how many there are, how many were repaired, and some ids of each kind."""

    compared: int = 0
    counts: dict[Mismatch, int] = field(default_factory=lambda: dict.fromkeys(Mismatch, 0))
    fixed: int = 0
    examples: dict[Mismatch, list[int]] = field(default_factory=lambda: {mismatch: [] for mismatch in Mismatch})

    @property
    def total(self) -> int:
        """The number of all mismatches."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Stuck:
    """The number of running messages whose lease ran out long ago, and when the first lease ran out."""

    count: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Inconsistent:
    """The rows of the record that contradict themselves: their number, and some ids."""

    count: int
    examples: list[int]


def inconsistent(using: str) -> Inconsistent:
    """Find rows of messages whose columns contradict each other (``IS_CONSISTENT``). Reads all rows."""
    rows = Message.objects.using(using).filter(~IS_CONSISTENT)
    found = list(rows.order_by("pk").values_list("pk", flat=True)[: CAPS.named + 1])
    count = rows.count() if len(found) > CAPS.named else len(found)
    return Inconsistent(count, found[: CAPS.named])


def classify(
    row: Facts | Message | None, location: Location, queue: str, *, now_tenths: int, horizon_tenths: int
) -> Mismatch | None:
    """Compare the row of an id with its location in one queue. Return the mismatch; None if they agree."""
    nowhere = location.is_nowhere
    if row is None or row.queue != queue or row.state not in LIVE:
        return None if nowhere else Mismatch.EXTRA
    if row.state == State.RUNNING:
        return None
    due_tenths = to_tenths(row.due_at)
    if nowhere:
        return Mismatch.MISSING if due_tenths <= horizon_tenths else None
    if due_tenths <= now_tenths:
        late = (
            location.ready_tenths is None
            and location.delayed_tenths is not None
            and location.delayed_tenths > now_tenths + AGES.delayed * SECOND
        )
        return Mismatch.DIFFERENT if late else None
    return None if location.delayed_tenths == due_tenths else Mismatch.DIFFERENT


class ConsistencyCheck:
    """Compares the record with one queue in Redis, in constant memory.

    Ids that seem to differ are compared again after ``pause`` seconds (default: the grace), because a message may have
    been on its way. With ``fix``, ids that are missing or different are put, and ids that are extra are removed.
    """

    def __init__(
        self, using: str, broker: RedisBroker, queue: str, *, fix: bool = False, pause: float | None = None
    ) -> None:
        self.using = using
        self.broker = broker
        self.queue = queue
        self.fix = fix
        self.pause = conf.get().GRACE if pause is None else pause
        self.found = Mismatches()
        self._horizon_tenths = 0

    def run(self, progress: Callable[[int], None] = nothing) -> Mismatches:
        """Compare, and repair with ``fix``. Raises ``ForeignBroker`` or ``BrokerUnavailable``."""
        self._read_horizon()
        suspects = array("q")
        for found, compared in self._suspects():
            suspects.extend(found)
            self.found.compared += compared
            progress(compared)
            if len(suspects) >= CAPS.suspects:
                self._confirm(suspects)
                suspects = array("q")
        self._confirm(suspects)
        return self.found

    def _read_horizon(self) -> None:
        meta = self.broker.read_meta()
        refuse_foreign(self.using, meta)
        if self.fix:
            worker = f"verify:{actors.host()}/{os.getpid()}"
            self._horizon_tenths, _is_loader = ensure_horizon(self.using, self.broker, worker=worker)
        elif meta.horizon_tenths is None:
            # Redis was lost, and no worker has loaded it since: all that is due within the horizon is missing.
            self._horizon_tenths = meta.now_tenths + int(conf.get().HORIZON * SECOND)
        else:
            self._horizon_tenths = meta.horizon_tenths

    def _suspects(self) -> Iterator[tuple[list[int], int]]:
        """Yield ids that seem to differ, in batches, each with how many ids were compared."""
        for batch in reading.merged(self.using, [self.queue], Span(from_tenths(self._horizon_tenths))):
            yield self._misplaced(batch.by_queue[self.queue]), batch.size
        for ids in self.broker.ids(self.queue):
            live = Message.objects.using(self.using).filter(pk__in=ids, queue=self.queue, state__in=sorted(LIVE))
            known = set(live.values_list("pk", flat=True))
            yield [pk for pk in ids if pk not in known], len(ids)

    def _misplaced(self, page: list[Entry]) -> list[int]:
        rows = {
            entry.id: Facts(entry.id, State.SCHEDULED, "", self.queue, None, entry.due_at, entry.priority)
            for entry in page
        }
        return [pk for pk, mismatch, _row in self._compare([*rows], rows) if mismatch is not None]

    def _compare(
        self, ids: Sequence[int], rows: Mapping[int, Facts] | None = None
    ) -> Iterator[tuple[int, Mismatch | None, Facts | None]]:
        """Yield each id with its mismatch and its row. Without ``rows`` the record is read."""
        # Redis is read first: a message that is scheduled in between is in the record and only seems to be missing.
        now_tenths, locations = self.broker.now_tenths(), self.broker.locations(self.queue, ids)
        rows = statements(self.using).facts(ids) if rows is None else rows
        terms = {"now_tenths": now_tenths, "horizon_tenths": self._horizon_tenths}
        for pk, location in zip(ids, locations, strict=True):
            yield pk, classify(rows.get(pk), location, self.queue, **terms), rows.get(pk)

    def _confirm(self, suspects: Sequence[int]) -> None:
        if not suspects:
            return
        time.sleep(self.pause)
        # An id may be found twice: in the record and in Redis.
        for ids in chunks(sorted(set(suspects)), IDS_PER_CALL):
            self._count_and_fix(self._compare(ids))

    def _count_and_fix(self, compared: Iterable[tuple[int, Mismatch | None, Facts | None]]) -> None:
        extra: list[int] = []
        missing: list[Entry] = []
        different: list[Entry] = []
        for pk, mismatch, row in compared:
            if mismatch is None:
                continue
            self.found.counts[mismatch] += 1
            if len(self.found.examples[mismatch]) < CAPS.named:
                self.found.examples[mismatch].append(pk)
            if row is None or mismatch == Mismatch.EXTRA:
                extra.append(pk)
            else:
                (missing if mismatch == Mismatch.MISSING else different).append(Entry.at(pk, row.due_at, row.priority))
        if not self.fix:
            return
        self.broker.remove(self.queue, extra)
        for _batch, _answers in fill(self.broker, [reading.Batch({self.queue: missing})]):
            pass
        # A put without "fill" can also move an id to a later time. If the row moves at this moment, the code that moves
        # it puts the id as well.
        self.broker.put(self.queue, different)
        self.found.fixed += len(extra) + len(missing) + len(different)


def queues(using: str, broker: RedisBroker) -> list[str]:
    """Return the queues to compare: those of the record and of the project, and those of which only Redis has ids."""
    due = broker.due_queues(None, within=CENTURY).queues
    return sorted({*reading.queues(using), *(queue.name for queue in due), *broker.blocked()})


def is_known(using: str, broker: RedisBroker, queue: str) -> bool:
    """Tell whether anything knows this queue: a setting, a handler, a live message, or an id in Redis."""
    running = Message.objects.using(using).filter(queue=queue, state=State.RUNNING)
    if queue in reading.queues(using) or running.exists():
        return True
    return bool(broker.sizes([queue])[queue].total)


def stuck(using: str, queues: Sequence[str] = ()) -> Stuck:
    """Find running messages whose lease ran out long ago: no reaper of a worker is at work then."""
    before = reads.now(using) - timedelta(seconds=AGES.unreaped)
    rows = Message.objects.using(using).filter(lease_is_over(before))
    if queues:
        rows = rows.filter(queue__in=queues)
    renewed = Lease.objects.filter(message_id=OuterRef("pk"), delivery=OuterRef("deliveries")).values("until")
    ends = Coalesce(renewed, "leased_until", output_field=UTCDateTimeField())
    return Stuck(**rows.aggregate(count=Count("pk"), oldest=Min(ends)))
