"""``manage.py delayq_stats``: show how many messages there are, and how late they start."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from django.core.management.base import CommandParser

from ... import extensions
from ...api import limiting, pausing
from ...core.durations import brief
from ...extensions import StatisticsSection
from ...inspector import stats
from ...inspector.numbers import CAPS
from ...inspector.stats import Lateness, LimitState, QueueInRedis, QueueSnapshot, RedisStats, Stats, limit_facts
from ...models import Queue
from ...models.workers import WorkerState, state_of
from ...record.sql.sessions import without_jit
from .. import _common as common

# The workers, and the longest lines before limits, that the text shows; --json shows all.
SHOWN = 8


class Command(common.DelayqCommand):
    help = (
        "Show how many messages are in each state, how many are overdue, which queues are paused, when the next one "
        "falls due, how late messages start, the workers and Redis. The command is fast on a table of any size: only "
        f"the last {CAPS.rows:,} finished messages are counted, and a + after a number means that there are "
        "more. It works while Redis is away."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        with common.broker_if_any(using) as broker:
            found = stats.collect(using, broker)
        with without_jit(using):
            sections = extensions.statistics(using, found.at)
        if options["json"]:
            self.say_json(**_plain(using, found, sections))
        else:
            self.say("\n".join(_lines(found, sections)))


def _lines(found: Stats, sections: list[StatisticsSection]) -> Iterator[str]:
    estimate = "" if found.estimate is None else f" (about {found.estimate:,} rows)"
    yield f"Messages{estimate}"
    for state, number in found.states.items():
        yield f"  {state.value:<10} {number!s:>12}"
    oldest, due = found.snapshot.oldest_overdue, found.snapshot.next_due
    age = "" if oldest is None else f", the oldest for {brief((found.at - oldest).total_seconds())}"
    yield f"Overdue      {found.snapshot.overdue}{age}"
    yield from _paused(found)
    yield f"Next due     {'none' if due is None else 'in ' + brief((due - found.at).total_seconds())}"
    yield f"Lateness     {_lateness(found.lateness)}"
    yield from _limits(found)
    for section in sections:
        yield from section.lines()
    yield f"Workers      {_alive(found)} alive"
    yield from _workers(found)
    yield f"Redis        {_redis_line(found.redis)}"
    for name, queue in found.snapshot.queues.items():
        paused = "paused, " if name in found.paused else ""
        yield f"  {name}: {paused}{_queue_line(found.at, queue, found.in_redis.get(name))}"


def _lateness(late: Lateness) -> str:
    if late.p50 is None or late.p95 is None:
        return "nothing was delivered yet"
    return f"p50 {brief(late.p50)}, p95 {brief(late.p95)} (of the last {late.of:,} finished)"


def _paused(found: Stats) -> Iterator[str]:
    """Yield the paused queues. Nothing while none is paused."""
    if found.paused:
        number = f"{len(found.paused)} queue{'' if len(found.paused) == 1 else 's'}"
        yield f"Paused       {number}, in which {found.snapshot.held} due messages wait"
    for name, pause in found.paused.items():
        yield f"  {name}: {found.snapshot.queues[name].held} due, paused {pausing.described(pause)}"


def _limits(found: Stats) -> Iterator[str]:
    """Yield the overrides, then the longest lines. Nothing while there are none."""
    for name, row in found.overrides.items():
        yield f"Override     {name}: {limiting.described(row)}"
    if not found.lines.longest:
        return
    age = brief(found.lines.oldest[0].waited(found.at))
    yield f"Limited      {found.snapshot.limited} before {found.lines.number} limits, the oldest for {age}"
    for line in found.lines.longest[:SHOWN]:
        yield f"  {line.name}: {_limit_line(line, found.at)}"


def _limit_line(line: LimitState, now: datetime) -> str:
    said = [f"{line.waiting} waiting", f"{line.running} running"]
    if line.limit is not None:
        said.append(f"limit {line.limit}")
    elif line.is_known:
        said.append("the code has this limit no more")
    if line.slot is not None:
        said.append(f"next slot in {brief((line.slot - now).total_seconds())}")
    return ", ".join(said)


def _alive(found: Stats) -> int:
    return len(found.workers.of(WorkerState.ALIVE))


def _workers(found: Stats) -> Iterator[str]:
    rows = found.workers.workers
    for worker in rows[:SHOWN]:
        seen = brief(max(0.0, (found.at - worker.seen_at).total_seconds()))
        state = state_of(worker, found.at).value
        yield f"  {state:<6} {worker.name}  {', '.join(map(str, worker.queues))}  last heartbeat {seen} ago"
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} more"


def _redis_line(redis: RedisStats) -> str:
    if redis.error is not None:
        how = "refuses" if redis.refuses else "does not answer"
        return f"{redis.where}: {redis.error if redis.reachable else f'{how} ({redis.error})'}"
    if (health := redis.health) is None:
        return redis.where
    memory = "?" if health.memory is None else f"{health.memory / 2**20:.1f} MiB"
    line = f"{redis.where}, version {health.version or '?'}, {memory}, {health.policy or '?'}"
    if (found := health.hash_slot) is None:
        return line
    return f"{line}, hash slot {found.number} at {found.owner or '?'}, replicas: {', '.join(found.replicas) or 'none'}"


def _queue_line(now: datetime, queue: QueueSnapshot, in_redis: QueueInRedis | None) -> str:
    parts = [f"{queue.scheduled} scheduled", f"{queue.overdue} overdue"]
    parts += [f"{queue.limited} limited"] if queue.limited.count else []
    if in_redis is not None:
        parts += [f"{in_redis.delayed:,} delayed", f"{in_redis.ready:,} ready"]
        ahead = None if in_redis.horizon is None else (in_redis.horizon - now).total_seconds()
        if ahead is not None and ahead < 0:
            parts.append(f"loaded until {brief(-ahead)} ago")
        else:
            parts.append("not loaded" if ahead is None else f"loaded for what is due in the next {brief(ahead)}")
    return ", ".join(parts)


def _plain(using: str, found: Stats, sections: list[StatisticsSection]) -> dict[str, Any]:
    return {
        "database": using,
        "at": found.at,
        "states": found.states,
        "estimated_rows": found.estimate,
        **{name: getattr(found.snapshot, name) for name in ("overdue", "oldest_overdue", "held", "next_due")},
        "paused": [*found.paused],
        "overrides": [limiting.facts(row) for row in found.overrides.values()],
        "limits": [_plain_limit(line) for line in found.lines.longest],
        "lateness": found.lateness._asdict(),
        **{name: fact for section in sections for name, fact in section.facts().items()},
        "workers": _alive(found),
        "worker_list": [
            {
                **{name: getattr(worker, name) for name in ("name", "host", "pid", "queues", "threads")},
                "state": state_of(worker, found.at),
                "started_at": worker.started_at,
                "seen_at": worker.seen_at,
            }
            for worker in found.workers.workers
        ],
        "topics": {topic: due._asdict() for topic, due in islice(found.topics.items(), CAPS.lines)},
        "redis": _plain_redis(found.redis),
        "queues": {
            name: {
                **_plain_queue(queue, found.in_redis.get(name), found.paused.get(name)),
                "coming": {
                    within: {**coming.number.as_json(), "seconds": coming.seconds and round(coming.seconds, 3)}
                    for within, coming in found.coming[name].items()
                },
            }
            for name, queue in found.snapshot.queues.items()
        },
    }


def _plain_redis(redis: RedisStats) -> dict[str, Any]:
    health = redis.health
    return {
        "where": redis.where,
        "reachable": redis.reachable,
        "error": redis.error,
        "version": health.version if health else None,
        "memory_bytes": health.memory if health else None,
        "maxmemory_policy": health.policy if health else None,
        # Of a Redis Cluster only.
        **({"cluster": health.hash_slot._asdict()} if health and health.hash_slot else {}),
    }


def _plain_limit(line: LimitState) -> dict[str, Any]:
    return {
        "name": line.name,
        "waiting": line.waiting,
        "oldest": line.oldest,
        "running": line.running,
        "limit": limit_facts(line.limit),
        "next_slot": line.slot,
    }


def _plain_queue(queue: QueueSnapshot, in_redis: QueueInRedis | None, pause: Queue | None) -> dict[str, Any]:
    names = ("scheduled", "limited", "overdue", "oldest_overdue", "next_due", "held")
    there = QueueInRedis(None, None, None) if in_redis is None else in_redis
    facts = {name: getattr(queue, name) for name in names} | there._asdict() | {"paused": None}
    if pause is not None:
        times = {"since": pause.paused_at, "until": pause.resumes_at}
        facts["paused"] = {**times, "by": pause.paused_by, "reason": pause.reason}
    return facts
