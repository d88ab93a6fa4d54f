"""A restore by hand: preview, batches, stop and resume."""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from itertools import starmap

from django.db.models import Count, Min, Q, QuerySet

from .. import actors, conf, failpoints, signals, transitions
from ..broker.base import IDS_PER_CALL, Entry, Index, Put, ServerRun
from ..clock import SECOND, from_tenths, from_us, to_tenths, to_us
from ..exceptions import BrokerUnavailable
from ..models import Message
from ..sql.expressions import places
from ..states import State
from .horizon import begin, is_current, master, refuse_foreign
from .reading import page, queues
from .selection import Overdue, Position, Report, Selection, Stage, Tally

# How long others leave the loading of a queue to us after our last sign of life. Seconds.
LEASE = 10.0
# How often they are told how far it is. The answer comes after the batch that is being put. Seconds.
TELL = 0.5
# So many batches are read while one is being put: neither waits for the other.
AHEAD = 4
# Rows of one change to the record.
CHANGES = 500
_MICROSECOND = timedelta(microseconds=1)

Progress = Callable[[int], None]
# Where a batch ends: its last due time (None when reading by id) and id.
_Place = tuple[datetime | None, int]


def _read_ahead(
    batches: Iterator[tuple[list[Entry], _Place]], put: Callable[[list[Entry]], Put]
) -> Generator[tuple[list[Entry], _Place, Put]]:
    """Put each batch while the next ones are being read."""
    with ThreadPoolExecutor(1, thread_name_prefix="delayq-restore") as pool:
        waiting: deque[tuple[list[Entry], _Place, Future[Put]]] = deque()
        try:
            for entries, place in batches:
                while waiting and (len(waiting) == AHEAD or waiting[0][2].done()):
                    first = waiting.popleft()
                    yield first[0], first[1], first[2].result()
                waiting.append((entries, place, pool.submit(put, entries)))
            for entries, place, done in waiting:
                yield entries, place, done.result()
        finally:
            # Where Redis does not answer, each of them would take its time to find out.
            for _entries, _place, done in waiting:
                done.cancel()


