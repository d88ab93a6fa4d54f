"""The worker processes: who is there, and who was."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ..models import Message, Worker
from ..states import State

# Workers that are shown, and running messages that are looked at.
MOST_WORKERS = 500
MOST_RUNNING = 1000
# One that was not seen for this long will not come back. Seconds.
LOST_AFTER = 120.0


class Health(StrEnum):
    """Whether a worker still shows itself."""

    ALIVE = "alive"
    LATE = "late"
    LOST = "lost"


def health(worker: Worker, now: datetime) -> Health:
    """By the moment it was last seen."""
    silent = now - worker.seen_at
    if silent < timedelta(seconds=Worker.ALIVE):
        return Health.ALIVE
    return Health.LATE if silent < timedelta(seconds=LOST_AFTER) else Health.LOST


@dataclass(frozen=True, slots=True)
class Presence:
    """The workers at one moment of the record's clock, those seen last first."""

    at: datetime
    workers: list[Worker]

    def of(self, health_: Health) -> list[Worker]:
        return [worker for worker in self.workers if health(worker, self.at) == health_]

    def serving(self, queue: str) -> int:
        """Live workers that take from this queue."""
        return sum(queue in worker.queues for worker in self.of(Health.ALIVE))


def look(using: str, now: datetime) -> Presence:
    """Ask the record for the workers."""
    return Presence(now, list(Worker.objects.using(using).order_by("-seen_at", "name")[:MOST_WORKERS]))


@dataclass(frozen=True, slots=True)
class Running:
    """A message that a worker has claimed."""

    id: int
    topic: str
    queue: str


def running(using: str) -> tuple[dict[str, list[Running]], bool]:
    """By the worker's name, what each runs; and whether there is more than was looked at."""
    rows = Message.objects.using(using).filter(state=State.RUNNING).order_by("leased_until")
    values = list(rows.values_list("worker", "id", "topic", "queue")[: MOST_RUNNING + 1])
    found: dict[str, list[Running]] = {}
    for worker, pk, topic, queue in values[:MOST_RUNNING]:
        found.setdefault(worker, []).append(Running(pk, topic, queue))
    return found, len(values) > MOST_RUNNING
