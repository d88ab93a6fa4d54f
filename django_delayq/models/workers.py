"""The table of worker heartbeats, and who is alive by them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from django.db import models
from django.utils.translation import gettext_lazy as _

from .fields import UTCDateTimeField

# A worker whose last heartbeat is older than this will not come back. Seconds.
LOST_AFTER = 120.0


class Worker(models.Model):
    """The heartbeat of a worker process, which is alive while ``seen_at`` advances."""

    # Statistics and checks count a worker as dead when its last heartbeat is older than this. Seconds.
    ALIVE = 35.0

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    host = models.CharField(_("host"), max_length=100)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), default=list)
    # The topics that the process has handlers for; empty when it runs none.
    topics = models.JSONField(_("topics"), default=list)
    threads = models.IntegerField(_("threads"), default=0)
    started_at = UTCDateTimeField(_("started"))
    seen_at = UTCDateTimeField(_("last heartbeat"))

    class Meta:
        db_table = "delayq_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


def seen_lately(now: datetime, seconds: float = Worker.ALIVE) -> models.Q:
    """Return the condition that ``seen_at`` is this recent and not in the future: a clock may have been ahead."""
    longest = timedelta(seconds=seconds)
    return models.Q(seen_at__gt=now - longest, seen_at__lt=now + longest)


class WorkerState(StrEnum):
    """The state of a worker process, by the age of its last heartbeat."""

    ALIVE = "alive"
    LATE = "late"
    LOST = "lost"


def state_of(worker: Worker, now: datetime) -> WorkerState:
    """Return the state of a worker at a moment of the record's clock, which may have been ahead."""
    silent = abs(now - worker.seen_at)
    if silent < timedelta(seconds=Worker.ALIVE):
        return WorkerState.ALIVE
    return WorkerState.LATE if silent < timedelta(seconds=LOST_AFTER) else WorkerState.LOST


@dataclass(frozen=True, slots=True)
class WorkerList:
    """The workers at one moment of the record's clock, the latest heartbeat first."""

    at: datetime
    workers: list[Worker]

    def of(self, state: WorkerState) -> list[Worker]:
        return [worker for worker in self.workers if state_of(worker, self.at) == state]

    def serving(self, queue: str) -> int:
        """Count the live workers that serve a queue."""
        return sum(queue in worker.queues for worker in self.of(WorkerState.ALIVE))
