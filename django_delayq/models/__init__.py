"""The tables of the queue. Only ``django_delayq.record.transitions`` writes the rows of messages."""

from __future__ import annotations

from .queues import Queue, in_paused_queue
from .record import (
    HOLDS_KEY,
    WAITS_AGAIN,
    Identity,
    Lease,
    LogRow,
    Message,
    Place,
    Rate,
    Transition,
    forget_identity,
    identity,
    known_identity,
    learn_identity,
    lease_is_over,
    not_expired,
)
from .workers import Worker

__all__ = [
    "HOLDS_KEY",
    "WAITS_AGAIN",
    "Identity",
    "Lease",
    "LogRow",
    "Message",
    "Place",
    "Queue",
    "Rate",
    "Transition",
    "Worker",
    "forget_identity",
    "identity",
    "in_paused_queue",
    "known_identity",
    "learn_identity",
    "lease_is_over",
    "not_expired",
]
