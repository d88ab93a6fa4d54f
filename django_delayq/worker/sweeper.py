"""Puts messages into Redis again that got lost between the record and Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from .. import conf, restore, transitions
from ..broker.base import Entry, Put
from ..exceptions import BrokerUnavailable
from ..extensions import Service
from .broker_switch import BrokerSwitch

logger = logging.getLogger("django_delayq")

# Rows in one query, and queries for each queue in one tick.
ROWS_PER_QUERY = 1000
QUERIES_PER_TICK = 5
# The time between two rounds that start at the very beginning. The rounds between start at the low-water mark, which
# lags behind by the same time, for transactions that committed late. Seconds.
FULL_ROUND = 60.0
# A consumer needs a few ms between taking ids and claiming their messages. The sweep allows it this time. Seconds.
CLAIMING = 0.3


@dataclass(slots=True)
class _Round:
    """The progress of the sweep of one queue."""

    cursor: tuple[datetime, int] | None = None
    low: datetime | None = None
    full_at: float = 0.0
    first: datetime | None = None


class Sweeper(Service):
    """Searches the record for messages overdue by more than the grace, and puts the ones that Redis lacks.

    A lost message, however it got lost, is late by the grace and the interval at most. The work of a tick is bounded: a
    long backlog is swept in pages.
    """

    name = "sweeper"
    thread = "timing"

    def __init__(
        self,
        using: str,
        brokers: BrokerSwitch,
        queues: Callable[[], tuple[str, ...]],
        topics: Callable[[], Iterable[str]],
    ) -> None:
        assert brokers.redis is not None
        self.using = using
        self.brokers = brokers
        self.broker = brokers.redis
        self.queues = queues
        self.topics = topics
        self._rounds: dict[str, _Round] = {}

    def tick(self) -> float:
        """Sweep some pages of each queue, unless no message is overdue or Redis is away."""
        interval = conf.get().SWEEP_INTERVAL
        if self.brokers.current() is not self.broker:
            return interval
        overdue_since = transitions.now(self.using) - timedelta(seconds=conf.get().GRACE)
        queues = self.queues()
        if not restore.any_scheduled(self.using, queues, overdue_since):
            return interval
        for queue in queues:
            try:
                put = self._sweep(queue, overdue_since)
            except BrokerUnavailable as error:
                self.brokers.report_failure(error)
                return interval
            if put.put:
                logger.warning("The sweep of queue %s put %d messages that Redis had lost", queue, put.put)
        return interval

    def _sweep(self, queue: str, overdue_since: datetime) -> Put:
        """Go on with the round of a queue, for some pages at most."""
        state = self._rounds.setdefault(queue, _Round())
        total = Put()
        for _page in range(QUERIES_PER_TICK):
            if state.cursor is None:
                self._begin(state, overdue_since)
            rows = restore.page(
                self.using,
                queue,
                after=state.cursor,
                start=state.low,
                end=overdue_since,
                limit=ROWS_PER_QUERY,
                topics=list(self.topics()),
            )
            if rows and state.first is None:
                state.first = rows[0].due_at
            if rows:
                total += self._fill(queue, rows)
            if len(rows) < ROWS_PER_QUERY:
                state.cursor = None
                break
            state.cursor = (rows[-1].due_at, rows[-1].id)
        return total

    def _fill(self, queue: str, rows: list[Entry]) -> Put:
        """Put the messages that Redis lacks and that are still scheduled a moment later."""
        missing = set(self.broker.missing(queue, rows))
        if not missing:
            return Put(present=len(rows))
        # Most likely a consumer has just taken these ids and is about to claim them.
        time.sleep(CLAIMING)
        still = restore.still_scheduled(self.using, missing)
        return self.broker.put(queue, [row for row in rows if row.id in still], fill=True) if still else Put()

    def _begin(self, state: _Round, overdue_since: datetime) -> None:
        """Begin a round: at the very beginning from time to time, else at the low-water mark."""
        now = time.monotonic()
        if now >= state.full_at:
            state.full_at = now + FULL_ROUND
            state.low = None
        else:
            lag = overdue_since - timedelta(seconds=FULL_ROUND)
            state.low = lag if state.first is None else min(state.first, lag)
        state.first = None
