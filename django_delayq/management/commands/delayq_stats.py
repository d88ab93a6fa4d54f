"""``manage.py delayq_stats``: how much there is, and how late."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.durations import brief
from django_delayq.inspector import stats
from django_delayq.inspector.stats import Capped, QueueStats, RedisStats, Stats
from django_delayq.management import _common as common


class Command(common.DelayqCommand):
    help = (
        "Show how many messages are in which state, what is overdue, how late the last ones were, the workers and "
        f"Redis. Fast on a table of any size: of the finished messages the last {stats.FINISHED_CAP:,} are counted, "
        "and a + behind a number means at least. Works while Redis is away."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        broker = common.redis_broker(using)
        try:
            found = stats.collect(using, broker)
        finally:
            if broker is not None:
                broker.close()
        if options["json"]:
            self.say_json(database=using, **_plain(found))
        else:
            self._say(found)

    def _say(self, found: Stats) -> None:
        estimate = "" if found.estimate is None else f" (≈ {found.estimate:,} rows)"
        self.say(f"Messages{estimate}")
        for state, number in found.states.items():
            self.say(f"  {state.value:<10} {number!s:>12}")
        oldest, due = found.oldest_overdue, found.next_due
        age = "" if oldest is None else f", the oldest for {brief((found.at - oldest).total_seconds())}"
        self.say(f"Overdue      {found.overdue}{age}")
        self.say(f"Next due     {'none' if due is None else 'in ' + brief((due - found.at).total_seconds())}")
        late = found.lateness
        if late.p50 is not None and late.p95 is not None:
            self.say(f"Lateness     p50 {brief(late.p50)}, p95 {brief(late.p95)} (last {late.of:,})")
        else:
            self.say("Lateness     nothing was delivered yet")
        self.say(f"Workers      {found.workers} alive")
        self.say(f"Redis        {_redis_line(found.redis)}")
        for name, queue in found.queues.items():
            self.say(f"  {name}: {_queue_line(found, queue)}")


def _redis_line(redis: RedisStats) -> str:
    if redis.reachable is None:
        return redis.where
    if not redis.reachable or redis.health is None:
        return f"{redis.where}: does not answer ({redis.error})"
    health = redis.health
    memory = "?" if health.memory is None else f"{health.memory / 2**20:.1f} MiB"
    return f"{redis.where}, version {health.version or '?'}, {memory}, {health.policy or '?'}"


def _queue_line(found: Stats, queue: QueueStats) -> str:
    parts = [f"{queue.scheduled} scheduled", f"{queue.overdue} overdue"]
    if queue.delayed is not None:
        parts += [f"{queue.delayed:,} delayed", f"{queue.ready:,} ready"]
        ahead = None if queue.horizon is None else (queue.horizon - found.at).total_seconds()
        parts.append("not loaded" if ahead is None else f"loaded for {brief(ahead)}")
    return ", ".join(parts)


def _number(number: Capped) -> dict[str, Any]:
    return {"count": number.count, "exact": not number.more}


def _plain(found: Stats) -> dict[str, Any]:
    health = found.redis.health
    return {
        "at": common.iso(found.at),
        "states": {state.value: _number(number) for state, number in found.states.items()},
        "estimated_rows": found.estimate,
        "overdue": _number(found.overdue),
        "oldest_overdue": common.iso(found.oldest_overdue),
        "next_due": common.iso(found.next_due),
        "lateness": {"of": found.lateness.of, "p50": found.lateness.p50, "p95": found.lateness.p95},
        "workers": found.workers,
        "redis": {
            "where": found.redis.where,
            "reachable": found.redis.reachable,
            "error": found.redis.error or None,
            "version": health.version if health else None,
            "memory_bytes": health.memory if health else None,
            "maxmemory_policy": health.policy if health else None,
        },
        "queues": {
            name: {
                "scheduled": _number(queue.scheduled),
                "overdue": _number(queue.overdue),
                "oldest_overdue": common.iso(queue.oldest_overdue),
                "next_due": common.iso(queue.next_due),
                "delayed": queue.delayed,
                "ready": queue.ready,
                "horizon": common.iso(queue.horizon),
            }
            for name, queue in found.queues.items()
        },
    }
