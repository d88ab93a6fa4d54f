"""Fills Redis ahead of time, and again when it was lost: the automatic restore."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from .. import actors, conf, failpoints, restore, signals
from ..broker.base import IDS_PER_CALL, Put, ServerRun
from ..clock import SECOND
from ..exceptions import BrokerFull, BrokerUnavailable, ForeignBroker
from ..extensions import RestoreObservers, RestoreStart, Service
from ..models import Message, identity
from .broker_switch import Source

logger = logging.getLogger("django_delayq")

# The server's identity is asked this often; a connection error asks at once. Seconds.
IDENTIFY = 5.0
# A full Redis is rid of so many batches of ids at a time.
ROOM = 100


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
            self._observers.ended(self._tally, None, "" if error is None else str(error))


class Loader(Service):
    """Looks at each queue's meta once a second.

    Redis was lost when the horizon is missing or belongs to another run of the server, and rolled back when the tick
    did not grow since this process looked last. Then the record is loaded from the beginning; else only what the
    horizon has not reached yet.
    """

    name = "loader"
    thread = "loader"

    def __init__(self, using: str, source: Source, queues: Callable[[], tuple[str, ...]], worker: str) -> None:
        assert source.redis is not None
        self.using = using
        self.source = source
        self.broker = source.redis
        self.queues = queues
        self.worker = worker
        self._server: ServerRun | None = None
        self._identified = 0.0
        self._ticks: dict[str, int] = {}
        self._turn = 0
        self._identity: str | None = None

    def tick(self) -> float:
        began = time.monotonic()
        try:
            self._look_around()
        except ForeignBroker as error:
            self.source.refuse(error)
            return 10.0
        except BrokerUnavailable as error:
            self._server = None
            self.source.failed(error)
            if isinstance(error, BrokerFull):
                self._make_room()
            return 1.0
        self.source.accept()
        self.source.answered(began)
        return 1.0

    def _make_room(self) -> None:
        """Drop what is due, which the database delivers meanwhile: a Redis full of our own ids would stay so."""
        with contextlib.suppress(BrokerUnavailable):
            for queue in self.queues():
                for _batch in range(ROOM):
                    if not self.broker.take(queue, IDS_PER_CALL).tickets:
                        break

    def _identify(self) -> ServerRun:
        if self._server is None or time.monotonic() - self._identified > IDENTIFY:
            self._server = restore.writable_server(self.broker)
            self._identified = time.monotonic()
        return self._server

    def _look_around(self) -> None:
        """At one queue a second, in turn; at those never seen, and at all when one turns out to be lost."""
        queues = self.queues()
        turn = queues[self._turn % len(queues)]
        self._turn += 1
        lost = [self._look(queue) for queue in queues if queue == turn or queue not in self._ticks]
        if any(lost):
            for queue in queues:
                self._look(queue)

    def _look(self, queue: str) -> bool:
        """Look, and load if there is need; whether the queue was lost."""
        server = self._identify()
        look = self.broker.tick(queue)
        known = queue in self._ticks
        rolled_back = look.tick <= self._ticks.get(queue, 0)
        intact = not rolled_back and look.horizon_tenths is not None and look.loaded_tenths is not None
        ours = (look.run_id, look.replid) == (server.run_id, server.replid)
        ahead = conf.get().HORIZON
        if intact and ours and look.loaded_tenths is not None and look.horizon_tenths is not None:
            # Half of what is ahead is used up: load on. Before that there is nothing to do.
            whole = look.loaded_tenths >= look.horizon_tenths
            if whole and look.horizon_tenths - look.now_tenths > ahead * SECOND / 2:
                self._ticks[queue] = look.tick
                return False
        lost = known and not (intact and ours)
        if lost:
            logger.warning(
                "Redis lost queue %s (%s); it is loaded again from the record",
                queue,
                "it is empty" if look.horizon_tenths is None else "it was restarted or went back in time",
            )
        self._load(queue, server, rolled_back=rolled_back)
        # That it went back may be known by its tick alone: not forgotten when the load fails.
        self._ticks[queue] = look.tick
        return lost

    def _load(self, queue: str, server: ServerRun, *, rolled_back: bool) -> None:
        if self._identity is None:
            self._identity = identity(self.using)
        begun = self.broker.load(
            queue,
            ahead=conf.get().HORIZON,
            worker=self.worker,
            lease=restore.LOADER_LEASE,
            identity=self._identity,
            server=server,
            lost=rolled_back,
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
