"""Fills Redis ahead of time, and fills it again when it was lost: the automatic restore."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from django.db import DatabaseError

from .. import actors, conf, failpoints, restore, signals
from ..broker.base import IDS_PER_CALL, Put, QueueMeta, ServerRun, Skew
from ..clock import SECOND
from ..exceptions import BrokerFull, BrokerUnavailable, ForeignBroker, UnusableBroker
from ..extensions import RestoreObservers, RestoreStart, Service
from ..models import Message, forget_identity, identity
from .broker_switch import BrokerSwitch

logger = logging.getLogger("django_delayq")

# The time between two queries for the server's identity; one comes at once after a connection error. Seconds.
IDENTITY_CHECK_INTERVAL = 5.0
# The time between two measurements of how far the clocks of Redis and the database are apart. Seconds.
SKEW_INTERVAL = 2.0
# When Redis is full, this many batches of ids are dropped at a time.
BATCHES_DROPPED = 100
# The time between two checks of a queue, and of a Redis that must not be used. Seconds.
LOAD_INTERVAL = 1.0
UNUSABLE_CHECK_INTERVAL = 10.0
# A process brings a horizon that is too far away nearer again at most this often: while workers with different settings
# run side by side, they would take turns. Seconds.
NEARER_INTERVAL = 60.0


class _ObservedLoad:
    """Reports a load from the beginning of a queue to the observers of restores, once a message is found."""

    def __init__(self, using: str, worker: str, queue: str, *, from_beginning: bool) -> None:
        self._start = RestoreStart(
            using,
            f"loader:{worker}",
            restore.Selection(queues=(queue,)),
            restore.Overdue.RUN,
            0.0,
            no_expired=False,
            described=queue,
            total=None,
        )
        self._actor = f"worker:{worker}"
        self._from_beginning = from_beginning
        self._observers: RestoreObservers | None = None
        self._tally = restore.Tally()

    def progress(self, put: Put, found: int) -> None:
        """Report messages that were found, and the answer to their put."""
        if not self._from_beginning:
            return
        self._tally.add(restore.Tally(put=put.put, present=put.present))
        if self._observers is None:
            with actors.acting_as(self._actor):
                self._observers = RestoreObservers(self._start)
        self._observers.progress(found, self._tally, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._observers is not None:
            # Never empty for an error, whatever its own text is.
            text = "" if error is None else str(error) or type(error).__name__
            self._observers.ended(self._tally, None, text)


class Loader(Service):
    """Reads the meta of one queue once a second, and loads the queue when it is needed.

    Redis was lost when the horizon is missing or belongs to another run of the server, and rolled back when the tick
    has not grown since this process read it last. Then the record is loaded from the beginning; otherwise only the part
    beyond the old horizon.

    The loader also measures how far the clocks of Redis and the record are apart. The scripts correct the clock of
    Redis by that, so that all processes use the record's clock.
    """

    name = "loader"
    thread = "loader"

    def __init__(self, using: str, brokers: BrokerSwitch, queues: Callable[[], tuple[str, ...]], worker: str) -> None:
        assert brokers.redis is not None
        self.using = using
        self.brokers = brokers
        self.broker = brokers.redis
        self.queues = queues
        self.worker = worker
        self._server: ServerRun | None = None
        self._identified = 0.0
        self._ticks: dict[str, int] = {}
        self._skew: Skew | None = None
        self._measured = 0.0
        # The correction that this process saw last in Redis, in tenths; the skew that it logged last, in seconds.
        self._corrected = 0
        self._told = 0.0
        self._turn = 0
        # When this process last brought the horizon of a queue nearer (monotonic).
        self._brought_nearer: dict[str, float] = {}

    def tick(self) -> float:
        """Check queues, load those that need it, and report to the broker switch whether Redis answered."""
        began = time.monotonic()
        try:
            self._check_queues()
        except UnusableBroker as error:
            self._server = None
            if isinstance(error, ForeignBroker):
                # The identity is read again: somebody may have emptied its table.
                forget_identity(self.using)
            self.brokers.report_unusable(error)
            return UNUSABLE_CHECK_INTERVAL
        except BrokerUnavailable as error:
            self._server = None
            self.brokers.report_failure(error)
            if isinstance(error, BrokerFull):
                self._make_room()
            return LOAD_INTERVAL
        self.brokers.report_usable()
        self.brokers.report_answer(began)
        return LOAD_INTERVAL

    def _make_room(self) -> None:
        """Drop ids that are due, which the database delivers meanwhile: a Redis full of our own ids would stay full."""
        with contextlib.suppress(BrokerUnavailable):
            for queue in self.queues():
                for _batch in range(BATCHES_DROPPED):
                    if not self.broker.take(queue, IDS_PER_CALL).tickets:
                        break

    def _identify(self) -> ServerRun:
        """Return the identity of the Redis server."""
        if self._server is None or time.monotonic() - self._identified > IDENTITY_CHECK_INTERVAL:
            self._server = restore.writable_server(self.broker)
            self._identified = time.monotonic()
        return self._server

    def _check_queues(self) -> None:
        """Check the next queue and all new ones: all queues if Redis lost one or failed lately, or a clock was set."""
        queues = self.queues()
        clock_was_set = self._measure_skew() and self._ticks
        turn = queues[self._turn % len(queues)]
        self._turn += 1
        away = self.brokers.is_away
        lost = [self._check(queue) for queue in queues if away or queue == turn or queue not in self._ticks]
        if any(lost) or clock_was_set:
            for queue in queues:
                self._check(queue)

    def _measure_skew(self) -> bool:
        """Measure the skew from time to time. Return whether the correction in Redis has turned out to be wrong."""
        now = time.monotonic()
        if self._skew is not None and now - self._measured < SKEW_INTERVAL:
            return False
        try:
            self._skew = restore.measure_skew(self.using, self.broker)
        except DatabaseError:
            # Redis is looked after as before while the database is away.
            self._skew = None
            return False
        self._measured = now
        self._tell_skew(self._skew.seconds)
        return self._corrected not in self._skew

    def _tell_skew(self, skew: float) -> None:
        """Log a skew that is worth a warning, once until it changes by as much, and its end."""
        if abs(skew - self._told) < restore.SKEW_WARNING:
            return
        if abs(skew) >= restore.SKEW_WARNING:
            self._told = skew
            logger.warning(
                "The clock of Redis is %s the database's; due times are corrected by that, but set the clocks right",
                restore.describe_skew(skew),
            )
        else:
            self._told = 0.0
            logger.warning("The clocks of Redis and the database agree again")

    def _check(self, queue: str) -> bool:
        """Read the meta of a queue, and load the queue if it is needed. Return whether it was lost."""
        server = self._identify()
        known = queue in self._ticks
        # A queue that is new here may belong to another database, and keeps its clock.
        meta = self.broker.tick(queue, self._skew if known else None)
        self._corrected = meta.skew_tenths if known else self._corrected
        rolled_back = meta.tick <= self._ticks.get(queue, 0)
        intact = not rolled_back and meta.horizon_tenths is not None and meta.loaded_tenths is not None
        ours = (meta.run_id, meta.replid) == (server.run_id, server.replid)
        ahead = conf.get().HORIZON
        if intact and ours and meta.loaded_tenths is not None and meta.horizon_tenths is not None:
            # There is nothing to do until half of the time to the horizon has passed.
            whole = meta.loaded_tenths == meta.horizon_tenths and not self._is_too_far(queue, meta)
            if whole and meta.horizon_tenths - meta.now_tenths > ahead * SECOND / 2:
                self._ticks[queue] = meta.tick
                return False
        lost = known and not (intact and ours)
        if lost:
            logger.warning(
                "Redis lost queue %s (%s); it is loaded again from the record",
                queue,
                _reason(meta, restarted=rolled_back or not ours),
            )
        self._load(queue, server, rolled_back=rolled_back)
        # The tick alone may show that Redis was rolled back: it is remembered only when the load has succeeded.
        self._ticks[queue] = meta.tick
        return lost

    def _is_too_far(self, queue: str, meta: QueueMeta) -> bool:
        """Return whether the horizon of a queue is too far away, and to be brought nearer now."""
        if not restore.is_too_far(meta, conf.get().HORIZON):
            return False
        now = time.monotonic()
        if now - self._brought_nearer.get(queue, -NEARER_INTERVAL) < NEARER_INTERVAL:
            return False
        self._brought_nearer[queue] = now
        logger.warning(
            "Redis is filled farther ahead than HORIZON in queue %s, by a worker with another HORIZON or by no worker; "
            "it is loaded again from the record",
            queue,
        )
        return True

    def _load(self, queue: str, server: ServerRun, *, rolled_back: bool) -> None:
        begun = self.broker.load(
            queue,
            ahead=conf.get().HORIZON,
            worker=self.worker,
            lease=restore.LOADER_LEASE,
            identity=identity(self.using),
            server=server,
            lost=rolled_back,
            skew=self._skew,
        )
        if begun is None:
            return
        start, horizon = begun
        failpoints.reach("after_horizon")
        began = time.monotonic()
        batches = map(restore.Batch, restore.pages(self.using, queue, start_tenths=start, end_tenths=horizon))
        put = partial(self.broker.put, queue, fill=True)
        load = restore.Load(self.broker, queue, self.worker, horizon)
        found, total = 0, Put()
        with _ObservedLoad(self.using, self.worker, queue, from_beginning=start is None) as observed:
            for batch, answer in restore.fill(batches, put, load=load, failpoint="mid_load"):
                total += answer
                found += len(batch.entries)
                observed.progress(answer, len(batch.entries))
        if start is None:
            logger.info(
                "Loaded queue %s from the record: %d messages due within %g s, %d of them put, in %.2f s",
                queue,
                found,
                conf.get().HORIZON,
                total.put,
                time.monotonic() - began,
            )
            signals.emit(
                signals.messages_restored,
                Message,
                queue=queue,
                found=found,
                put=total.put,
                actor=f"worker:{self.worker}",
                using=self.using,
            )
        elif found:
            logger.debug("Loaded queue %s ahead: %d messages", queue, found)


def _reason(meta: QueueMeta, *, restarted: bool) -> str:
    """Return in words how a queue was lost."""
    if meta.horizon_tenths is None:
        return "it is empty"
    return "it was restarted or went back in time" if restarted else "its content was damaged"
