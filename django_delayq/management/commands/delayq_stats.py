"""``manage.py delayq_stats``: how much there is, and how late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils import timezone

from django_delayq.broker.redis import RedisBroker
from django_delayq.durations import brief
from django_delayq.inspector import presence, pulse, stats
from django_delayq.inspector.numbers import Capped, total
from django_delayq.inspector.stats import QueueStats, RedisStats, Stats
from django_delayq.inspector.throughput import Tally
from django_delayq.management import _common as common
from django_delayq.management._watch import Screen

# Full minutes that throughput is told for.
SPANS = (1, 15, 60)
# Bars of the coming hour, and their length at most.
BARS = 12
WIDTH = 40
WORKERS = 8


class Command(common.DelayqCommand):
    help = (
        "Show how many messages are in which state, what is overdue, what falls due next, how many were delivered and "
        "how late, the workers and Redis. Fast on a table of any size: of the finished messages the last "
        f"{stats.FINISHED_CAP:,} are counted, and a + behind a number means at least. Works while Redis is away."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        common.add_json(parser)
        parser.add_argument(
            "--watch",
            nargs="?",
            const=2.0,
            type=_interval,
            metavar="SECONDS",
            help="again and again, by default every 2 s, until q or Ctrl-C; with --json one object per line",
        )

    def work(self, using: str, options: dict[str, Any]) -> None:
        broker = common.redis_broker(using)
        try:
            if options["watch"] is None:
                found = stats.collect(using, broker)
                if options["json"]:
                    self.say_json(**_plain(using, found))
                else:
                    self.say("\n".join(_lines(found)))
            else:
                self._watch(using, broker, options["watch"], as_json=options["json"])
        finally:
            if broker is not None:
                broker.close()

    def _watch(self, using: str, broker: RedisBroker | None, seconds: float, *, as_json: bool) -> None:
        screen = Screen(self.stdout)
        with common.Interruptible() as interruption, screen.open():
            while True:
                if as_json:
                    self.say_json(**_plain(using, stats.collect(using, broker, pulse.CAP)))
                    self.stdout.flush()
                else:
                    screen.show(self._block(using, broker, seconds))
                if screen.wait(seconds, interruption.asked):
                    return

    def _block(self, using: str, broker: RedisBroker | None, seconds: float) -> list[str]:
        try:
            with common.outside_world():
                found = stats.collect(using, broker, pulse.CAP)
        except CommandError as error:
            # It may answer again: those who watch want to see that.
            connections[using].close()
            return [f"{timezone.localtime():%H:%M:%S}  {error}"]
        head = f"{timezone.localtime(found.at):%Y-%m-%d %H:%M:%S}  database {using}, every {brief(seconds)}; q ends it"
        return [head, "", *_lines(found)]


def _interval(text: str) -> float:
    return max(0.1, common.span(text))


def _lines(found: Stats) -> Iterator[str]:
    estimate = "" if found.estimate is None else f" (≈ {found.estimate:,} rows)"
    yield f"Messages{estimate}"
    for state, number in found.states.items():
        yield f"  {state.value:<10} {number!s:>12}"
    oldest, due = found.oldest_overdue, found.next_due
    age = "" if oldest is None else f", the oldest for {brief((found.at - oldest).total_seconds())}"
    yield f"Overdue      {found.overdue}{age}"
    yield f"Next due     {'none' if due is None else 'in ' + brief((due - found.at).total_seconds())}"
    yield from _coming(found)
    yield from _past(found)
    yield f"Workers      {found.workers} alive"
    yield from _workers(found)
    yield f"Redis        {_redis_line(found.redis)}"
    for name, queue in found.queues.items():
        yield f"  {name}: {_queue_line(found, queue)}"


def _coming(found: Stats) -> Iterator[str]:
    """Five minutes a line."""
    bars = found.upcoming.bars
    size = len(bars) // BARS
    groups = [bars[start : start + size] for start in range(0, len(bars), size)]
    numbers = [total(bar.number for bar in group) for group in groups]
    highest = max(number.count for number in numbers)
    if not highest:
        yield "Coming hour  nothing falls due"
        return
    yield f"Coming hour  {total(numbers)}"
    for group, number in zip(groups, numbers, strict=True):
        if group[0].start is not None:
            bar = "█" * math.ceil(number.count / highest * WIDTH)
            yield f"  {timezone.localtime(group[0].start):%H:%M}  {bar:<{WIDTH}} {number}"


def _past(found: Stats) -> Iterator[str]:
    hour = found.past["hour"]
    parts = [f"{brief(minutes * 60)}: {hour.last(minutes).consumed:,}" for minutes in SPANS]
    day = found.past["day"].sum
    yield f"Consumed     {', '.join(parts)}, 24 h: {day.consumed:,}"
    ended = hour.last(60)
    yield f"In 60 m      {ended.retried:,} retried, {ended.dead:,} dead, {ended.expired:,} expired"
    late = found.lateness
    if late.p50 is not None and late.p95 is not None:
        yield f"Lateness     p50 {brief(late.p50)}, p95 {brief(late.p95)} (last {late.of:,})"
    else:
        yield "Lateness     nothing was delivered yet"
    if ended.started:
        yield f"  in 60 m    p50 {_bound(ended, 50)}, p95 {_bound(ended, 95)} (of {ended.started:,})"


def _bound(tally: Tally, percent: int) -> str:
    bound = tally.lateness(percent)
    if bound is None:
        return "–"
    return "over 10 m" if math.isinf(bound) else f"≤ {brief(bound)}"


def _workers(found: Stats) -> Iterator[str]:
    there = found.presence
    for worker in there.workers[:WORKERS]:
        seen = brief(max(0.0, (there.at - worker.seen_at).total_seconds()))
        state = presence.health(worker, there.at).value
        yield f"  {state:<6} {worker.name}  {', '.join(map(str, worker.queues))}  seen {seen} ago"
    if len(there.workers) > WORKERS:
        yield f"  and {len(there.workers) - WORKERS} more"


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
    return {"count": number.count, "exact": not number.more and not number.about}


def _ended(tally: Tally) -> dict[str, Any]:
    late = {f"p{percent}": _finite(tally.lateness(percent)) for percent in (50, 95)}
    return {
        "consumed": tally.consumed,
        "retried": tally.retried,
        "dead": tally.dead,
        "expired": tally.expired,
        # Upper bounds in seconds; null: none were delivered, or they were later than the last bound.
        "lateness": {"of": tally.started, **late},
    }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _plain(using: str, found: Stats) -> dict[str, Any]:
    health, hour = found.redis.health, found.past["hour"]
    return {
        "database": using,
        "at": common.iso(found.at),
        "states": {state.value: _number(number) for state, number in found.states.items()},
        "estimated_rows": found.estimate,
        "overdue": _number(found.overdue),
        "oldest_overdue": common.iso(found.oldest_overdue),
        "next_due": common.iso(found.next_due),
        "lateness": {"of": found.lateness.of, "p50": found.lateness.p50, "p95": found.lateness.p95},
        # Of full minutes, as the workers counted them.
        "throughput": {
            **{f"{minutes}m": _ended(hour.last(minutes)) for minutes in SPANS},
            "24h": _ended(found.past["day"].sum),
        },
        "upcoming": [
            {"start": common.iso(bar.start), "end": common.iso(bar.end), **_number(bar.number)}
            for bar in found.upcoming.bars
        ],
        "workers": found.workers,
        "worker_list": [
            {
                "name": worker.name,
                "host": worker.host,
                "pid": worker.pid,
                "state": presence.health(worker, found.presence.at).value,
                "queues": worker.queues,
                "threads": worker.threads,
                "started_at": common.iso(worker.started_at),
                "seen_at": common.iso(worker.seen_at),
            }
            for worker in found.presence.workers
        ],
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
