"""The tables of the queue. Only ``django_delayq.transitions`` writes the rows of messages."""

from __future__ import annotations

from .queues import Queue
from .record import Identity, Message, Transition, forget_identity, identity, known_identity, learn_identity
from .workers import Worker

__all__ = [
    "Identity",
    "Message",
    "Queue",
    "Transition",
    "Worker",
    "forget_identity",
    "identity",
    "known_identity",
    "learn_identity",
]
