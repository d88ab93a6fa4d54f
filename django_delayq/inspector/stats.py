"""Counts: what is where, and how late. Fast on a table of any size, since nothing is counted past a cap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connections
from django.db.models import QuerySet

from .. import conf, restore
from ..broker import describe
from ..broker.base import Index, ServerInfo
from ..clock import from_tenths
from ..exceptions import BrokerUnavailable
from ..models import Message, Transition, Worker
from ..states import FINAL, State
from . import snapshot, workers
from .numbers import NONE, Capped, total
from .workers import Presence

__all__ = ["Capped", "Lateness", "QueueStats", "RedisStats", "Stats", "collect"]

# Scheduled and running messages are counted up to this number in each queue.
LIVE_CAP = 1_000_000
# Of the finished ones, the last so many are looked at.
FINISHED_CAP = 10_000
# Lateness is that of the last finished messages.
LATENESS_OF = 1000


@dataclass(frozen=True, slots=True)
class Lateness:
    """From the due time to the first claim, in seconds."""

    of: int
    p50: float | None = None
    p95: float | None = None


@dataclass(slots=True)
class QueueStats:
    """One queue; times by the record's clock. Without an answer of Redis the last three are None."""

    scheduled: Capped = NONE
    overdue: Capped = NONE
    oldest_overdue: datetime | None = None
    next_due: datetime | None = None
    delayed: int | None = None
    ready: int | None = None
    horizon: datetime | None = None


@dataclass(slots=True)
class RedisStats:
    """Redis; ``reachable`` None when none is configured."""

    where: str
    reachable: bool | None = None
    error: str = ""
    health: ServerInfo | None = None


@dataclass(slots=True)
class Stats:
    """All of it, at one moment of the record's clock."""

    at: datetime
    states: dict[State, Capped]
    # The planner's guess of the rows in all; None where there is none.
    estimate: int | None
    queues: dict[str, QueueStats]
    lateness: Lateness
    workers: int
    presence: Presence
    redis: RedisStats = field(default_factory=lambda: RedisStats(""))

    @property
    def overdue(self) -> Capped:
        return total([queue.overdue for queue in self.queues.values()])

    @property
    def oldest_overdue(self) -> datetime | None:
        return min((q.oldest_overdue for q in self.queues.values() if q.oldest_overdue is not None), default=None)

    @property
    def next_due(self) -> datetime | None:
        return min((q.next_due for q in self.queues.values() if q.next_due is not None), default=None)


def collect(using: str, broker: Index | None, cap: int = LIVE_CAP) -> Stats:
    """Ask the record, then Redis. Redis may be away: then its part says so.

    Scheduled and running messages are counted up to ``cap`` in each queue.
    """
    found_now = snapshot.take_snapshot(using, cap)
    now = found_now.at
    queues = {
        name: QueueStats(queue.scheduled, queue.overdue, queue.oldest_overdue, queue.next_due)
        for name, queue in found_now.queues.items()
    }
    states = {State.SCHEDULED: found_now.scheduled, State.RUNNING: found_now.running, **finished(using)}
    there = workers.look(using, now)
    found = Stats(
        now,
        states,
        estimate(using),
        queues,
        lateness(using),
        len(there.of(workers.Health.ALIVE)),
        there,
    )
    found.redis = ask_redis(broker)
    if broker is not None and found.redis.reachable:
        _ask_for_queues(found, broker)
    return found


def capped(rows: QuerySet[Message], cap: int) -> Capped:
    """How many rows, without counting past the cap."""
    count = rows.order_by()[: cap + 1].count()
    return Capped(min(count, cap), count > cap)


def overdue(using: str, now: datetime, queue: str | None = None) -> QuerySet[Message]:
    """What should have started a while ago: OVERDUE_AFTER."""
    late = now - timedelta(seconds=conf.get().OVERDUE_AFTER)
    rows = Message.objects.using(using).filter(state=State.SCHEDULED, due_at__lte=late)
    return rows if queue is None else rows.filter(queue=queue)


def oldest_overdue(using: str, now: datetime, without: Collection[str] = ()) -> datetime | None:
    """The due time of the message that waits longest, ``without`` some queues; None when nothing is overdue."""
    found = [_first(overdue(using, now, queue)) for queue in restore.queues(using) if queue not in without]
    return min((due for due in found if due is not None), default=None)


def _first(rows: QuerySet[Message]) -> datetime | None:
    return rows.order_by("due_at", "id").values_list("due_at", flat=True).first()


def finished(using: str) -> dict[State, Capped]:
    """How the messages ended that finished last; exact when there are no more."""
    rows = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    counts = dict.fromkeys((state for state in State if state in FINAL), 0)
    for state in rows.values_list("state", flat=True)[: FINISHED_CAP + 1].iterator():
        counts[State(state)] += 1
    more = sum(counts.values()) > FINISHED_CAP
    return {state: Capped(min(count, FINISHED_CAP), more) for state, count in counts.items()}


def estimate(using: str) -> int | None:
    """How many rows PostgreSQL believes the table has."""
    if connections[using].vendor != "postgresql":
        return None
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'delayq_message'::regclass")
        rows: int = cursor.fetchone()[0]
    # -1: never analysed.
    return rows if rows >= 0 else None


def lateness(using: str) -> Lateness:
    """How late the last finished messages were claimed, each for the first time; 0 for a moment early."""
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
    """The smallest value that ``percent`` of all do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def alive(using: str, now: datetime) -> int:
    """Worker processes seen a moment ago."""
    return Worker.objects.using(using).filter(seen_at__gt=now - timedelta(seconds=Worker.ALIVE)).count()


def ask_redis(broker: Index | None) -> RedisStats:
    """Where Redis is, whether it answers, and what it says of itself."""
    found = RedisStats(describe(conf.get()))
    if broker is not None:
        try:
            found.health = broker.server_info()
            found.reachable = True
        except BrokerUnavailable as error:
            found.reachable, found.error = False, str(error)
    return found


def _ask_for_queues(found: Stats, broker: Index) -> None:
    try:
        for name, queue in found.queues.items():
            size, meta = broker.size(name), broker.read_meta(name)
            queue.delayed, queue.ready = size.delayed, size.ready
            queue.horizon = None if meta.horizon_tenths is None else from_tenths(meta.horizon_tenths)
    except BrokerUnavailable as error:
        found.redis.reachable, found.redis.error = False, str(error)
