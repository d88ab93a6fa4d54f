"""The worker heartbeat: a row that shows that a worker process is alive, and a file for all processes of a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from django.db import connections
from django.db.models.functions import Now

from ...core import actors
from ...core.callables import never
from ...core.known_record import clocks_differ
from ...extensions import Service
from ...models import Worker
from ...record import reads
from ...record.sql.sessions import own_transaction
from .upkeep_tuning import USUAL, UpkeepTuning

logger = logging.getLogger("django_delayq")


class Heartbeat(Service):
    """Updates the row of this process, unless the process hangs."""

    name = "worker heartbeat"

    def __init__(
        self,
        using: str,
        worker: str,
        queues: Callable[[], tuple[str, ...]],
        threads: int,
        topics: Iterable[str],
        hangs: Callable[[], bool] = never,
        tuning: UpkeepTuning = USUAL,
    ) -> None:
        """``hangs`` returns whether this process records no outcomes: then it must not look alive."""
        self.using = using
        self.worker = worker
        self.queues = queues
        self.threads = threads
        self.topics = sorted(topics)
        self.hangs = hangs
        self.tuning = tuning
        # True when the log says that this host's clock is wrong.
        self._is_off = False

    def tick(self) -> float:
        """Update the row, or write it when there is none."""
        if self.hangs():
            return self.tuning.heartbeat_interval
        rows = Worker.objects.using(self.using)
        queues = list(self.queues())
        # At SERIALIZABLE, which a project may ask for, it would fail beside others that read the table.
        with own_transaction(self.using):
            # An idle process would not notice otherwise that the record's clock was set.
            reads.now(self.using)
            if not rows.filter(name=self.worker).update(seen_at=Now(), queues=queues):
                rows.create(
                    name=self.worker,
                    host=actors.host(),
                    pid=os.getpid(),
                    threads=self.threads,
                    queues=queues,
                    topics=self.topics,
                    started_at=Now(),
                    seen_at=Now(),
                )
        self._look_at_clock()
        return self.tuning.heartbeat_interval

    def _look_at_clock(self) -> None:
        """Log once when this host's clock differs from the database's."""
        off = clocks_differ(self.using)
        if off and not self._is_off:
            logger.warning(
                "Clocks differ: %s; messages are on time, for the database's decides. Set it right by NTP", off
            )
        self._is_off = bool(off)

    def delete(self) -> None:
        """Delete the row of a process that ends in order."""
        delete_rows(self.using, [self.worker])


def delete_rows(using: str, workers: Iterable[str]) -> None:
    """Delete the rows of processes that are gone. Receivers of a project that follow all models are not called."""
    with connections[using].cursor() as cursor:
        cursor.executemany("DELETE FROM delayq_worker WHERE name = %s", [(worker,) for worker in workers])


class HeartbeatFile:
    """A file that a supervisor touches. If it cannot be touched, the log says so once, and the worker goes on."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._fails = False

    def touch(self) -> None:
        """Touch the file, or log a warning when it could be touched before."""
        try:
            self._path.touch()
            self._fails = False
        except OSError as error:
            if not self._fails:
                logger.warning("The heartbeat file cannot be touched, and the worker goes on: %s", error)
            self._fails = True
