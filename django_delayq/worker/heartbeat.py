"""Shows that this worker process is alive."""

from __future__ import annotations

import os
from collections.abc import Callable

from django.db.models.functions import Now

from .. import actors
from ..extensions import Service
from ..models import Worker

INTERVAL = 10.0


class Heartbeat(Service):
    """One row per process, touched every ten seconds."""

    name = "presence"

    def __init__(self, using: str, worker: str, queues: Callable[[], tuple[str, ...]], threads: int) -> None:
        self.using = using
        self.worker = worker
        self.queues = queues
        self.threads = threads

    def tick(self) -> float:
        rows = Worker.objects.using(self.using)
        queues = list(self.queues())
        if not rows.filter(name=self.worker).update(seen_at=Now(), queues=queues):
            rows.create(
                name=self.worker,
                host=actors.host(),
                pid=os.getpid(),
                threads=self.threads,
                queues=queues,
                started_at=Now(),
                seen_at=Now(),
            )
        return INTERVAL

    def leave(self) -> None:
        """The process ends in order."""
        Worker.objects.using(self.using).filter(name=self.worker).delete()
