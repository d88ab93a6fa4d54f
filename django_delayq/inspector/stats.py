"""Collects the statistics of ``delayq_stats``. Fast on a table of any size: nothing is counted past a cap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db.models import QuerySet

from ..broker import RedisBroker, describe
from ..broker.base import ServerInfo
from ..core.clock import from_tenths
from ..core.exceptions import BrokerUnavailable, UnusableBroker
from ..core.states import FINAL, State
from ..models import Message, Transition, Worker
from ..models.workers import WorkerList, seen_lately
from ..project import conf
from ..record import admission
from ..record.sql import statements
from ..restore.horizon import refuse_foreign
from .lines import Lines, longest_lines
from .numbers import Capped, capped
from .snapshot import Snapshot, overdue_cutoff, take_snapshot
from .waiting import overdue_heads
from .worker_list import list_workers

# Live messages are counted up to this number in each queue.
LIVE_CAP = 1_000_000
# Final states are counted among this many messages that finished last.
FINISHED_CAP = 10_000
# Lateness is measured on this many messages that finished last.
LATENESS_OF = 1000
# The longest lines before limits that are read.
LINES_READ = 20


class Lateness(NamedTuple):
    """The time from the due time to the first claim, in seconds, of the last ``of`` finished messages."""

    of: int
    p50: float | None = None
    p95: float | None = None


class QueueInRedis(NamedTuple):
    """One queue in Redis: how many ids are delayed and ready, and its horizon (None: it is not loaded)."""

    delayed: int
    ready: int
    horizon: datetime | None


class RedisStats(NamedTuple):
    """The state of Redis, as seen by this process: its own report, or the error; both of one that cannot be used.

    Neither: no Redis is configured.
    """

    where: str
    health: ServerInfo | None = None
    error: str | None = None

    @property
    def reachable(self) -> bool | None:
        """Whether Redis answers. None: no Redis is configured."""
        if self.health is None and self.error is None:
            return None
        return self.health is not None


class Stats(NamedTuple):
    """The statistics that ``delayq_stats`` shows, among them a snapshot of the waiting messages."""

    snapshot: Snapshot
    # The final states of the messages that finished last.
    finished: dict[State, Capped]
    # The database's estimate of the rows in the table of messages; None where there is none.
    estimate: int | None
    lateness: Lateness
    workers: WorkerList
    redis: RedisStats
    # By the name of the queue; empty unless Redis answers.
    in_redis: dict[str, QueueInRedis]
    # The messages that wait for limits.
    lines: Lines

    @property
    def at(self) -> datetime:
        """The moment of the snapshot, by the record's clock."""
        return self.snapshot.at

    @property
    def states(self) -> dict[State, Capped]:
        """The number of messages in each state."""
        return {State.SCHEDULED: self.snapshot.scheduled, State.RUNNING: self.snapshot.running, **self.finished}


def collect(using: str, broker: RedisBroker | None) -> Stats:
    """Read the record, then Redis. While Redis is away or foreign, ``redis`` says so and ``in_redis`` is empty."""
    snapshot = take_snapshot(using, LIVE_CAP)
    lines = longest_lines(using, LINES_READ) if snapshot.limited.count else Lines()
    in_record = (snapshot, finished(using), estimate(using), lateness(using), list_workers(using, snapshot.at))
    redis = ask_redis(broker)
    in_redis: dict[str, QueueInRedis] = {}
    if broker is not None and redis.reachable:
        try:
            meta = broker.read_meta()
            refuse_foreign(using, meta)
            horizon = None if meta.horizon_tenths is None else from_tenths(meta.horizon_tenths)
            for queue, held in broker.sizes(list(snapshot.queues)).items():
                in_redis[queue] = QueueInRedis(held.delayed, held.ready, horizon)
        except BrokerUnavailable as error:
            redis = RedisStats(redis.where, redis.health if isinstance(error, UnusableBroker) else None, str(error))
    return Stats(*in_record, redis, in_redis, lines)


def count_capped(rows: QuerySet[Message], cap: int) -> Capped:
    """Count rows, but not past the cap."""
    return capped(rows.order_by()[: cap + 1].count(), cap)


def oldest_overdue(using: str, now: datetime, without: Collection[str] = ()) -> list[Message]:
    """Return the overdue message of each queue that waits longest, the oldest first, ``without`` some queues.

    Those that wait for limits are not overdue.
    """
    found = overdue_heads(using, admission.full_lately(using), overdue_cutoff(now))
    return sorted((head for head in found if head.queue not in without), key=lambda head: head.due_at)


def finished(using: str) -> dict[State, Capped]:
    """Count the final states of the messages that finished last. The numbers are exact when no more have finished."""
    rows = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    counts = dict.fromkeys((state for state in State if state in FINAL), 0)
    for state in rows.values_list("state", flat=True)[: FINISHED_CAP + 1]:
        counts[State(state)] += 1
    more = sum(counts.values()) > FINISHED_CAP
    return {state: Capped(min(count, FINISHED_CAP), more) for state, count in counts.items()}


def estimate(using: str) -> int | None:
    """Return how many rows PostgreSQL estimates in the table of messages; None on other databases."""
    return statements(using).estimated_rows("delayq_message")


def lateness(using: str) -> Lateness:
    """Measure how late the messages that finished last were claimed for the first time; 0 for one claimed ahead."""
    last = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    ids = list(last.values_list("pk", flat=True)[:LATENESS_OF])
    claims = Transition.objects.using(using).filter(message_id__in=ids, from_state=State.SCHEDULED)
    first: dict[int, float] = {}
    rows = claims.filter(to_state=State.RUNNING).order_by("message_id", "number")
    for pk, at, due in rows.values_list("message_id", "at", "due_at"):
        first.setdefault(pk, max(0.0, (at - due).total_seconds()))
    if not first:
        return Lateness(0)
    spans = sorted(first.values())
    return Lateness(len(spans), _percentile(spans, 50), _percentile(spans, 95))


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def alive(using: str, now: datetime) -> int:
    """Count the worker processes that are alive."""
    return Worker.objects.using(using).filter(seen_lately(now)).count()


def ask_redis(broker: RedisBroker | None) -> RedisStats:
    """Ask Redis whether it answers, and for its own report."""
    where = describe(conf.get())
    if broker is None:
        return RedisStats(where)
    try:
        health = broker.server_info()
        return RedisStats(where, health, health.refusal)
    except BrokerUnavailable as error:
        return RedisStats(where, error=str(error))