class Restore:
    """Puts what is scheduled and due within the horizon back into Redis.

    Nothing is cleared. It may run twice, twice at once, and while producers and workers go on. Running messages are
    left to their workers, and what is due beyond the horizon to a worker's loader.

    ``overdue`` says what becomes of what should have started more than OVERDUE_AFTER ago; *dead* and *spread* change
    the record first. It reads in batches along the index, in constant memory.
    """

    def __init__(
        self,
        using: str,
        broker: Index,
        selection: Selection | None = None,
        *,
        overdue: Overdue = Overdue.RUN,
        spread: float = 0.0,
        no_expired: bool = False,
        dry_run: bool = False,
        batch_size: int = IDS_PER_CALL,
        resume: str | None = None,
    ) -> None:
        self.using = using
        self.broker = broker
        self.selection = selection or Selection()
        self.overdue = overdue
        self.spread = timedelta(seconds=spread)
        self.no_expired = no_expired
        self.dry_run = dry_run
        self.batch_size = batch_size
        self.report = Report()
        self._ids = sorted(set(self.selection.ids))
        self._stages = [Stage.PUT] if overdue in (Overdue.RUN, Overdue.SKIP) else list(Stage)
        self._from = None if resume is None else Position.parse(resume, self._print())
        self._began = transitions.now(using) if self._from is None else from_us(self._from.began_us)
        self._cutoff = self._began - timedelta(seconds=conf.get().OVERDUE_AFTER)
        self._done, self._total = (0, 0) if self._from is None else (self._from.done, self._from.total)
        # Whether a queue that is restored from its beginning to its end then counts as loaded.
        self._loads = self.selection.whole_queues and overdue != Overdue.SKIP
        self._horizons: dict[str, int] = {}

    # --- before ---------------------------------------------------------------------------------------------------

    def preview(self) -> Report:
        """Count what there is. Writes nothing. Raises ``ForeignBroker`` for a Redis of another database."""
        server = master(self.broker)
        for queue in self.selection.queues or queues(self.using):
            tally = self._count(queue, server)
            if tally.found or tally.running or queue in self.selection.queues:
                self.report.queues[queue] = tally
        if self._from is None:
            self._total = self.report.total().overdue
        return self.report

    def prepare(self) -> Report:
        """Instead of ``preview``, for a restore in many short runs: counts nothing but what it has to know."""
        server = master(self.broker)
        for queue in self.selection.queues or queues(self.using):
            self._look(queue, server)
            self.report.queues[queue] = Tally()
            if self._from is None and self.overdue == Overdue.SPREAD:
                self._total += sum(rows.filter(due_at__lte=self._cutoff).count() for rows in self._chunks(queue))
        self._loads = False
        return self.report

    def _look(self, queue: str, server: ServerRun) -> int:
        """Up to which due time (tenths of a ms) a queue is filled."""
        meta, ahead = self.broker.read_meta(queue), conf.get().HORIZON
        refuse_foreign(self.using, meta)
        horizon = meta.horizon_tenths or 0
        if not is_current(meta, server, meta.now_tenths, ahead):
            horizon = max(horizon, meta.now_tenths + int(ahead * SECOND))
        self._horizons[queue] = horizon
        return horizon

    def _count(self, queue: str, server: ServerRun) -> Tally:
        horizon = self._look(queue, server)
        tally = Tally(held=self.broker.size(queue).total)
        overdue = Q(due_at__lte=self._cutoff)
        for rows in self._chunks(queue):
            counts = rows.aggregate(
                found=Count("id"),
                overdue=Count("id", filter=overdue),
                oldest=Min("due_at", filter=overdue),
                beyond=Count("id", filter=Q(due_at__gt=from_tenths(horizon))),
                **({"expired": Count("id", filter=self._is_expired())} if self.dry_run and self.no_expired else {}),
            )
            tally.add(Tally(**counts))
            running = Message.objects.using(self.using).filter(self.selection.where(queue), state=State.RUNNING)
            if not self._ids:
                tally.running = running.count()
        return tally

    def _is_expired(self) -> Q:
        return Q(expires_at__isnull=False, expires_at__lte=self._began)

    def _chunks(self, queue: str) -> Iterator[QuerySet[Message]]:
        rows = self.selection.rows(self.using, queue)
        if not self._ids:
            yield rows
        for start in range(0, len(self._ids), IDS_PER_CALL):
            yield rows.filter(pk__in=self._ids[start : start + IDS_PER_CALL])

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, *, should_stop: Callable[[], bool] = lambda: False, progress: Progress = lambda done: None) -> Report:
        """Do it, after ``preview``. Stops between two batches when told to; ``report.position`` then says where.

        So it does when Redis or the database goes away, which raises.
        """
        began = time.monotonic()
        try:
            self._run(should_stop, progress)
        finally:
            self.report.seconds = time.monotonic() - began
            self._tell()
        return self.report

    def _run(self, should_stop: Callable[[], bool], progress: Progress) -> None:
        for first in self._work():
            self._note(*first)
            break
        if self.no_expired and not self.dry_run:
            for _batch in self._expire():
                progress(0)
                if should_stop():
                    return
        for stage, queue, after in self._work():
            self._note(stage, queue, after)
            if should_stop():
                return
            with closing(self._step(stage, queue, self.report.queues[queue], after)) as steps:
                for size, place in steps:
                    self._note(stage, queue, place)
                    progress(size)
                    if should_stop():
                        return
        self.report.position = None

    def _work(self) -> Iterator[tuple[Stage, str, _Place | None]]:
        """Each stage and queue that is still to do, and after which place."""
        names = sorted(self.report.queues)
        at = self._from
        for stage in self._stages:
            for queue in names:
                if at is None or (self._stages.index(stage), queue) > (self._stages.index(at.stage), at.queue):
                    yield stage, queue, None
                elif (stage, queue) == (at.stage, at.queue):
                    yield stage, queue, (at.due, at.id) if at.id else None

    def _step(self, stage: Stage, queue: str, tally: Tally, after: _Place | None) -> Generator[tuple[int, _Place]]:
        if stage == Stage.OVERDUE:
            return self._settle(queue, tally, after)
        return self._fill(queue, tally, after)

    def _note(self, stage: Stage, queue: str, place: _Place | None) -> None:
        due, pk = place or (None, 0)
        position = Position(stage, queue, due, pk, to_us(self._began), self._done, self._total)
        self.report.position = position.text(self._print())

    def _print(self) -> str:
        """What a position must have been made with: it means nothing elsewhere."""
        chosen = self.selection
        times = [None if due is None else to_us(due) for due in (chosen.due_after, chosen.due_before)]
        which = (chosen.queues, chosen.topics, chosen.ids, *times)
        what = repr((self.using, which, self.overdue.value, self.spread, self.no_expired, self.dry_run))
        return hashlib.sha256(what.encode()).hexdigest()[:12]

    def _read(
        self,
        queue: str,
        after: _Place | None,
        *,
        start: datetime | None = None,
        end: datetime,
        limit: int,
    ) -> Iterator[tuple[list[Entry], _Place]]:
        """Batches of what is selected and due from ``start`` to ``end``, each with its place."""
        chosen = self.selection
        if self._ids:
            first = 0 if after is None else bisect_right(self._ids, after[1])
            for place in range(first, len(self._ids), limit):
                batch = self._ids[place : place + limit]
                rows = chosen.rows(self.using, queue).filter(pk__in=batch, due_at__lte=end)
                if start is not None:
                    rows = rows.filter(due_at__gte=start)
                yield list(starmap(Entry, places(self.using, rows.order_by("pk")))), (None, batch[-1])
            return
        start = max((moment for moment in (start, chosen.due_after) if moment is not None), default=None)
        if chosen.due_before is not None:
            end = min(end, chosen.due_before - _MICROSECOND)
        mark = None if after is None or after[0] is None else (after[0], after[1])
        while True:
            entries = page(
                self.using, queue, after=mark, start=start, end=end, limit=limit, topics=chosen.topics or None
            )
            if not entries:
                return
            mark = (entries[-1].due_at, entries[-1].id)
            yield entries, mark
            if len(entries) < limit:
                return

    # --- filling --------------------------------------------------------------------------------------------------

    def _fill(self, queue: str, tally: Tally, after: _Place | None) -> Generator[tuple[int, _Place]]:
        whole = self._loads and after is None
        worker = f"restore:{actors.host()}/{os.getpid()}/{id(self):x}"
        horizon, loading = self._horizons[queue], False
        if not self.dry_run:
            # Unless all of the queue is restored, its loading is still a worker's: leave it to the next at once.
            horizon, loading = begin(self.using, self.broker, queue, lease=LEASE if whole else 0.001, worker=worker)
            loading = loading and whole
        start = None
        if self.overdue == Overdue.SKIP:
            tally.skipped = tally.overdue
        if self.overdue == Overdue.SKIP or (self.dry_run and self.overdue != Overdue.RUN):
            start = self._cutoff + _MICROSECOND
        if self.dry_run and self.overdue == Overdue.SPREAD and self.spread:
            within = (from_tenths(horizon) - self._began) / self.spread
            tally.put += round(tally.overdue * min(1.0, within))
        batches = self._read(queue, after, start=start, end=from_tenths(horizon), limit=self.batch_size)
        if self.dry_run:
            done = self._dry(queue, batches)
        else:
            done = _read_ahead(batches, lambda entries: self._put(queue, entries))
        told = time.monotonic()
        with closing(done):
            for entries, place, put in done:
                tally.put += put.put
                tally.present += put.present
                failpoints.reach("mid_restore")
                if loading and time.monotonic() - told >= TELL:
                    # We are not the loader any more when we took too long; then another is, and begins by itself.
                    upto = to_tenths(entries[-1].due_at)
                    loading = self.broker.loaded(queue, worker=worker, upto_tenths=upto, lease=LEASE)
                    told = time.monotonic()
                yield len(entries), place
        if loading:
            self.broker.loaded(queue, worker=worker, upto_tenths=horizon, lease=None)

    def _dry(
        self, queue: str, batches: Iterator[tuple[list[Entry], _Place]]
    ) -> Generator[tuple[list[Entry], _Place, Put]]:
        for entries, place in batches:
            yield entries, place, self._would_put(queue, entries)

    def _put(self, queue: str, entries: list[Entry]) -> Put:
        put = self.broker.put(queue, entries, fill=True)
        if put.beyond and self.broker.read_meta(queue).horizon_tenths is None:
            raise BrokerUnavailable("Redis was lost while it was being restored")
        return put

    def _would_put(self, queue: str, entries: list[Entry]) -> Put:
        ids = [entry.id for entry in entries]
        if self.no_expired:
            expired = Message.objects.using(self.using).filter(self._is_expired(), pk__in=ids)
            gone = set(expired.values_list("pk", flat=True))
            ids = [pk for pk in ids if pk not in gone]
        there = sum(place != (None, None) for place in self.broker.places(queue, ids))
        return Put(len(ids) - there, there)

    # --- the overdue ----------------------------------------------------------------------------------------------

    def _settle(self, queue: str, tally: Tally, after: _Place | None) -> Generator[tuple[int, _Place]]:
        """Give up or spread what is overdue."""
        if self.dry_run:
            if self.overdue == Overdue.DEAD:
                tally.dead = tally.overdue
            else:
                tally.spread = tally.overdue
            return
        change = self._give_up if self.overdue == Overdue.DEAD else self._spread
        for entries, place in self._read(queue, after, end=self._cutoff, limit=min(self.batch_size, CHANGES)):
            ids = [entry.id for entry in entries]
            if ids:
                answers = change(tally, ids)
                # Wherever they are in Redis, it is the wrong place now; the filling that follows puts the spread ones.
                self.broker.remove(queue, [answer.id for answer in answers if answer and answer.id is not None])
            self._done += len(ids)
            yield len(ids), place

    def _give_up(self, tally: Tally, ids: list[int]) -> list[transitions.Answer]:
        reason = "given up by a restore: overdue"
        answers = transitions.give_up(
            self.using, ids, reason=reason, actor=actors.current(), overdue_since=self._cutoff
        )
        for moved in (answer.moved for answer in answers if answer.moved is not None):
            tally.dead += 1
            signals.emit_end(Message, moved, self.using)
        return answers

    def _spread(self, tally: Tally, ids: list[int]) -> list[transitions.Answer]:
        total = max(1, self._total)
        answers = transitions.reschedule(
            self.using,
            ids,
            due=self._began + self.spread * min(1.0, self._done / total),
            spread=self.spread * len(ids) / total,
            overdue_since=self._cutoff,
            reason="spread by a restore: overdue",
        )
        tally.spread += sum(map(bool, answers))
        return answers

    def _expire(self) -> Iterator[None]:
        for queue, tally in self.report.queues.items():
            for among in self._chunks_of_ids():
                while True:
                    moved = transitions.expire(
                        self.using, actor=actors.current(), among=self.selection.where(queue) & among
                    )
                    for one in moved:
                        signals.emit_end(Message, one, self.using)
                    self.broker.remove(queue, [one.id for one in moved])
                    tally.expired += len(moved)
                    if not moved:
                        break
                    yield

    def _chunks_of_ids(self) -> Iterator[Q]:
        if not self._ids:
            yield Q()
        for start in range(0, len(self._ids), IDS_PER_CALL):
            yield Q(pk__in=self._ids[start : start + IDS_PER_CALL])

    # --- after ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        if self.dry_run:
            return
        for queue, tally in self.report.queues.items():
            if tally.put or tally.present:
                signals.emit(
                    signals.messages_restored,
                    Message,
                    queue=queue,
                    found=tally.found or tally.put + tally.present,
                    put=tally.put,
                    actor=actors.current(),
                    using=self.using,
                )
