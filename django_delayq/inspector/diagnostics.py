"""Checks whether the database, Redis and the workers do their work: one finding per question.

``delayq_check`` asks all questions. The pages of the console call the ``of_`` functions with what they know already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import DatabaseError, InterfaceError, connections
from django.utils import translation
from django.utils.translation import gettext as _

from .. import extensions
from ..api import limiting, pausing
from ..broker import RedisBroker, describe
from ..broker.base import FAR_AWAY, HashSlot, ServerInfo
from ..core.clock import SECOND
from ..core.durations import brief
from ..core.exceptions import BrokerUnavailable, ClusterBroker, ForeignBroker
from ..core.findings import Cause, Finding, Level
from ..core.known_record import clocks_differ
from ..core.limits import Limit, parts
from ..core.states import State
from ..models import Message, Worker
from ..models.workers import WorkerList, WorkerState
from ..project import conf, registry
from ..record import reads
from ..record.sql import statements, vendor_name
from ..record.sql.holders import OLD, Holder, oldest
from ..record.sql.troubles import Trouble, trouble
from ..restore.horizon import is_filled, refuse_foreign
from . import stats
from .migrations import own_tables, pending_migrations
from .numbers import AGES, CAPS, Caps, total
from .stats import LimitState, Lines, longest_lines
from .worker_list import asked, list_workers, queues_without_worker, topics_without_handler

# The connections of a worker process besides those of its handler threads: for consumer, recorder and upkeep.
OWN_CONNECTIONS = 3


class Thresholds(NamedTuple):
    """The limits beyond which a finding is critical. Ages are in seconds."""

    min_workers: int = 1
    max_overdue_age: float = 60.0
    max_dead: int | None = None
    max_limited_age: float | None = None


def check(using: str, broker: RedisBroker | None, limits: Thresholds, caps: Caps = CAPS) -> list[Finding]:
    """Check the database, then Redis. A question without an answer is left out: the finding before it says why.

    For monitors, so the words are not translated.
    """
    with translation.override(None):
        return [*_check(using, broker, limits, caps)]


def _check(using: str, broker: RedisBroker | None, limits: Thresholds, caps: Caps) -> Iterator[Finding]:
    database = _database(using)
    yield database
    ready = database.level == Level.OK
    if ready:
        migrations = of_migrations(pending_migrations(using))
        yield migrations
        yield from of_row_security(hidden_rows(using))
        ready = migrations.level == Level.OK
    if broker is None:
        yield Finding("Redis", Level.OK, describe(conf.get()))
    else:
        yield from _redis(using, broker, ready=ready)
    if ready:
        yield from _record(using, limits, caps)


def worst(findings: list[Finding]) -> Cause | None:
    """Return the greatest cause among the critical findings; None if no finding is critical."""
    return max((finding.cause for finding in findings if finding.level == Level.CRITICAL), default=None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _database(using: str) -> Finding:
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
        if not statements(using).takes_writes():
            advice = "connect to the primary: here nothing is delivered or scheduled"
            return Finding("Database", Level.CRITICAL, f"{using}: {vendor_name(using)}, takes no writes", advice=advice)
    except (DatabaseError, InterfaceError) as error:
        cause = Cause.UNREACHABLE if trouble(error) == Trouble.AWAY else Cause.MISCONFIGURED
        return Finding("Database", Level.CRITICAL, _first_line(error), cause)
    return of_database(using)


def of_database(using: str) -> Finding:
    """Name a database that answers."""
    return Finding(_("Database"), Level.OK, f"{using}: {vendor_name(using)}")


def of_migrations(pending: Sequence[str]) -> Finding:
    """Name the migrations that are not applied."""
    if not pending:
        return Finding(_("Migrations"), Level.OK, _("all applied"))
    detail = _("pending: %(names)s") % {"names": ", ".join(pending)}
    return Finding(_("Migrations"), Level.CRITICAL, detail, Cause.MISCONFIGURED, _("run migrate"))


# Tables whose rows policies may hide: each with the role, and whether any policy shows rows.
HiddenRows = list[tuple[str, str, bool]]


def hidden_rows(using: str) -> HiddenRows:
    """Return the tables of the queue whose rows the database may hide from the role of this process."""
    return statements(using).row_security(own_tables())


def of_row_security(hidden: HiddenRows) -> Iterator[Finding]:
    """Name the tables whose rows are hidden. Nothing fails then: the queue only looks empty."""
    if not hidden:
        return
    name, advice = _("Row security"), _("give the role BYPASSRLS, or a policy for all rows")
    if unseen := [table for table, _role, shows in hidden if not shows]:
        detail = _("%(tables)s: all rows are hidden from the role %(role)s")
        detail %= {"tables": _some(unseen), "role": hidden[0][1]}
        yield Finding(name, Level.CRITICAL, detail, Cause.MISCONFIGURED, advice)
    else:
        detail = _("%(tables)s: rows may be hidden from the role %(role)s")
        detail %= {"tables": _some([table for table, _role, _shows in hidden]), "role": hidden[0][1]}
        yield Finding(name, Level.WARN, detail, advice=advice)


def _redis(using: str, broker: RedisBroker, *, ready: bool) -> Iterator[Finding]:
    where = describe(conf.get())
    try:
        health = broker.server_info()
        yield Finding("Redis", Level.OK, f"{where}, version {health.version or 'unknown'}")
        yield from of_server(health)
        if ready and not _is_unusable(health):
            yield from _keys(using, broker)
    except BrokerUnavailable as error:
        yield Finding("Redis", Level.CRITICAL, f"{where}: {_first_line(error)}", Cause.UNREACHABLE)


def of_server(health: ServerInfo) -> Iterator[Finding]:
    """Say whether a Redis that answers may keep ids of messages."""
    unknown = _("unknown: Redis does not tell")
    mode, role, policy = _("Redis mode"), _("Redis role"), _("Redis maxmemory-policy")
    if _is_unusable(health):
        advice = _("until it is replaced, workers find due messages by query")
        yield Finding(mode, Level.CRITICAL, str(ClusterBroker()).rstrip("."), Cause.MISCONFIGURED, advice)
    elif health.hash_slot is not None:
        yield from of_hash_slot(health.hash_slot)
    elif health.cluster is None:
        yield Finding(mode, Level.WARN, unknown)
    else:
        yield Finding(mode, Level.OK, _("one master, no cluster"))
    if health.role in (None, "master"):
        yield Finding(role, Level.OK if health.role else Level.WARN, health.role or unknown)
    else:
        yield Finding(role, Level.CRITICAL, health.role, advice=_("this Redis takes no writes: connect to the master"))
    if health.refusal and health.role == "master" and not _is_unusable(health):
        advice = _("until it takes them, workers find due messages by query")
        yield Finding(_("Redis writes"), Level.CRITICAL, health.refusal, advice=advice)
    if health.policy in (None, "noeviction"):
        yield Finding(policy, Level.OK if health.policy else Level.WARN, health.policy or unknown)
    elif health.policy.startswith("volatile"):
        advice = _("Redis may drop wake-ups, and messages then start late: set it to noeviction")
        yield Finding(policy, Level.WARN, health.policy, advice=advice)
    else:
        advice = _("Redis may drop waiting messages: set it to noeviction")
        yield Finding(policy, Level.CRITICAL, health.policy, advice=advice)
    # Redis need not write to disk: after a restart a worker loads it again from the record.
    needless = _("not needed: after a restart a worker loads Redis again") if health.persistence == "none" else ""
    yield Finding(_("Redis persistence"), Level.OK, health.persistence or unknown, advice=needless)


def _is_unusable(health: ServerInfo) -> bool:
    """Return whether Redis is one node of a cluster, and the settings do not lead to the other nodes."""
    return bool(health.cluster) and health.hash_slot is None


def of_hash_slot(found: HashSlot) -> Iterator[Finding]:
    """Say where the ids are in a Redis Cluster."""
    detail = _("cluster, hash slot %(slot)s at %(owner)s, replicas: %(replicas)s")
    detail %= {"slot": found.number, "owner": found.owner or "?", "replicas": ", ".join(found.replicas) or _("none")}
    yield Finding(_("Redis mode"), Level.OK, detail)
    if found.seeds == 1:
        advice = _("name several, as in redis+cluster://host:port,host:port: a process that starts may not find it")
        yield Finding(_("Redis nodes"), Level.WARN, _("DELAYQ['REDIS'] names one node of the cluster"), advice=advice)


def _keys(using: str, broker: RedisBroker) -> Iterator[Finding]:
    meta = broker.read_meta()
    try:
        refuse_foreign(using, meta)
    except ForeignBroker as error:
        yield of_identity(error)
        return
    yield of_identity(None)
    if meta.round_trip > FAR_AWAY and (trip := broker.round_trip()) > FAR_AWAY:
        advice = "workers deliver by query as long as it is; name a nearer Redis, or set REDIS to None"
        yield Finding("Redis distance", Level.WARN, f"a round trip takes {trip * 1000:.0f} ms", advice=advice)
    scheduled = Message.objects.using(using).filter(state=State.SCHEDULED)
    swept = (meta.now_tenths - meta.swept_tenths) / SECOND
    if not is_filled(meta, broker.server()):
        if scheduled.exists() or stats.alive(using, reads.now(using)):
            advice = "compare REDIS and PREFIX here with those of the workers"
            yield Finding("Redis contents", Level.WARN, "no worker fills it", advice=advice)
    elif swept < AGES.swept:
        advice = "compare REDIS and PREFIX of the processes that schedule with those here"
        detail = f"{brief(max(0.0, swept))} ago the sweep put messages that nobody had put here"
        yield Finding("Redis contents", Level.WARN, detail, advice=advice)


def of_identity(error: ForeignBroker | None) -> Finding:
    """Say whether this database may use a Redis."""
    if error is not None:
        return Finding(_("Redis identity"), Level.CRITICAL, str(error), Cause.MISCONFIGURED)
    return Finding(_("Redis identity"), Level.OK, _("belongs to this database"))


def _record(using: str, limits: Thresholds, caps: Caps) -> Iterator[Finding]:
    now = reads.now(using)
    workers = list_workers(using, now)
    alive = len(workers.of(WorkerState.ALIVE))
    level = Level.OK if alive >= limits.min_workers else Level.CRITICAL
    yield Finding("Workers", level, f"{alive} alive" + ("" if level == Level.OK else f" of {limits.min_workers}"))
    yield from _connections(using, workers)
    if off := clocks_differ(using):
        advice = "set the clocks right by NTP: a producer whose clock is slow has messages start late"
        yield Finding("Clock", Level.WARN, off, advice=advice)
    if (holders := statements(using).snapshot_holders()) is not None:
        yield of_snapshots(holders)
    paused = pausing.paused(using)
    if paused:
        since = ", ".join(
            f"{name} for {brief((now - queue.paused_at).total_seconds())}" for name, queue in paused.items()
        )
        yield Finding("Paused queues", Level.WARN, since)
    if overridden := limiting.in_force(using):
        some = [f"{name} ({limiting.described(row)})" for name, row in overridden.items()]
        yield Finding("Overridden limits", Level.WARN, _some(some))
    # Messages of a paused queue are meant to wait.
    yield _overdue(stats.oldest_overdue(using, now, paused), now, limits)
    if conf.get().PULL_QUEUES is not None:
        yield _pulled(stats.oldest_pulled(using, now), now)
    if (lines := longest_lines(using, caps.lines, caps)).oldest:
        yield of_limited(lines, workers, limits)
    if topics := topics_without_handler(using, workers):
        yield Finding("Topics", Level.WARN, f"no handler for {_some(asked(topics))}")
    # Without any worker the finding "Workers" says all.
    if alive and (queues := queues_without_worker(using, workers)):
        yield Finding("Queues", Level.WARN, f"no worker serves {_some(asked(queues))}")
    yield from extensions.findings(using, workers)
    if limits.max_dead is not None:
        dead = stats.count_capped(Message.objects.using(using).filter(state=State.DEAD), limits.max_dead)
        level = Level.CRITICAL if dead.more else Level.OK
        yield Finding("Dead", level, f"more than {limits.max_dead:,}" if dead.more else str(dead))


def _connections(using: str, workers: WorkerList) -> Iterator[Finding]:
    """Compare the connections that all live workers may want with those that the database gives them.

    There is no finding without such a limit. Nobody can ask a pooler how many server connections it opens: the finding
    says how many it needs.
    """
    found = statements(using).most_connections()
    if found is None:
        return
    most, is_pooled = found
    alive = workers.of(WorkerState.ALIVE)
    if is_pooled:
        wanted = sum(map(_wanted_transactions, alive))
        detail = f"the live workers may have {wanted:,} transactions at once; their pooler needs as many connections"
        detail += f" to the database, which gives it {most:,}"
    else:
        wanted = sum(map(_wanted_connections, alive))
        detail = f"the live workers may want {wanted:,} connections, and the database gives them {most:,}"
    if wanted <= most:
        yield Finding("Connections", Level.OK, detail)
    else:
        advice = "start fewer processes or threads, or raise the limit"
        if not is_pooled:
            advice = "start fewer processes or threads, raise the limit, or put a pooler in between"
        yield Finding("Connections", Level.WARN, detail, advice=advice)


def of_snapshots(holders: list[Holder]) -> Finding:
    """Name the holders of old snapshots, which keep the database from cleaning its tables."""
    name = _("Snapshots")
    if not (old := oldest(holders)):
        return Finding(name, Level.OK, _("none is older than %(age)s") % {"age": brief(OLD.seconds)})
    advice = _("until it ends, the rows of messages that have left stay, and searches grow slower: end it")
    return Finding(name, Level.WARN, ", ".join(map(describe_holder, old)), advice=advice)


def describe_holder(holder: Holder) -> str:
    """Name the holder of a snapshot, and its age."""
    text = {
        "transaction": _("the transaction of pid %(name)s is %(age)s old"),
        "slot": _("the replication slot %(name)s is %(age)s old"),
        "prepared": _("the prepared transaction %(name)s is %(age)s old"),
    }[holder.kind]
    name = f"{holder.name} ({holder.owner})" if holder.owner else holder.name
    by_number = _("%(number)s transactions") % {"number": f"{holder.transactions:,}"}
    return text % {"name": name, "age": by_number if holder.seconds is None else brief(holder.seconds)}


def _wanted_connections(worker: Worker) -> int:
    """Return the most connections that a worker process keeps open."""
    if not worker.topics:
        # A worker without topics runs no handlers.
        return OWN_CONNECTIONS
    # As many threads again make the sync calls of async handlers.
    kinds = 1 + any(handler.runs_on_loop for handler in _handlers(worker))
    return OWN_CONNECTIONS + kinds * worker.threads


def _wanted_transactions(worker: Worker) -> int:
    """Return the most transactions that a worker process may have open at once, besides brief ones of its handlers."""
    keeps_open = any(handler.transactional for handler in _handlers(worker))
    return OWN_CONNECTIONS + (worker.threads if keeps_open else 0)


def _handlers(worker: Worker) -> Iterator[registry.Handler]:
    return (found for topic in worker.topics if (found := registry.find(topic)) is not None)


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


def _pulled(oldest: list[Message], now: datetime) -> Finding:
    """Name the pulled queues in which messages are due. That they wait there is no fault of a worker."""
    due = [f"{message.queue}, the oldest for {brief((now - message.due_at).total_seconds())}" for message in oldest]
    return Finding("Pulled queues", Level.OK, f"messages wait in {_some(due)}" if due else "no message is due")


def of_limited(lines: Lines, workers: WorkerList, limits: Thresholds) -> Finding:
    """Name the lines whose messages wait longest. To wait for a limit is no fault until it takes too long."""
    now, name = workers.at, _("Limited")
    most = AGES.limited if limits.max_limited_age is None else limits.max_limited_age
    if old := [line for line in lines.oldest if line.waited(now) > most]:
        level = Level.WARN if limits.max_limited_age is None else Level.CRITICAL
        advice = _("raise the limit, make its handlers faster, or schedule less")
        return Finding(name, level, _some(_by_topic(old, now)), advice=advice, link="limits")
    if unled := [_line(line, now) for line in lines.oldest if _has_no_worker(line, workers)]:
        advice = _("no live worker handles the topic, so no message goes on")
        return Finding(name, Level.WARN, _some(unled), advice=advice, link="limits")
    values = {"number": lines.number, "age": brief(lines.oldest[0].waited(now))}
    return Finding(name, Level.OK, _("messages wait for %(number)s limits, the oldest for %(age)s") % values)


def _by_topic(lines: Sequence[LimitState], now: datetime) -> list[str]:
    """Describe lines, all keys of one limit together."""
    found: dict[tuple[str, bool], list[LimitState]] = {}
    for line in lines:
        kind, what, key = parts(line.name)
        found.setdefault((f"{kind} {what}", key is None), []).append(line)
    text = _("%(count)s wait for %(limit)s (%(keys)d keys), the oldest for %(age)s")
    return [
        _line(some[0], now)
        if len(some) == 1
        else text
        % {
            "count": total(line.waiting for line in some),
            "limit": name,
            "keys": len(some),
            "age": brief(max(line.waited(now) for line in some)),
        }
        for (name, _is_alone), some in found.items()
    ]


def _has_no_worker(line: LimitState, workers: WorkerList) -> bool:
    """Tell whether workers are alive and none of them handles the topic of the limit."""
    kind, what, _key = parts(line.name)
    alive = workers.of(WorkerState.ALIVE)
    return kind == "topic" and bool(alive) and not any(what in worker.topics for worker in alive)


def rate_text(limit: Limit) -> str:
    """Return the rate of a limit as people declare it, e.g. "2 a second, burst 5"; empty without a rate."""
    if limit.interval is None:
        return ""
    rate = _("one in %(span)s") % {"span": brief(limit.interval.total_seconds())}
    for unit, text in _rates():
        number = unit / limit.interval
        # The interval is rounded to microseconds.
        if number > 1.5 and abs(number - round(number)) < number / 1000:
            rate = text % {"number": f"{round(number):,}"}
            break
    return _("%(rate)s, burst %(burst)d") % {"rate": rate, "burst": limit.burst} if limit.burst > 1 else rate


def _rates() -> list[tuple[timedelta, str]]:
    return [
        (timedelta(seconds=1), _("%(number)s a second")),
        (timedelta(minutes=1), _("%(number)s a minute")),
        (timedelta(hours=1), _("%(number)s an hour")),
        (timedelta(days=1), _("%(number)s a day")),
    ]


def _line(line: LimitState, now: datetime) -> str:
    text = _("%(count)s wait for %(limit)s, the oldest for %(age)s")
    values = {"count": line.waiting, "limit": line.name, "age": brief(line.waited(now))}
    if line.limit is not None:
        text = _("%(count)s wait for %(limit)s (%(use)s), the oldest for %(age)s")
        values["use"] = rate_text(line.limit)
        if line.limit.count is not None:
            values["use"] = _("%(running)d of %(most)d run") % {"running": line.running, "most": line.limit.count}
    return text % values


def _some(names: list[str]) -> str:
    """Return the first of the names, and how many more there are."""
    shown, more = ", ".join(names[: CAPS.named]), len(names) - CAPS.named
    return _("%(names)s and %(more)s more") % {"names": shown, "more": f"{more:,}"} if more > 0 else shown
