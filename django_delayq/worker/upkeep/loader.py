"""Fills Redis ahead of time, and fills it again when it was lost: the automatic restore."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import datetime
from itertools import islice
from typing import Self

from django.db import DatabaseError

from ... import signals
from ...broker.base import FAR_AWAY, IDS_PER_CALL, Meta, Put, ServerRun
from ...core import actors, bounds, failpoints
from ...core.clock import SECOND, from_tenths
from ...core.durations import brief
from ...core.exceptions import BrokerFull, BrokerRubbish, BrokerUnavailable, FarBroker, ForeignBroker, UnusableBroker
from ...core.known_record import doubt_identity
from ...extensions import RestoreObservers, RestoreStart, Service
from ...models import Message
from ...project import conf, pulled
from ...record import reads
from ...record.sql import statements
from ...record.sql.rows import Span
from ...restore import reading
from ...restore.filling import LOADER_LEASE, Load, fill
from ...restore.horizon import is_too_far, writable_server
from ...restore.selection import Overdue, Selection, Tally
from ..shared.broker_switch import BrokerSwitch
from .upkeep_tuning import USUAL, UpkeepTuning

logger = logging.getLogger("django_delayq")


class _ObservedLoad:
    """Reports a load from the beginning to the observers of restores, once a message is found."""

    def __init__(self, using: str, worker: str, *, from_beginning: bool) -> None:
        self._start = RestoreStart(
            using,
            f"loader:{worker}",
            Selection(),
            Overdue.RUN,
            0.0,
            no_expired=False,
            described="all queues",
            total=None,
        )
        self._actor = f"worker:{worker}"
        self._from_beginning = from_beginning
        self._observers: RestoreObservers | None = None
        self._tally = Tally()

    def progress(self, put: Put, found: int) -> None:
        """Report messages that were found, and the answer to their put."""
        if not self._from_beginning:
            return
        self._tally.add(Tally(put=put.put, present=put.present))
        if self._observers is None:
            with actors.acting_as(self._actor):
                self._observers = RestoreObservers(self._start)
        self._observers.progress(found, self._tally, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._observers is not None and not isinstance(error, GeneratorExit):
            # The error of a failed load has a text, even where the exception has none.
            text = "" if error is None else str(error) or type(error).__name__
            self._observers.ended(self._tally, None, text)


class GivenUp(Exception):
    """Ends a load."""

    def __str__(self) -> str:
        return "given up by its worker, which ends or begins anew; the rest is loaded all the same"


class Loader(Service):
    """Reads the meta once a second, and loads all queues of the record when it is needed.

    Redis was lost when the horizon is missing or belongs to another run of the server, and rolled back when the tick,
    which every other check counts, is behind what this process read last. Then the record is loaded from the beginning;
    otherwise only the part beyond the old horizon.
    """

    name = "loader"

    def __init__(self, using: str, brokers: BrokerSwitch, worker: str, tuning: UpkeepTuning = USUAL) -> None:
        assert brokers.redis is not None
        self.using = using
        self.brokers = brokers
        self.broker = brokers.redis
        self.worker = worker
        self.tuning = tuning
        self._server: ServerRun | None = None
        self._identified = 0.0
        # The maxmemory-policy that this process has warned of.
        self._policy = "noeviction"
        # The tick that this process read last; None before the first load.
        self._tick: int | None = None
        # Whether the last check has counted a tick.
        self._counts = False
        # The load that goes on with the next tick.
        self._loading: Generator[None] | None = None
        # When this process last brought the horizon nearer (monotonic).
        self._brought_nearer = -tuning.nearer_interval

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        """True while Redis answers: each process asks for itself whether a Redis that was away is back."""
        return not self.brokers.is_away

    def tick(self) -> float:
        """Check the meta, load if it is needed, and report to the broker switch whether Redis answered."""
        began = time.monotonic()
        try:
            if self.brokers.rubbish_seen is not None:
                self.release()
            loading = self._loading or self.check()
            # A load is over when it raises, and when it yields no further page.
            self._loading = None
            most = self.tuning.pages_per_tick
            if loading is not None and sum(1 for _page in islice(loading, most)) == most:
                self._loading = loading
                return 0.0
        except BrokerUnavailable as error:
            self._server = None
            if isinstance(error, ForeignBroker):
                # The identity is read again: somebody may have emptied its table.
                doubt_identity(self.using)
            self.brokers.report_failure(error)
            if isinstance(error, BrokerFull | FarBroker):
                self._make_room()
            return self.tuning.unusable_interval if isinstance(error, UnusableBroker) else self.tuning.meta_interval
        self.brokers.report_answer(began, is_usable=True)
        return self.tuning.meta_interval

    def release(self) -> None:
        """Give up the load under way, so that another process begins it at once. Called after the last tick."""
        if self._loading is not None:
            with contextlib.suppress(GivenUp):
                self._loading.throw(GivenUp)
            self._loading = None

    def _make_room(self) -> None:
        """Drop due ids, whose messages the database delivers: a Redis full of our own ids would stay full."""
        with contextlib.suppress(BrokerUnavailable):
            for queue in self.broker.due_queues(None).queues:
                for _batch in range(self.tuning.batches_dropped):
                    if not self.broker.take(queue.name, IDS_PER_CALL).tickets:
                        break

    def _identify(self) -> ServerRun:
        """Return the identity of the Redis server. One that was away may be another one now, which lacks ids."""
        is_old = time.monotonic() - self._identified > self.tuning.identity_interval
        if self._server is None or is_old or self.brokers.is_away:
            self._server = writable_server(self.broker)
            self._identified = time.monotonic()
            if self._server.policy not in ("", self._policy) and not self._server.policy.startswith("volatile"):
                self._policy = self._server.policy
                logger.warning(
                    "Redis may evict the ids of waiting messages, which then start late: set its maxmemory-policy to "
                    "noeviction; it is %s",
                    self._policy,
                )
        return self._server

    def check(self) -> Generator[None] | None:
        """Read the meta. Return the load that is needed, if one is: it yields after each page."""
        server = self._identify()
        if (seen := self.brokers.rubbish_seen) is not None:
            self._clear(seen)
        # Every other check counts: a count costs another command, and a loss shows without it. A Redis that was away
        # must take the count, since a full one would refuse it.
        self._counts = not self._counts or self.brokers.is_away
        meta = self.broker.tick(counts=self._counts)
        if meta.round_trip > FAR_AWAY and self.broker.round_trip() > FAR_AWAY:
            raise FarBroker
        rolled_back = meta.tick < (self._tick or 0) + self._counts
        intact = not rolled_back and meta.horizon_tenths is not None and meta.loaded_tenths is not None
        ours = (meta.run_id, meta.replid) == (server.run_id, server.replid)
        ahead = conf.get().HORIZON
        if intact and ours and meta.loaded_tenths is not None and meta.horizon_tenths is not None:
            # There is nothing to do until half of the time to the horizon has passed.
            whole = meta.loaded_tenths == meta.horizon_tenths and not self._is_too_far(meta)
            if whole and meta.horizon_tenths - meta.now_tenths > ahead * SECOND / 2:
                self._tick = meta.tick
                return None
        why = "" if intact and ours else _why(meta, restarted=rolled_back or not ours)
        # Redis may have been restarted since it was identified.
        self._server = None
        return self._load(self._identify(), meta.tick, rolled_back=rolled_back, why=why)

    def _clear(self, seen: int) -> None:
        """Delete our keys in Redis, because something else was seen there.

        Raises ``BrokerRubbish`` when they were deleted a short time ago: while somebody writes there again and again,
        delivery goes on by query.
        """
        try:
            queues = reading.queues(self.using)
        except DatabaseError:
            queues = []
        if not self.broker.clear(queues, seen):
            raise BrokerRubbish
        logger.warning("Somebody has written into our keys in Redis; they are deleted, and loaded from the record")
        self._tick = self.brokers.rubbish_seen = None

    def _is_too_far(self, meta: Meta) -> bool:
        """Return whether the horizon is too far away, and to be brought nearer now."""
        if not is_too_far(meta, conf.get().HORIZON):
            return False
        now = time.monotonic()
        if now - self._brought_nearer < self.tuning.nearer_interval:
            return False
        self._brought_nearer = now
        logger.warning(
            "Redis is filled farther ahead than HORIZON, by a worker with another HORIZON or by no worker; "
            "it is loaded again from the record"
        )
        return True

    def _load(self, server: ServerRun, tick: int, *, rolled_back: bool, why: str) -> Generator[None]:
        """Load, unless another process does. ``tick`` is the one that showed the need, ``why`` is for the log."""
        begun = self.broker.load(
            ahead=conf.get().HORIZON,
            worker=self.worker,
            lease=LOADER_LEASE,
            identity=reads.identity(self.using),
            server=server,
            lost=rolled_back,
        )
        if begun is not None:
            if why and begun[0] is None and self._tick is not None:
                logger.warning("%s; it is loaded again from the record", why)
            yield from self._load_between(*begun)
        # Only the tick may show that Redis was rolled back, so it is remembered only after the load has succeeded.
        self._tick = tick

    def _load_between(self, start: int | None, horizon: int) -> Generator[None]:
        """Load what is due from ``start`` (None: from the beginning) up to the horizon. Yields after each page."""
        failpoints.reach("after_horizon")
        began = time.monotonic()
        found: Counter[str] = Counter()
        put: Counter[str] = Counter()
        load = Load(self.broker, self.worker, horizon)
        with load, _ObservedLoad(self.using, self.worker, from_beginning=start is None) as observed:
            for answers in self._fill(load, start):
                for queue, answer in answers.items():
                    found[queue] += answer.put + answer.present + answer.beyond
                    put[queue] += answer.put
                    observed.progress(answer, answer.put + answer.present + answer.beyond)
                yield
        if start is None:
            logger.info(
                "Loaded Redis from the record: %d messages of %d queues due within %s, %d of them put, in %.2f s",
                found.total(),
                len(found),
                brief(conf.get().HORIZON),
                put.total(),
                time.monotonic() - began,
            )
            for queue in sorted(found):
                signals.emit(
                    signals.messages_restored,
                    Message,
                    queue=queue,
                    found=found[queue],
                    put=put[queue],
                    actor=f"worker:{self.worker}",
                    using=self.using,
                )
        elif found:
            logger.debug("Loaded Redis ahead: %d messages of %d queues", found.total(), len(found))

    def _fill(self, load: Load, start: int | None) -> Iterator[dict[str, Put]]:
        """Put the messages of all queues. Yield the answers for each batch."""
        # Read after the horizon was advanced: the producer puts the first message of a queue that is missing here.
        queues = pulled.without(statements(self.using).queues())
        batches = self._batches(queues, start, from_tenths(load.horizon_tenths))
        for _batch, answers in fill(self.broker, batches, load=load):
            failpoints.reach("mid_load")
            yield answers
        load.finish()

    def _batches(self, queues: list[str], start: int | None, end: datetime) -> Iterator[reading.Batch]:
        """Read what falls due soon first, in the order of the due times. Then, of a load from the beginning, the rest.

        What is overdue may be a backlog of a million, for which no other message should wait.
        """
        page = self.tuning.page
        if start is not None:
            yield from reading.merged(self.using, queues, Span(end, (from_tenths(start), 0), page))
            return
        overdue_since = reads.now(self.using) - bounds.OVERDUE_AFTER
        yield from reading.merged(self.using, queues, Span(end, (overdue_since, 0), page))
        yield from reading.in_turn(self.using, queues, Span(overdue_since, limit=page))


def _why(meta: Meta, *, restarted: bool) -> str:
    """Return in words why Redis is loaded from the beginning."""
    if meta.horizon_tenths is None:
        return "Redis lost its ids (it is empty)"
    if restarted:
        return "Redis lost its ids (it was restarted or went back in time)"
    return "Redis was out of reach for a process" if meta.is_requested else "Redis holds a load that was broken off"
