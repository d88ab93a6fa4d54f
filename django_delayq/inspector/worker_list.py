"""Lists the worker processes that are or were alive."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db.models import Q

from ..core.states import State
from ..models import Message, Worker
from ..models.workers import WorkerList, seen_lately
from ..record import crashes

# At most this many workers are listed, unless more of them are alive.
MOST_WORKERS = 500
# At most this many running messages are read.
MOST_RUNNING = 1000


def list_workers(using: str, now: datetime) -> WorkerList:
    """Read the workers from the record: those that are alive, and the last that were."""
    rows = Worker.objects.using(using).order_by("-seen_at", "name")
    return WorkerList(now, list(rows.filter(seen_lately(now) | Q(pk__in=rows.values("pk")[:MOST_WORKERS]))))


class RunningMessage(NamedTuple):
    """A message that a worker has claimed."""

    id: int
    topic: str
    queue: str


def running(using: str) -> tuple[dict[str, list[RunningMessage]], bool]:
    """Return the running messages by the name of their worker, and whether there are more than were read."""
    rows = Message.objects.using(using).filter(state=State.RUNNING).order_by("leased_until")
    values = list(rows.values_list("worker", "id", "topic", "queue")[: MOST_RUNNING + 1])
    found: dict[str, list[RunningMessage]] = {}
    for worker, pk, topic, queue in values[:MOST_RUNNING]:
        found.setdefault(worker.removesuffix(crashes.ALONE), []).append(RunningMessage(pk, topic, queue))
    return found, len(values) > MOST_RUNNING
