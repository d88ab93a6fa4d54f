"""Lists the worker processes that are or were alive, and finds messages that wait because no worker serves them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db.models import Q

from ..core.names import near
from ..core.states import State
from ..models import Message, Queue, Worker
from ..models.workers import WorkerList, WorkerState, seen_lately
from ..project import pulled, registry
from ..record import crashes, reads
from ..record.sql import statements
from ..restore import reading
from .numbers import AGES, CAPS, Caps
from .waiting import heads, topics_of_next


def list_workers(using: str, now: datetime) -> WorkerList:
    """Read the workers from the record: those that are alive, and the last that were."""
    rows = Worker.objects.using(using).order_by("-seen_at", "name")
    return WorkerList(now, list(rows.filter(seen_lately(now) | Q(pk__in=rows.values("pk")[: CAPS.workers]))))


def running(using: str, caps: Caps = CAPS) -> tuple[dict[str, list[tuple[int, str]]], bool]:
    """Return the ids and topics of running messages by their worker, and whether there are more than were read."""
    rows = Message.objects.using(using).filter(state=State.RUNNING).order_by("leased_until")
    values = list(rows.values_list("worker", "id", "topic")[: caps.running + 1])
    found: dict[str, list[tuple[int, str]]] = {}
    for worker, pk, topic in values[: caps.running]:
        found.setdefault(worker.removesuffix(crashes.ALONE), []).append((pk, topic))
    return found, len(values) > caps.running


def known_topics(workers: WorkerList) -> set[str]:
    """Return the topics for which this project or a live worker has a handler."""
    return set(registry.handlers()).union(*(worker.topics for worker in workers.of(WorkerState.ALIVE)))


def served_queues(workers: WorkerList) -> set[str]:
    """Return the queues that live workers with handlers serve."""
    return {queue for worker in workers.of(WorkerState.ALIVE) if worker.topics for queue in worker.queues}


def known_queues(using: str) -> set[str]:
    """Return the queues that something knows: settings, handlers, live workers, waiting messages, and pauses."""
    served = served_queues(list_workers(using, reads.now(using)))
    known = served.union(reading.queues(using), statements(using).queues(), pulled.names())
    return known.union(Queue.objects.using(using).values_list("name", flat=True))


def topics_without_handler(using: str, workers: WorkerList) -> dict[str, str | None]:
    """Return the topics for which neither this project nor a live worker has a handler, by name.

    Each has the known topic whose name is most like it, a possible typing error, or None.

    Only the messages that are due next in each queue are read, since no index leads to the topics of waiting messages.
    Programs pull any topic.
    """
    known = known_topics(workers)
    rows = CAPS.shared(len(pulled.without(statements(using).queues()))).rows
    return {topic: near(topic, known) for topic in sorted(topics_of_next(using, rows) - known)}


def queues_without_worker(using: str, workers: WorkerList) -> dict[str, str | None]:
    """Return the queues that hold messages and that no live worker with handlers serves.

    Each has the served queue whose name is most like it, or None.
    """
    served = served_queues(workers)
    since = workers.at - timedelta(seconds=AGES.unserved)
    old = {head.queue for head in heads(using) if head.queue not in served and head.created_at < since}
    return {queue: near(queue, served) for queue in sorted(pulled.without(old))}


def asked(unserved: Mapping[str, str | None]) -> list[str]:
    """Return the names; one that is like a known name gets the question whether that was meant."""
    return [f"{name} (did you mean {like}?)" if like else name for name, like in unserved.items()]
