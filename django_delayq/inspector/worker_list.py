"""Lists the worker processes that are or were alive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ..core.states import State
from ..models import Message, Worker
from ..record import transitions

# Workers that are listed, and running messages that are read.
MOST_WORKERS = 500
MOST_RUNNING = 1000
# A worker whose last heartbeat is older than this will not come back. Seconds.
LOST_AFTER = 120.0


class WorkerState(StrEnum):
    """The state of a worker process, by the age of its last heartbeat."""

    ALIVE = "alive"
    LATE = "late"
    LOST = "lost"


def state_of(worker: Worker, now: datetime) -> WorkerState:
    """Return the state of a worker at a moment of the record's clock."""
    silent = now - worker.seen_at
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


def list_workers(using: str, now: datetime) -> WorkerList:
    """Read the workers from the record."""
    return WorkerList(now, list(Worker.objects.using(using).order_by("-seen_at", "name")[:MOST_WORKERS]))


@dataclass(frozen=True, slots=True)
class RunningMessage:
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
        found.setdefault(worker.removesuffix(transitions.ALONE), []).append(RunningMessage(pk, topic, queue))
    return found, len(values) > MOST_RUNNING
