"""Puts again what got lost between the record and Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from .. import conf, restore
from ..broker.base import Entry, Put
from ..exceptions import BrokerUnavailable
from ..extensions import Service
from .broker_switch import Source

logger = logging.getLogger("django_delayq")

# Rows per query, and queries per queue and tick.
PAGE = 1000
PAGES = 5
# Every so often a round starts at the very beginning; in between it starts at the low-water mark, which lags behind
# by as much for transactions that committed late. Seconds.
FULL_ROUND = 60.0
# Between taking ids and claiming them a consumer needs a few ms; it is given this time. Seconds.
CLAIMING = 0.3


@dataclass(slots=True)
class _Round:
    """How far the sweep of one queue has come."""

    cursor: tuple[datetime, int] | None = None
    low: datetime | None = None
    full_at: float = 0.0
    first: datetime | None = None


class Sweeper(Service):
    """Looks for rows that are overdue by more than the grace and has Redis put those that it does not have.

    Whatever got lost, and however, is late by the grace and the interval at most. The work of a tick is bounded: a
    long backlog is gone round in pages.
    """

    name = "sweeper"
    thread = "timing"

    def __init__(
        self,
        using: str,
        source: Source,
        queues: Callable[[], tuple[str, ...]],
        topics: Callable[[], Iterable[str]],
    ) -> None:
        assert source.redis is not None
        self.using = using
        self.source = source
        self.broker = source.redis
        self.queues = queues
        self.topics = topics
        self._rounds: dict[str, _Round] = {}

    def tick(self) -> float:
        interval = conf.get().SWEEP_INTERVAL
        if self.source.current() is not self.broker:
            return interval
        # The host's clock will do: what is not due yet by the Redis clock is put as delayed, which changes nothing.
        overdue_since = timezone.now() - timedelta(seconds=conf.get().GRACE)
        queues = self.queues()
        if not restore.any_scheduled(self.using, queues, overdue_since):
            return interval
        for queue in queues:
            try:
                put = self._sweep(queue, overdue_since)
            except BrokerUnavailable as error:
                self.source.failed(error)
                return interval
            if put.put:
                logger.warning("The sweep of queue %s put %d messages that Redis had lost", queue, put.put)
        return interval

    def _sweep(self, queue: str, overdue_since: datetime) -> Put:
        state = self._rounds.setdefault(queue, _Round())
        total = Put()
        for _page in range(PAGES):
            if state.cursor is None:
                self._begin(state, overdue_since)
            rows = restore.page(
                self.using,
                queue,
                after=state.cursor,
                start=state.low,
                end=overdue_since,
                limit=PAGE,
                topics=list(self.topics()),
            )
            if rows and state.first is None:
                state.first = rows[0].due_at
            if rows:
                total += self._fill(queue, rows)
            if len(rows) < PAGE:
                state.cursor = None
                break
            state.cursor = (rows[-1].due_at, rows[-1].id)
        return total

    def _fill(self, queue: str, rows: list[Entry]) -> Put:
        missing = set(self.broker.missing(queue, rows))
        if not missing:
            return Put(present=len(rows))
        # Most likely some consumer has just taken them and is about to claim them: look again.
        time.sleep(CLAIMING)
        still = restore.still_scheduled(self.using, missing)
        return self.broker.put(queue, [row for row in rows if row.id in still], fill=True) if still else Put()

    def _begin(self, state: _Round, overdue_since: datetime) -> None:
        now = time.monotonic()
        if now >= state.full_at:
            state.full_at = now + FULL_ROUND
            state.low = None
        else:
            lag = overdue_since - timedelta(seconds=FULL_ROUND)
            state.low = lag if state.first is None else min(state.first, lag)
        state.first = None
