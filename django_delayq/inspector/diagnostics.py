"""Checks whether the database, Redis and the workers do their work: one finding per question, for monitors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from django.db import DatabaseError, InterfaceError, connections
from django.utils import translation

from .. import extensions, restore
from ..api import pausing
from ..broker import describe
from ..broker.base import Index, ServerInfo
from ..core.durations import brief
from ..core.exceptions import BrokerUnavailable, ClusterBroker, ForeignBroker
from ..core.findings import Cause, Finding, Level
from ..core.limits import parts
from ..core.states import State
from ..models import Message, Worker
from ..models.workers import WorkerList, WorkerState
from ..project import conf, registry
from ..record import transitions
from ..record.sql import statements, vendor_name
from ..record.sql.holders import OLD, Holder, oldest
from ..record.sql.troubles import Trouble, trouble
from . import stats
from .lines import LimitState, Lines, longest_lines, waits_since
from .migrations import pending_migrations
from .unserved import asked, queues_without_worker, topics_without_handler
from .worker_list import list_workers

# Messages, topics and queues that one finding names.
MOST_NAMED = 5
# Lines before limits that are looked at for the oldest message.
LINES_READ = 100
# A message that waits longer for a limit is worth a warning. Seconds.
LONG_LIMITED = 3600.0
# The connections of a worker process beside those of its threads: of the consumer, the recorder and the upkeep.
OWN_CONNECTIONS = 3


class Thresholds(NamedTuple):
    """The limits beyond which a finding is critical. Ages are in seconds."""

    min_workers: int = 1
    max_overdue_age: float = 60.0
    max_dead: int | None = None
    max_limited_age: float | None = None


def check(using: str, broker: Index | None, limits: Thresholds) -> Iterator[Finding]:
    """Check the database, then Redis. A question without an answer is left out: the finding before it says why."""
    database = _database(using)
    yield database
    ready = database.level == Level.OK
    if ready:
        migrations = _migrations(using)
        yield migrations
        ready = migrations.level == Level.OK
    if broker is None:
        yield Finding("Redis", Level.OK, describe(conf.get()))
    else:
        yield from _redis(using, broker, ready=ready)
    if ready:
        yield from _record(using, limits)


def worst(findings: list[Finding]) -> Cause | None:
    """Return the greatest cause among the critical findings; None if no finding is critical."""
    return max((finding.cause for finding in findings if finding.level == Level.CRITICAL), default=None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _database(using: str) -> Finding:
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError) as error:
        cause = Cause.UNREACHABLE if trouble(error) == Trouble.AWAY else Cause.MISCONFIGURED
        return Finding("Database", Level.CRITICAL, _first_line(error), cause)
    return Finding("Database", Level.OK, f"{using}: {vendor_name(using)}")


def _migrations(using: str) -> Finding:
    pending = pending_migrations(using)
    if pending:
        detail = f"pending: {', '.join(pending)}; run migrate"
        return Finding("Migrations", Level.CRITICAL, detail, Cause.MISCONFIGURED)
    return Finding("Migrations", Level.OK, "applied")


def _redis(using: str, broker: Index, *, ready: bool) -> Iterator[Finding]:
    where = describe(conf.get())
    try:
        health = broker.server_info()
        yield Finding("Redis", Level.OK, f"{where}, version {health.version or 'unknown'}")
        yield from _server(health)
        if ready and not health.cluster:
            yield _identity(using, broker)
    except BrokerUnavailable as error:
        yield Finding("Redis", Level.CRITICAL, f"{where}: {_first_line(error)}", Cause.UNREACHABLE)


def _server(health: ServerInfo) -> Iterator[Finding]:
    unknown = "unknown: Redis does not tell"
    if health.cluster:
        detail = f"{ClusterBroker()} Until then workers find due messages by query."
        yield Finding("Redis mode", Level.CRITICAL, detail, Cause.MISCONFIGURED)
    elif health.cluster is None:
        yield Finding("Redis mode", Level.WARN, unknown)
    else:
        yield Finding("Redis mode", Level.OK, "one master, no cluster")
    if health.role in (None, "master"):
        yield Finding("Redis role", Level.OK if health.role else Level.WARN, health.role or unknown)
    else:
        detail = f"{health.role}: this Redis takes no writes; connect to the master"
        yield Finding("Redis role", Level.CRITICAL, detail)
    if health.policy is None:
        yield Finding("Redis maxmemory-policy", Level.WARN, unknown)
    elif health.policy == "noeviction":
        yield Finding("Redis maxmemory-policy", Level.OK, health.policy)
    else:
        detail = f"{health.policy}: Redis may drop waiting messages; set it to noeviction"
        yield Finding("Redis maxmemory-policy", Level.CRITICAL, detail)
    # None is needed: after a restart without it a worker loads Redis again from the record.
    persistence = "none: after a restart a worker loads Redis again" if health.persistence == "none" else None
    yield Finding("Redis persistence", Level.OK, persistence or health.persistence or unknown)


def _identity(using: str, broker: Index) -> Finding:
    try:
        restore.refuse_foreign(using, broker.read_meta())
    except ForeignBroker as error:
        return Finding("Redis identity", Level.CRITICAL, str(error), Cause.MISCONFIGURED)
    return Finding("Redis identity", Level.OK, "belongs to this database")


def _record(using: str, limits: Thresholds) -> Iterator[Finding]:
    now = transitions.now(using)
    workers = list_workers(using, now)
    alive = len(workers.of(WorkerState.ALIVE))
    level = Level.OK if alive >= limits.min_workers else Level.CRITICAL
    yield Finding("Workers", level, f"{alive} alive" + ("" if level == Level.OK else f" of {limits.min_workers}"))
    yield from _connections(using, workers)
    yield from _snapshots(using)
    paused = pausing.paused(using)
    if paused:
        since = ", ".join(
            f"{name} for {brief((now - queue.paused_at).total_seconds())}" for name, queue in paused.items()
        )
        yield Finding("Paused queues", Level.WARN, since)
    # Messages of a paused queue are meant to wait.
    yield _overdue(stats.oldest_overdue(using, now, paused), now, limits)
    if (lines := longest_lines(using, LINES_READ)).longest:
        yield _limited(lines, workers, limits)
    if topics := topics_without_handler(using, workers):
        yield Finding("Topics", Level.WARN, f"no handler for {_some(asked(topics))}")
    # Without any worker the finding "Workers" says all.
    if alive and (queues := queues_without_worker(using, workers)):
        yield Finding("Queues", Level.WARN, f"no worker serves {_some(asked(queues))}")
    with translation.override(None):
        yield from extensions.findings(using, workers)
    if limits.max_dead is not None:
        dead = stats.capped(Message.objects.using(using).filter(state=State.DEAD), limits.max_dead)
        level = Level.CRITICAL if dead.more else Level.OK
        yield Finding("Dead", level, f"more than {limits.max_dead:,}" if dead.more else str(dead))


def _connections(using: str, workers: WorkerList) -> Iterator[Finding]:
    """Compare the connections that the live workers may want, all together, with those that they may have.

    Nothing is found where the database has no such limit, and behind a pooler, which has its own.
    """
    most = statements(using).most_connections()
    if most is None:
        return
    wanted = sum(map(_wanted_connections, workers.of(WorkerState.ALIVE)))
    detail = f"the live workers may want {wanted:,} connections, and the database gives them {most:,}"
    if wanted <= most:
        yield Finding("Connections", Level.OK, detail)
    else:
        advice = "start fewer processes or threads, raise the limit, or put a pooler in between"
        yield Finding("Connections", Level.WARN, f"{detail}; {advice}")


def _snapshots(using: str) -> Iterator[Finding]:
    """Name those who hold an old snapshot, because of which no table is cleaned. Where that cannot be: nothing."""
    holders = statements(using).snapshot_holders()
    if holders is None:
        return
    if not (old := oldest(holders)):
        yield Finding("Snapshots", Level.OK, f"none is older than {brief(OLD)}")
        return
    detail = ", ".join(map(describe_holder, old))
    advice = "until it ends, the rows of messages that have left stay, and searches grow slower: end it"
    yield Finding("Snapshots", Level.WARN, f"{detail}; {advice}")


def describe_holder(holder: Holder) -> str:
    """Say who holds a snapshot, and how old it is."""
    kinds = {"transaction": "transaction of pid", "slot": "replication slot", "prepared": "prepared transaction"}
    owner = f" ({holder.owner})" if holder.owner else ""
    age = f"{holder.transactions:,} transactions" if holder.seconds is None else brief(holder.seconds)
    return f"the {kinds[holder.kind]} {holder.name}{owner} is {age} old"


def _wanted_connections(worker: Worker) -> int:
    """Return the most connections that a worker process keeps open."""
    if not worker.topics:
        # It runs no handlers.
        return OWN_CONNECTIONS
    handlers = [found for topic in worker.topics if (found := registry.find(topic)) is not None]
    # As many threads again make the sync calls of async handlers.
    kinds = 1 + any(handler.runs_on_loop for handler in handlers)
    return OWN_CONNECTIONS + kinds * worker.threads


def _overdue(oldest: list[Message], now: datetime, limits: Thresholds) -> Finding:
    """Name the oldest overdue message of each queue."""
    if not oldest:
        return Finding("Overdue", Level.OK, "none")
    level = Level.OK if (now - oldest[0].due_at).total_seconds() <= limits.max_overdue_age else Level.CRITICAL
    described = [
        f"message {message.pk} of topic {message.topic} in queue {message.queue} "
        f"for {brief((now - message.due_at).total_seconds())}"
        for message in oldest
    ]
    return Finding("Overdue", level, _some(described))


def _limited(lines: Lines, workers: WorkerList, limits: Thresholds) -> Finding:
    """Name the lines whose messages wait longest. To wait for a limit is no fault until it takes too long."""
    now = workers.at
    most = LONG_LIMITED if limits.max_limited_age is None else limits.max_limited_age
    first = sorted(lines.longest, key=lambda line: -_limited_for(line, now))
    if old := [_line(line, now) for line in first if _limited_for(line, now) > most]:
        level = Level.WARN if limits.max_limited_age is None else Level.CRITICAL
        advice = "raise the limit, make its handlers faster, or schedule less"
        return Finding("Limited", level, f"{_some(old)}; {advice}")
    if unled := [_line(line, now) for line in first if _has_no_worker(line, workers)]:
        return Finding(
            "Limited", Level.WARN, f"no live worker handles the topic, so no message goes on: {_some(unled)}"
        )
    age = brief(_limited_for(first[0], now))
    return Finding("Limited", Level.OK, f"messages wait for {lines.number} limits, the oldest for {age}")


def _limited_for(line: LimitState, now: datetime) -> float:
    return 0.0 if line.oldest is None else waits_since(line.oldest, now).total_seconds()


def _has_no_worker(line: LimitState, workers: WorkerList) -> bool:
    """Return whether the limit counts a topic that no live worker handles, though some worker is alive."""
    kind, what, _key = parts(line.name)
    alive = workers.of(WorkerState.ALIVE)
    return kind == "topic" and bool(alive) and not any(what in worker.topics for worker in alive)


def _line(line: LimitState, now: datetime) -> str:
    taken = ""
    if line.limit is not None:
        taken = f" ({line.limit})" if line.limit.count is None else f" ({line.running} of {line.limit.count} run)"
    return f"{line.waiting} wait for {line.name}{taken}, the oldest for {brief(_limited_for(line, now))}"


def _some(names: list[str]) -> str:
    """Return the first of the names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
