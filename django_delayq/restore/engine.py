"""A restore by hand: it counts first, works in batches, and can be stopped between two of them."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import starmap
from typing import NamedTuple
from uuid import uuid4

from django.db.models import Count, Min, Q, QuerySet

from .. import signals
from ..api import pausing
from ..api.actions import CANCEL, RESCHEDULE, Move, publish_follow_ups
from ..broker import RedisBroker
from ..broker.base import IDS_PER_CALL, Entry, Put
from ..core import actors, bounds, failpoints
from ..core.callables import never, nothing
from ..core.chunks import chunks
from ..core.clock import MICROSECOND, SECOND, ceil_tenth, from_tenths, from_us, to_tenths, to_us
from ..core.exceptions import BrokerUnavailable, UnusableBroker
from ..core.states import State
from ..models import Message
from ..project import conf, pulled
from ..record import reads, transitions
from ..record.sql import statements
from ..record.sql.rows import BEGINNING, Moved, Span
from ..record.transitions import MOVES_PER_TRANSACTION, DueTimes
from .filling import LOADER_LEASE, Load, fill
from .horizon import NO_LEASE, ensure_horizon, is_current, refuse_foreign, writable_server
from .reading import Batch, BatchEnd, merged, queues
from .selection import IS_SCHEDULED, Overdue, Position, Report, Selection, Stage, Tally

# Batches that are read while one is being put.
BATCHES_AHEAD = 4
# The lease of a hold: after it the queues of a killed restore are no longer paused. Seconds.
HOLD_LEASE = 30.0

Progress = Callable[[int], None]

# A stage on one queue, after the end of its last finished batch (None: from the beginning). Yields how many messages of
# each batch are done, and the end of the batch.
Step = Callable[[str, Tally, BatchEnd | None], Generator[tuple[int, BatchEnd | None]]]


@contextmanager
def without_redis() -> Iterator[None]:
    """Go on while Redis is away, which a change of the record does not need. A Redis not to be used still raises."""
    try:
        yield
    except UnusableBroker:
        raise
    except BrokerUnavailable:
        pass


class Change(NamedTuple):
    """A change of overdue messages: the move of an action, its reason in the log, and the count of ``Tally``."""

    move: Move
    reason: str
    counted: str


CHANGES = {
    Overdue.CANCEL: Change(CANCEL.move, "cancelled by a restore: overdue", "cancelled"),
    Overdue.DEAD: Change(transitions.give_up, "given up by a restore: overdue", "dead"),
    Overdue.SPREAD: Change(RESCHEDULE.move, "spread by a restore: overdue", "spread"),
}


@dataclass(slots=True)
class Spreading:
    """The overdue messages that are changed batch by batch, and the time over which a spread distributes them."""

    span: timedelta
    # When the time of the spread begins.
    base: datetime
    # The number of messages that were changed, and of all of them.
    done: int = 0
    number: int = 0

    def go_on(self, now: datetime) -> bool:
        """Begin the time later if the next message would be due in the past. Return whether it would."""
        base = max(self.base, now - self.span * min(1.0, self.done / max(1, self.number)))
        is_late, self.base = base > self.base, base
        return is_late

    def times(self, ids: Sequence[int]) -> DueTimes:
        """Return the due times of the next batch, in the order of ``ids``.

        Messages that became overdue after the count are spread, too; the time over which they are spread gets no
        longer.
        """
        ranks = {pk: rank for rank, pk in enumerate(ids, self.done)}
        self.done += len(ids)
        return DueTimes(self.base, spread=self.span, rank=ranks.__getitem__, number=self.number)


class Restore:
    """A restore puts the scheduled messages that are due within the horizon back into Redis.

    It holds queues, acts on their messages, lets the queues go, and fills Redis. It clears nothing. It may run twice,
    twice at once, and while producers and workers go on. It leaves running messages to their workers, and messages due
    beyond the horizon to the loader of a worker.

    ``overdue`` says what happens to messages that should have started more than OVERDUE_AFTER ago. All choices but
    *run* change the record first. Meanwhile the restore pauses the queues of these messages, in the name of ``holder``:
    a worker that starts, or a loader beside the restore, would have the messages run at once. A restore reads batches
    along the index, in constant memory. ``resume`` is the position in the report of a restore with the same options:
    the restore goes on from there.
    """

    def __init__(
        self,
        using: str,
        broker: RedisBroker,
        selection: Selection | None = None,
        *,
        overdue: Overdue = Overdue.RUN,
        spread: float = 0.0,
        no_expired: bool = False,
        dry_run: bool = False,
        batch_size: int = IDS_PER_CALL,
        resume: str | None = None,
        holder: str = "",
        renew_after: float = HOLD_LEASE / 4,
    ) -> None:
        """``renew_after``: a hold that is older than this (seconds) is renewed between two batches."""
        self.using = using
        self.broker = broker
        self.selection = selection or Selection()
        self.overdue = overdue
        self.spread = timedelta(seconds=spread)
        self.no_expired = no_expired
        self.dry_run = dry_run
        self.batch_size = batch_size
        # A name of its own: another restore by the same user may run at the same time.
        self.holder = holder or f"restore {uuid4().hex[:8]} by {actors.current()}"[: bounds.LENGTHS.actor]
        self.report = Report()
        self._ids = sorted(set(self.selection.ids))
        # By the stages of this restore, in their order: its steps on one queue.
        self._steps: dict[Stage, Step] = {}
        if no_expired and not dry_run:
            self._steps[Stage.EXPIRE] = self._expire
        if overdue != Overdue.RUN:
            self._steps[Stage.OVERDUE] = self._change_overdue
        self._steps[Stage.PUT] = self._fill
        self._renew_after = renew_after
        self._from = None if resume is None else Position(*json.loads(resume))
        now = reads.now(using)
        self._began = now if self._from is None else from_us(self._from.began_us)
        self._cutoff = self._began - bounds.OVERDUE_AFTER
        self._spreading = Spreading(self.spread, now)
        if self._from is not None:
            self._spreading = Spreading(self.spread, from_us(self._from.base_us), self._from.done, self._from.total)
        # If the restore stood still, its next message is due now, not in the past.
        has_moved = self._spreading.go_on(now)
        is_amid = self._from is not None and self._from.stage != Stage.PUT and overdue == Overdue.SPREAD
        self.stood_still = is_amid and has_moved
        self._spread_until = now + self.spread
        # True for a restore of all messages from the beginning: when it is complete, Redis counts as loaded.
        self._counts_as_load = self.selection.is_everything and self._from is None
        self._horizon = 0
        self._load: Load | None = None
        # When the hold began or was renewed, by time.monotonic(); None: nothing is held.
        self._held_at: float | None = None

    # --- count ----------------------------------------------------------------------------------------------------

    def preview(self) -> Report:
        """Count the messages to restore. Write nothing. Raise ``ForeignBroker`` for the Redis of another database."""
        self._read_horizon()
        for queue in self.selection.queues or queues(self.using):
            tally = self._count(queue)
            if tally.found or tally.running or queue in self.selection.queues:
                self.report.queues[queue] = tally
        if self._from is None:
            self._spreading.number = self.report.total().overdue
        return self.report

    def prepare(self) -> Report:
        """Prepare one of many short runs: like ``preview``, but count only what the run needs, also without Redis."""
        self._horizon = to_tenths(reads.now(self.using)) + int(conf.get().HORIZON * SECOND)
        with without_redis():
            self._read_horizon()
        for queue in self.selection.queues or queues(self.using):
            self.report.queues[queue] = Tally()
            if self._from is None and self.overdue == Overdue.SPREAD:
                self._spreading.number += sum(rows.filter(self._is_overdue()).count() for rows in self._chunks(queue))
        self._counts_as_load = False
        return self.report

    def _read_horizon(self) -> None:
        """Read up to which due time (tenths of a ms) Redis is to be filled."""
        server = writable_server(self.broker)
        meta, ahead = self.broker.read_meta(), conf.get().HORIZON
        refuse_foreign(self.using, meta)
        self._horizon = meta.horizon_tenths or 0
        if not is_current(meta, server, meta.now_tenths, ahead):
            self._horizon = max(self._horizon, meta.now_tenths + int(ahead * SECOND))

    def _count(self, queue: str) -> Tally:
        """Count the messages of a queue that are selected, and the ids that Redis has of it."""
        tally = Tally(held=self.broker.sizes([queue])[queue].total)
        overdue = self._is_overdue()
        for rows in self._chunks(queue):
            counts = rows.aggregate(
                found=Count("id"),
                overdue=Count("id", filter=overdue),
                oldest=Min("due_at", filter=overdue),
                beyond=Count("id", filter=Q(due_at__gt=from_tenths(self._horizon))),
                **({"expired": Count("id", filter=self._is_expired())} if self.dry_run and self.no_expired else {}),
            )
            tally.add(Tally(**counts))
            running = Message.objects.using(self.using).filter(self.selection.where(queue), state=State.RUNNING)
            if not self._ids:
                tally.running = running.count()
        return tally

    def _is_overdue(self) -> Q:
        """Return the condition of the overdue messages, without those that this restore expires first."""
        overdue = Q(due_at__lte=self._cutoff)
        return overdue & ~self._is_expired() if self.no_expired else overdue

    def _is_expired(self) -> Q:
        return Q(expires_at__isnull=False, expires_at__lte=self._began)

    def _chunks(self, queue: str) -> Iterator[QuerySet[Message]]:
        rows = self.selection.rows(self.using, queue)
        return map(rows.filter, self._chunks_of_ids())

    # --- the hold -------------------------------------------------------------------------------------------------

    def hold(self, *, until_release: bool = False) -> None:
        """Pause the queues with overdue messages that are to be changed first, for ``HOLD_LEASE``.

        With ``until_release`` the run begins later: the pause lasts until then, and covers every selected queue with
        scheduled messages, since these may be overdue when the run begins.
        """
        is_past = self._from is not None and self._from.stage == Stage.PUT
        if self.dry_run or is_past or Stage.OVERDUE not in self._steps:
            return
        overdue, seconds = (Q(), None) if until_release else (Q(due_at__lte=self._cutoff), HOLD_LEASE)
        names = [
            queue
            for queue in self.selection.queues or queues(self.using)
            if any(rows.filter(overdue).exists() for rows in self._chunks(queue))
        ]
        reason = "a restore gives the overdue messages new due times, or ends them"
        pausing.hold(self.using, names, holder=self.holder, seconds=seconds, reason=reason)
        self._held_at = time.monotonic()

    def release(self) -> None:
        """End the pauses that this restore made."""
        if self.dry_run:
            return
        pausing.release(self.using, self.holder)
        self._held_at = None

    def _renew_hold(self) -> None:
        if self._held_at is not None and time.monotonic() - self._held_at > self._renew_after:
            self.hold()

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, *, should_stop: Callable[[], bool] = never, progress: Progress = nothing) -> Report:
        """Restore the messages that ``preview`` or ``prepare`` found. Stop between two batches when ``should_stop()``
        is true.

        ``report.position`` then says where it stopped, also when this raises because Redis or the database is away.
        """
        began = time.monotonic()
        try:
            self._run(should_stop, progress)
        finally:
            if self._load is not None:
                self._load.abandon()
            self.report.seconds = time.monotonic() - began
            self._send_signals()
        return self.report

    def _run(self, should_stop: Callable[[], bool], progress: Progress) -> None:
        """Hold the queues, do the remaining stages batch by batch, and let the queues go before the ids are put."""
        self.hold()
        is_held = Stage.OVERDUE in self._steps
        for stage, queue, after in self._remaining():
            self._note_position(stage, queue, after)
            if is_held and stage == Stage.PUT:
                is_held = False
                self.release()
            if should_stop():
                return
            with closing(self._steps[stage](queue, self.report.queues[queue], after)) as steps:
                for size, end in steps:
                    self._note_position(stage, queue, end)
                    progress(size)
                    if should_stop():
                        return
        self.report.position = None
        # Not if a queue got its first message after the preview: this restore has not read that queue.
        if self._load is not None and self.report.queues.keys() >= set(pulled.without(statements(self.using).queues())):
            self._load.finish()

    def _remaining(self) -> Iterator[tuple[Stage, str, BatchEnd | None]]:
        """Yield each remaining stage and queue, and the end of its last finished batch (None: there is none)."""
        names, order, at = sorted(self.report.queues), list(Stage), self._from
        for stage in self._steps:
            for queue in names:
                if at is None or (order.index(stage), queue) > (order.index(at.stage), at.queue):
                    yield stage, queue, None
                elif (stage, queue) == (at.stage, at.queue):
                    yield stage, queue, (None if at.due_us is None else from_us(at.due_us), at.id) if at.id else None

    def _note_position(self, stage: Stage, queue: str, end: BatchEnd | None) -> None:
        due, pk = end or (None, 0)
        due_us = None if due is None else to_us(due)
        changes = self._spreading
        rest = (to_us(self._began), changes.done, changes.number, to_us(changes.base))
        self.report.position = json.dumps(Position(stage, queue, due_us, pk, *rest))

    def _read(
        self,
        chosen: Selection,
        queue: str,
        after: BatchEnd | None,
        *,
        start: datetime | None = None,
        end: datetime,
        limit: int,
    ) -> Iterator[Batch]:
        """Yield batches of the chosen messages that are due from ``start`` to ``end``."""
        if self._ids:
            first = 0 if after is None else bisect_right(self._ids, after[1])
            for batch in chunks(self._ids[first:], limit):
                rows = chosen.rows(self.using, queue).filter(pk__in=batch, due_at__lte=end)
                if start is not None:
                    rows = rows.filter(due_at__gte=start)
                entries = list(starmap(Entry, statements(self.using).places(rows.order_by("pk"))))
                yield Batch({queue: entries}, (None, batch[-1]))
            return
        if chosen.due_before is not None:
            end = min(end, chosen.due_before - MICROSECOND)
        marks = [(moment, 0) for moment in (start, chosen.due_after) if moment is not None]
        if after is not None and after[0] is not None:
            marks.append((after[0], after[1]))
        yield from merged(self.using, [queue], Span(end, max(marks, default=BEGINNING), limit, chosen.topics or None))

    # --- filling --------------------------------------------------------------------------------------------------

    def _to_put(self) -> Selection:
        """Return the selection of what is put. It includes the new due times of messages that were spread."""
        chosen = self.selection
        if self.overdue != Overdue.SPREAD or chosen.due_before is None:
            return chosen
        # The record rounds due times up.
        last = ceil_tenth(self._spread_until)
        return chosen._replace(due_before=max(chosen.due_before, last + MICROSECOND))

    def _fill(self, queue: str, tally: Tally, after: BatchEnd | None) -> Generator[tuple[int, BatchEnd | None]]:
        """Put the messages of a queue into Redis; with ``dry_run`` only count them. Yields after each batch."""
        horizon = self._horizon
        if not self.dry_run:
            # If only a part is restored, a worker has to load the rest: the lease ends at once, so that any worker may
            # begin.
            lease = LOADER_LEASE if self._counts_as_load else NO_LEASE
            worker = f"restore:{actors.host()}/{os.getpid()}/{id(self):x}"
            horizon, loading = ensure_horizon(self.using, self.broker, lease=lease, worker=worker)
            if loading and self._counts_as_load:
                self._load = Load(self.broker, worker, horizon)
        start = None
        if self.dry_run and self.overdue != Overdue.RUN:
            start = self._cutoff + MICROSECOND
        batches = self._read(self._to_put(), queue, after, start=start, end=from_tenths(horizon), limit=self.batch_size)
        if self.dry_run:
            done = ((batch, {queue: self._would_put(queue, batch.ids)}) for batch in batches)
        else:
            done = fill(self.broker, batches, load=self._load, read_ahead=BATCHES_AHEAD)
        with closing(done):
            for batch, answers in done:
                answer = answers[queue]
                tally.put += answer.put
                tally.present += answer.present
                yield len(batch.ids), batch.end
                failpoints.reach("mid_restore")

    def _would_put(self, queue: str, ids: list[int]) -> Put:
        """Count which of these messages Redis has already, and which would be put."""
        if self.no_expired:
            expired = Message.objects.using(self.using).filter(self._is_expired(), pk__in=ids)
            gone = set(expired.values_list("pk", flat=True))
            ids = [pk for pk in ids if pk not in gone]
        there = sum(not place.is_nowhere for place in self.broker.locations(queue, ids))
        return Put(len(ids) - there, there)

    # --- overdue messages -----------------------------------------------------------------------------------------

    def _change_overdue(
        self, queue: str, tally: Tally, after: BatchEnd | None
    ) -> Generator[tuple[int, BatchEnd | None]]:
        """End or spread the overdue messages in the record. Yield how many of a batch need not be put any more."""
        if self.dry_run:
            self._foresee_changes(tally)
            return
        limit = min(self.batch_size, MOVES_PER_TRANSACTION)
        for batch in self._read(self.selection, queue, after, end=self._cutoff, limit=limit):
            needless = self._change(queue, tally, batch.ids) if batch.ids else 0
            self._renew_hold()
            yield needless, batch.end

    def _foresee_changes(self, tally: Tally) -> None:
        """Count for the preview what would become of the overdue messages of a queue."""
        number = tally.overdue
        tally.count(CHANGES[self.overdue].counted, number)
        if self.overdue == Overdue.SPREAD:
            span = from_tenths(self._horizon) - self._began
            # The first one is due at once.
            put = min(number, 1 + int(number * (span / self.spread))) if self.spread else number
            tally.put += put
            tally.later += number - put

    def _change(self, queue: str, tally: Tally, ids: list[int]) -> int:
        """Change a batch of messages in the record, unless they were claimed or rescheduled meanwhile.

        Return how many the next stage does not put: those that ended, and those that are due beyond the horizon.
        """
        move, reason, counted = CHANGES[self.overdue]
        still_overdue = Q(IS_SCHEDULED, due_at__lte=self._cutoff)
        answers = move(self.using, ids, self._spreading.times(ids), reason, still_overdue)
        moved = [answer.moved for answer in answers if answer.moved is not None]
        later = sum(one.due_at > from_tenths(self._horizon) for one in moved)
        tally.count(counted, len(moved))
        tally.later += later
        self._tell(queue, moved)
        return later if self.overdue == Overdue.SPREAD else len(moved)

    def _tell(self, queue: str, moved: Sequence[Moved]) -> None:
        """Tell the receivers of signals which messages ended, and remove all of them from Redis.

        Redis has them at their old due times, if at all. The next stage puts those that were spread.
        """
        for one in moved:
            signals.emit_end(Message, one, self.using)
        with without_redis():
            self.broker.remove(queue, [one.id for one in moved])
        publish_follow_ups(self.using, moved)

    def _expire(self, queue: str, tally: Tally, _after: BatchEnd | None) -> Generator[tuple[int, BatchEnd | None]]:
        """End the messages whose time to start is over."""
        for some in self._chunks_of_ids():
            among = self.selection.where(queue) & some
            while moved := transitions.expire(self.using, actor=actors.current(), among=among):
                self._tell(queue, moved)
                tally.expired += len(moved)
                self._renew_hold()
                yield 0, None

    def _chunks_of_ids(self) -> Iterator[Q]:
        if not self._ids:
            yield Q()
        for some in chunks(self._ids, IDS_PER_CALL):
            yield Q(pk__in=some)

    # --- signals --------------------------------------------------------------------------------------------------

    def _send_signals(self) -> None:
        """Send ``messages_restored`` for each queue of which Redis has messages now."""
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
