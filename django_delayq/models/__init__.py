"""The tables. Rows of messages are written by ``django_delayq.transitions`` alone."""

from __future__ import annotations

from .pages import Dashboard, DeadLetter, Health
from .record import Identity, Message, Transition, identity
from .steering import AuditEvent, Operation, Queue
from .workers import Rollup, Worker

__all__ = [
    "AuditEvent",
    "Dashboard",
    "DeadLetter",
    "Health",
    "Identity",
    "Message",
    "Operation",
    "Queue",
    "Rollup",
    "Transition",
    "Worker",
    "identity",
]
