"""The tables of the queue. Only ``django_delayq.transitions`` writes the rows of messages."""

from __future__ import annotations

from .queues import Queue
from .record import (
    HANDED_OVER,
    HOLDS_KEY,
    WAITS_AGAIN,
    Identity,
    Lease,
    Message,
    Place,
    Rate,
    Transition,
    forget_identity,
    identity,
    known_identity,
    learn_identity,
    lease_is_over,
)
from .workers import Worker

__all__ = [
    "HANDED_OVER",
    "HOLDS_KEY",
    "WAITS_AGAIN",
    "Identity",
    "Lease",
    "Message",
    "Place",
    "Queue",
    "Rate",
    "Transition",
    "Worker",
    "forget_identity",
    "identity",
    "known_identity",
    "learn_identity",
    "lease_is_over",
]
