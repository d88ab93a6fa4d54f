"""Gauges that are read when they are asked for: from the record along its partial indexes, and from the meta of Redis.

Each worker answers with the same gauges, for they are those of the whole deployment: take their maximum, not their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

from django.db import Error as DatabaseError
from django.db import connections
from prometheus_client.core import GaugeMetricFamily, Metric

from ...api import pausing
from ...broker import RedisBroker, index
from ...core.clock import SECOND
from ...core.exceptions import BrokerUnavailable
from ...core.states import State
from ...inspector import stats
from ...inspector.snapshot import QueueSnapshot, Snapshot, take_snapshot
from ...models import Message
from ...project import conf
from ...record.sql import statements
from ...record.sql.holders import Holder, oldest
from ...record.sql.sessions import TooSlow, statement_timeout
from ...restore.horizon import refuse_foreign
from .counts import MOST_QUEUES, OTHER

# A statement that takes longer is stopped, and Redis is taken for unreachable when it takes longer to answer.
TIMEOUT_MS = 2000


class Gauges:
    """Reads the gauges of one database alias."""

    def __init__(self, using: str) -> None:
        self.using = using

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. Those that cannot be read are left out; ``delayq_database_up`` and its like say so."""
        try:
            found = self._read_record()
        except (DatabaseError, TooSlow):
            found = []
        finally:
            # Until the next scrape the server needs no session for this thread.
            connections[self.using].close()
        yield GaugeMetricFamily("delayq_database_up", "1 when the database answers in time.", value=bool(found))
        yield from found
        broker = index(self.using, timeout=TIMEOUT_MS / 1000)
        if broker is not None:
            yield from self._read_redis(broker)

    def _read_record(self) -> list[Metric]:
        with statement_timeout(self.using, TIMEOUT_MS):
            snapshot = take_snapshot(self.using)
            paused = pausing.paused(self.using)
            dead = stats.count_capped(Message.objects.using(self.using).filter(state=State.DEAD), stats.FINISHED_CAP)
            alive = stats.alive(self.using, snapshot.at)
            holders = oldest(statements(self.using).snapshot_holders() or [])
        return [
            *_of_queues(snapshot, set(paused)),
            _of_holders(holders),
            GaugeMetricFamily(
                "delayq_scheduled_messages_estimate",
                "Scheduled messages of all queues; above the limit of a queue, the estimate of the database.",
                value=snapshot.scheduled.count,
            ),
            GaugeMetricFamily("delayq_running_messages", "Messages that workers hold.", value=snapshot.running.count),
            GaugeMetricFamily("delayq_dead_messages", "Dead messages in the record.", value=dead.count),
            GaugeMetricFamily("delayq_workers_alive", "Worker processes that are alive.", value=alive),
        ]

    def _read_redis(self, broker: RedisBroker) -> Iterator[Metric]:
        """Yield the gauges of Redis. One that takes no writes, or holds the ids of another database, counts as down."""
        try:
            meta = broker.read_meta()
            up = True
            # While the database is away, nobody can tell whose Redis it is.
            with suppress(DatabaseError):
                refuse_foreign(self.using, meta)
            broker.write_nothing()
        except BrokerUnavailable:
            up = False
        finally:
            broker.close()
            connections[self.using].close()
        yield GaugeMetricFamily("delayq_redis_up", "1 when Redis takes writes, with ids of this database.", value=up)
        if not up or meta.horizon_tenths is None:
            return
        yield GaugeMetricFamily(
            "delayq_redis_horizon_ahead_seconds",
            "How far ahead Redis is filled.",
            value=(meta.horizon_tenths - meta.now_tenths) / SECOND,
        )
        yield GaugeMetricFamily(
            "delayq_redis_last_load_timestamp_seconds",
            "When the last load began: HORIZON before the horizon.",
            value=meta.horizon_tenths / SECOND - conf.get().HORIZON,
        )


def _of_queues(snapshot: Snapshot, paused: set[str]) -> list[Metric]:
    """Return the gauges of each queue. Queues beyond the limit share the label ``other``."""
    about = {
        "delayq_scheduled_messages": "Scheduled messages, counted up to 10,000 in each queue.",
        "delayq_limited_messages": "Messages that wait for a limit, counted up to 10,000 in each queue.",
        "delayq_ready_messages": "Messages that are due and not yet overdue.",
        "delayq_overdue_messages": "Messages that should have been claimed by now.",
        "delayq_oldest_overdue_age_seconds": "How long ago the oldest overdue message fell due; 0: none is overdue.",
        "delayq_oldest_limited_age_seconds": "How long ago the limited message fell due that waits longest; 0: none.",
        "delayq_queue_paused": "1 when the queue is paused.",
    }
    families = [GaugeMetricFamily(name, text, labels=["queue"]) for name, text in about.items()]
    sums: dict[str, list[float]] = {}
    for place, queue in enumerate(sorted({*snapshot.queues, *paused})):
        numbers = _numbers(snapshot.queues.get(queue, QueueSnapshot()), snapshot.at, queue in paused)
        label = queue if place < MOST_QUEUES else OTHER
        before = sums.setdefault(label, [0.0] * len(families))
        combined = [*map(sum, zip(before[:4], numbers[:4], strict=True)), *map(max, before[4:], numbers[4:])]
        sums[label] = combined
    for label, numbers in sums.items():
        for family, number in zip(families, numbers, strict=True):
            family.add_metric([label], number)
    return [*families]


def _of_holders(holders: list[Holder]) -> Metric:
    """Return how old the snapshots are that keep PostgreSQL from cleaning the table."""
    about = "Transactions that have begun since an old snapshot was taken; 0, of nobody: none is old."
    family = GaugeMetricFamily("delayq_old_snapshot_transactions", about, labels=["kind", "name", "owner"])
    for holder in holders or [Holder("", "", "", None, 0)]:
        family.add_metric([holder.kind, holder.name, holder.owner], holder.transactions)
    return family


def _numbers(queue: QueueSnapshot, now: datetime, is_paused: bool) -> list[float]:
    counts = (queue.scheduled, queue.limited, queue.ready, queue.overdue)
    ages = (_age(oldest, now) for oldest in (queue.oldest_overdue, queue.oldest_limited))
    return [*(number.count for number in counts), *ages, is_paused]


def _age(oldest: datetime | None, now: datetime) -> float:
    return 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())
