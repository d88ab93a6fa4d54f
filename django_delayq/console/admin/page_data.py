"""What the dashboard and the banners go by: each kind asked for once every few seconds in a process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connections, router
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from ... import conf, models, pausing, publisher, restore
from ...inspector import snapshot, stats, workers
from ...inspector.snapshot import Snapshot
from ...inspector.stats import RedisStats
from ...inspector.workers import WorkerList
from ..statistics import throughput, upcoming
from ..statistics.throughput import Throughput
from ..statistics.upcoming import Upcoming
from . import panels
from .panels import Panel

# For how long an answer is good. Seconds.
FRESH = 2.5
# Workers add to the rollups every ten seconds.
ROLLUPS = 5.0
MIGRATIONS = 30.0


@dataclass(frozen=True, slots=True)
class Facts:
    """All that there is to know, as far as it could be had."""

    using: str
    at: datetime
    pulse: Panel[Snapshot]
    workers: Panel[WorkerList]
    paused: Panel[dict[str, models.Queue]]
    redis: Panel[RedisStats]
    pending: Panel[list[str]]


def gather() -> Facts:
    """What is known of this moment."""
    using = router.db_for_read(models.Message)
    found_now = panels.load(("pulse", using), FRESH, using, lambda: snapshot.take_snapshot(using))
    at = found_now.facts.at if found_now.facts else timezone.now()
    return Facts(
        using,
        at,
        found_now,
        panels.load(("workers", using), FRESH, using, lambda: workers.list_workers(using, at)),
        panels.load(("paused", using), FRESH, using, lambda: pausing.paused(using)),
        panels.load(("redis", repr(conf.get().REDIS)), FRESH, using, redis),
        panels.load(("pending", using), MIGRATIONS, using, lambda: pending(using)),
    )


def redis() -> RedisStats:
    """The Redis that messages are scheduled into, asked with the patience of those who schedule."""
    redis_publisher = publisher.get(router.db_for_write(models.Message))
    return stats.ask_redis(None if redis_publisher is None else redis_publisher.broker)


def pending(using: str) -> list[str]:
    """Migrations that are not applied."""
    executor = MigrationExecutor(connections[using])
    targets = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "django_delayq"]
    return [migration.name for migration, _backwards in executor.migration_plan(targets)]


def coming(facts: Facts, window: str) -> Panel[Upcoming]:
    """What falls due in the window."""

    def look() -> Upcoming:
        known = facts.pulse.facts
        return upcoming.count_upcoming(
            facts.using, window, list(known.queues) if known else restore.queues(facts.using), facts.at
        )

    return panels.load(("upcoming", facts.using, window, _zone()), FRESH, facts.using, look)


def past(facts: Facts, window: str) -> Panel[dict[str, Throughput]]:
    """What was delivered: in this window, and in those that the tiles and the queues show."""
    key = ("past", facts.using, window, _zone())
    windows = ("hour", "day", window)
    return panels.load(key, ROLLUPS, facts.using, lambda: throughput.read_throughput(facts.using, facts.at, windows))


def is_empty(facts: Facts) -> bool:
    """Whether there never was a message."""
    found_now = facts.pulse.facts
    if found_now is None or found_now.scheduled.count or found_now.running.count:
        return False
    found = panels.load(
        ("any", facts.using), FRESH, facts.using, lambda: models.Message.objects.using(facts.using).exists()
    )
    return found.facts is False


def _zone() -> str:
    return timezone.get_current_timezone_name()
