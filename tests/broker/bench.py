"""A broker with rows to deliver, for the suite that every broker has to pass."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import redis
from django.utils import timezone

from django_delayq.api.scheduling import checked
from django_delayq.broker.base import Broker, Entry
from django_delayq.broker.database import DatabaseBroker
from django_delayq.broker.redis import RedisBroker
from django_delayq.project import conf
from django_delayq.record import transitions
from django_delayq.record.reads import identity
from django_delayq.record.sql.rows import Claimed, NewMessage
from tests.support.broker_methods import QUEUE

TOPIC = "broker.contract"


def connections_made(client: redis.Redis) -> int:
    """Return how many connections the server has ever accepted."""
    return int(client.info("stats")["total_connections_received"])


def new_message(*, due_in: float = -1.0, priority: int = 0, queue: str = QUEUE) -> NewMessage:
    due_at = timezone.now() + timedelta(seconds=due_in)
    return checked(TOPIC, None, {"queue": queue, "priority": priority})._replace(due_at=due_at)


@dataclass
class Bench:
    """A broker with the record behind it. A row fell due a second ago unless a test says otherwise."""

    broker: Broker

    def schedule(self, *, due_in: float = -1.0, priority: int = 0, queue: str = QUEUE, put: bool = True) -> int:
        """Write a row and put it; returns its id."""
        new = new_message(due_in=due_in, priority=priority, queue=queue)
        row = transitions.insert("default", new, "test")
        assert row is not None
        if put:
            self.broker.put(queue, [Entry.at(row.id, row.due_at, priority)])
        return row.id

    def schedule_many(self, count: int) -> list[int]:
        """Write many rows in one call and put them in another; returns their ids."""
        new = [new_message() for _ in range(count)]
        rows = [row for _message, row in transitions.insert_many("default", new, "test")]
        self.broker.put(QUEUE, [Entry.at(row.id, row.due_at, 0) for row in rows])
        return [row.id for row in rows]

    def remove(self, ids: list[int]) -> None:
        """Have a broker that holds ids forget these."""
        if isinstance(self.broker, RedisBroker):
            self.broker.remove(QUEUE, ids)

    def take(self, limit: int = 100) -> list[int]:
        """Take without a claim; returns the ids."""
        return [ticket.id for ticket in self.broker.take(QUEUE, limit).tickets]

    def deliver(self, limit: int = 100) -> list[Claimed]:
        """Take and claim, as a consumer does; returns the claimed rows."""
        with self.broker.exclusively():
            tickets = self.broker.take(QUEUE, limit).tickets
            return transitions.claim("default", tickets, {TOPIC: 60.0}, "worker")


def redis_broker(url: str | None = None, *, using: str = "default", horizon: bool = True) -> RedisBroker:
    """Make a broker on Redis, and give it a horizon as a loader does."""
    settings = conf.get()
    if url is not None:
        settings = conf.parse({"REDIS": url})[0]
    broker = RedisBroker(settings, using, timeout=2.0)
    if horizon:
        load(broker, identity(using))
    return broker


def load(broker: RedisBroker, identity: str = "i") -> int:
    """Do what a loader does for an empty record; return the horizon."""
    begun = broker.load(ahead=600.0, worker="w", lease=10.0, identity=identity, server=broker.server(), lost=False)
    assert begun is not None
    assert broker.loaded(worker="w", upto_tenths=begun[1], lease=None)
    return begun[1]


def database_broker() -> DatabaseBroker:
    return DatabaseBroker("default", lambda: [TOPIC])
