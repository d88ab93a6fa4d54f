"""The data that several pages share, each part of it read once every few seconds in a process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import router
from django.utils import timezone, translation

from ... import extensions, models
from ...api import pausing
from ...broker import publisher
from ...broker.base import QueueSize
from ...core.findings import Finding
from ...inspector import stats, worker_list
from ...inspector.diagnostics import HiddenRows, hidden_rows
from ...inspector.migrations import pending_migrations
from ...inspector.stats import Lines, RedisStats, Snapshot
from ...models.workers import WorkerList, WorkerState
from ...project import conf
from ..console_tuning import tuning
from ..statistics import throughput, upcoming
from ..statistics.throughput import Failing, Throughput
from ..statistics.upcoming import Bar
from ..whereabouts import sizes, unfilled
from . import panels
from .panels import Panel

# Pages read this many limits at most, most of them keys of some topic.
MOST_LIMITS = 1000


@dataclass(frozen=True, slots=True)
class PageData:
    """The data of one moment, as far as it could be read."""

    using: str
    at: datetime
    snapshot: Panel[Snapshot]
    # The longest lines before limits.
    lines: Panel[Lines]
    workers: Panel[WorkerList]
    paused: Panel[dict[str, models.Queue]]
    redis: Panel[RedisStats]
    # Queues with scheduled messages that Redis lacks, the fullest first; if no queue has any, the queues of workers.
    unfilled: Panel[list[str]]
    pending: Panel[list[str]]
    # The tables whose rows the database may hide from the role of this process.
    hidden: Panel[HiddenRows]
    # The findings of extensions.
    findings: Panel[list[Finding]]


def gather() -> PageData:
    """Read the data of this moment."""
    using = router.db_for_read(models.Message)
    seen = panels.load("snapshot", using, stats.take_snapshot, using)
    at = seen.value.at if seen.value else timezone.now()
    workers = panels.load("workers", using, worker_list.list_workers, using, at)
    language = translation.get_language()
    return PageData(
        using,
        at,
        seen,
        panels.load("lines", using, _lines, using, seen.value),
        workers,
        panels.load("paused", using, pausing.paused, using),
        panels.load(f"redis {conf.get().REDIS!r}", using, redis),
        panels.load("unfilled", using, _unfilled, seen.value, workers.value),
        panels.load("pending", using, pending_migrations, using, kept=tuning.slow_panel_kept),
        panels.load("hidden rows", using, hidden_rows, using, kept=tuning.slow_panel_kept),
        panels.load(f"findings {language}", using, _findings, using, workers.value),
    )


def _findings(using: str, workers: WorkerList | None) -> list[Finding]:
    return [] if workers is None else extensions.findings(using, workers)


def _lines(using: str, seen: Snapshot | None) -> Lines:
    return stats.longest_lines(using, 10) if seen is None or seen.limited.count else Lines()


def _unfilled(seen: Snapshot | None, workers: WorkerList | None) -> list[str]:
    """Return the queues that Redis should have and does not."""
    queues = sorted(seen.queues.items(), key=lambda item: -item[1].scheduled.count) if seen else []
    names = [name for name, queue in queues if queue.scheduled.count]
    if not names and workers is not None:
        # Workers fill Redis also while nothing is scheduled. A Redis that they do not fill is another one than theirs.
        names = sorted({name for worker in workers.of(WorkerState.ALIVE) for name in worker.queues})
    return unfilled(router.db_for_write(models.Message), names)


def redis() -> RedisStats:
    """Ask the Redis of the publisher, with the time limits of the publisher."""
    redis_publisher = publisher.get(router.db_for_write(models.Message))
    return stats.ask_redis(None if redis_publisher is None else redis_publisher.broker)


def held(data: PageData, name: str, queues: list[str]) -> Panel[dict[str, QueueSize]]:
    """Return the numbers of ids in Redis by queue, unless Redis does not answer or belongs to another database."""
    if data.unfilled.error is not None:
        return Panel(error=data.unfilled.error)
    return panels.load(name, data.using, sizes, router.db_for_write(models.Message), queues)


def unserved(data: PageData) -> list[str]:
    """Return the queues with overdue messages that no live worker serves; none where either is not known."""
    snapshot, workers = data.snapshot.value, data.workers.value
    if snapshot is None or workers is None:
        return []
    return [name for name, queue in snapshot.queues.items() if queue.overdue.count and not workers.serving(name)]


def coming(data: PageData, window: str) -> Panel[list[Bar]]:
    """Return the messages that fall due in the window."""
    name = f"upcoming {window} {timezone.get_current_timezone_name()}"
    return panels.load(name, data.using, upcoming.count_upcoming, data.using, window, data.at)


def past(data: PageData, window: str) -> Panel[dict[str, Throughput]]:
    """Return the deliveries in this window and in those of the tiles, and in the day before theirs."""
    name, windows = f"past {window} {timezone.get_current_timezone_name()}", ("hour", "day", window)
    read = throughput.read_throughput
    return panels.load(name, data.using, read, data.using, data.at, windows, ("day",), kept=tuning.rollups_kept)


def last_hour(data: PageData, column: str, *names: str) -> Panel[dict[str, Throughput]]:
    """Return the deliveries in each minute of the last hour, by queue, or of the topics with these names."""
    read, given = throughput.read_last_hour, (data.using, data.at, column, names)
    return panels.load(f"hour {column} {names}", data.using, read, *given, kept=tuning.rollups_kept)


def failing(data: PageData) -> Panel[list[Failing]]:
    """Return the topics that fail far more often than the day before."""
    return panels.load("failing", data.using, throughput.read_failing, data.using, data.at, kept=tuning.rollups_kept)


def running(using: str) -> Panel[tuple[dict[str, list[tuple[int, str]]], bool]]:
    """Return the messages that each worker runs."""
    return panels.load("running", using, worker_list.running, using)


def limits(using: str) -> Panel[Lines]:
    """Return the limits, those with the longest lines first."""
    return panels.load("all limits", using, stats.all_limits, using, MOST_LIMITS)


def is_empty(data: PageData) -> bool:
    """Tell whether the record has no message at all."""
    seen = data.snapshot.value
    if seen is None or seen.scheduled.count or seen.running.count:
        return False
    found = panels.load("any", data.using, models.Message.objects.using(data.using).exists)
    return found.value is False
