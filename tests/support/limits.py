"""Topics with limits, claimed and ended step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from django_delayq import handler
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.project import conf, registry
from django_delayq.project.registry import Delivered
from django_delayq.record import admission, overrides, transitions
from django_delayq.record.admission import Admitted
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Claimed, Claiming, Failure, Success, Ticket

DB = "default"
LEASES = {"l.one": 60.0, "l.rate": 60.0, "l.free": 60.0, "l.both": 60.0}

Declare = Callable[..., None]


@pytest.fixture
def declare() -> Declare:
    """Register a handler with limits."""

    def do(topic: str, **terms: Any) -> None:
        registry.unregister(topic)

        @handler(topic, **terms)
        def receive(message: Delivered) -> None: ...

    return do


@pytest.fixture
def overrides_forgotten() -> Iterator[None]:
    """Have this process forget the overrides of a test."""
    yield
    overrides._known.clear()


@pytest.fixture
def queue_limits(settings: Any) -> Callable[..., None]:
    """Set the limits of queues."""

    def do(**limits: Any) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "LIMITS": limits}
        assert (conf.get().LIMITS or {}).keys() == limits.keys()

    return do


def claim_limited(
    using: str, tickets: Sequence[Ticket], leases: dict[str, float], worker: str, *, ahead: float = 0.0
) -> Admitted:
    """Claim as a worker does that knows limits: it reads first under which ones each scheduled message stands."""
    facts = statements(using).facts([ticket.id for ticket in tickets]).values()
    limits = {
        row.id: admission.limits_of(row.topic, row.queue, row.limit_key).keys()
        for row in facts
        if row.state == State.SCHEDULED
    }
    asked = Claiming(tickets, leases, worker, None, ahead, overrides.known(using).last)
    return admission.admit(using, asked, limits)


def admit(*messages: Message, ahead: float = 0.0) -> list[int]:
    """Have a worker claim messages within their limits; return the ids of those that begin."""
    return [row.id for row in admit_rows(*messages, ahead=ahead)]


def admit_rows(*messages: Message, ahead: float = 0.0) -> list[Claimed]:
    tickets = [Ticket(message.pk) for message in messages]
    return claim_limited(DB, tickets, LEASES, "w", ahead=ahead).claimed


def refused(*messages: Message) -> dict[int, str]:
    """Have a worker claim messages; return the limits that refuse some, by the ids of those."""
    return claim_limited(DB, [Ticket(message.pk) for message in messages], LEASES, "w").refused


def state(message: Message) -> str:
    return Message.objects.get(pk=message.pk).state


def states(*messages: Message) -> list[str]:
    return [state(message) for message in messages]


def reasons(message: Message) -> list[tuple[str | None, str, str]]:
    rows = Transition.objects.filter(message=message)
    return list(rows.values_list("from_state", "to_state", "reason"))


def succeed(message: Message, delivery: int = 1) -> None:
    assert transitions.succeed(DB, [Success(message.pk, delivery, "worker:w")])


def fail(message: Message, delivery: int = 1, **terms: Any) -> None:
    assert transitions.fail(DB, [Failure(message.pk, delivery, "worker:w", **terms)])
