"""The data that several pages share, each part of it read once every few seconds in a process."""

from __future__ import annotations

from datetime import datetime

from django.db import router
from django.utils import timezone, translation
from django.utils.functional import cached_property

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


class PageData:
    """The data of one request, each part read when the page first asks for it, as far as it can be read."""

    def __init__(self) -> None:
        self.using = router.db_for_read(models.Message)

    @cached_property
    def snapshot(self) -> Panel[Snapshot]:
        return panels.load("snapshot", self.using, stats.take_snapshot, self.using)

    @cached_property
    def at(self) -> datetime:
        """The moment of the snapshot."""
        return self.snapshot.value.at if self.snapshot.value else timezone.now()

    @cached_property
    def lines(self) -> Panel[Lines]:
        """The longest lines before limits."""
        return panels.load("lines", self.using, stats.lines_in, self.using, self.snapshot.value, 10)

    @cached_property
    def limits(self) -> Panel[Lines]:
        """The limits, those with the longest lines first."""
        return panels.load("all limits", self.using, stats.all_limits, self.using, self.snapshot.value, MOST_LIMITS)

    @cached_property
    def workers(self) -> Panel[WorkerList]:
        return panels.load("workers", self.using, worker_list.list_workers, self.using, self.at)

    @cached_property
    def paused(self) -> Panel[dict[str, models.Queue]]:
        return panels.load("paused", self.using, pausing.paused, self.using)

    @cached_property
    def redis(self) -> Panel[RedisStats]:
        return panels.load(f"redis {conf.get().REDIS!r}", self.using, redis)

    @cached_property
    def unfilled(self) -> Panel[list[str]]:
        """The queues with scheduled messages that Redis lacks, the fullest first; if none has any, those of workers."""
        return panels.load("unfilled", self.using, _unfilled, self.snapshot.value, self.workers.value)

    @cached_property
    def pending(self) -> Panel[list[str]]:
        """The migrations that are not applied."""
        return panels.load("pending", self.using, pending_migrations, self.using, kept=tuning.slow_panel_kept)

    @cached_property
    def hidden(self) -> Panel[HiddenRows]:
        """The tables whose rows the database may hide from the role of this process."""
        return panels.load("hidden rows", self.using, hidden_rows, self.using, kept=tuning.slow_panel_kept)

    @cached_property
    def findings(self) -> Panel[list[Finding]]:
        """The findings of extensions."""
        name = f"findings {translation.get_language()}"
        return panels.load(name, self.using, _findings, self.using, self.workers.value)


def _findings(using: str, workers: WorkerList | None) -> list[Finding]:
    return [] if workers is None else extensions.findings(using, workers)


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
    seen = data.snapshot.value
    queues = sum(queue.scheduled.count > 0 for queue in seen.queues.values()) if seen else None
    return panels.load(name, data.using, upcoming.count_upcoming, data.using, window, data.at, queues)


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


def is_empty(data: PageData) -> bool:
    """Tell whether the record has no message at all."""
    seen = data.snapshot.value
    if seen is None or seen.scheduled.count or seen.running.count:
        return False
    found = panels.load("any", data.using, models.Message.objects.using(data.using).exists)
    return found.value is False
