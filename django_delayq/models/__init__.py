"""The tables. Rows of messages are written by ``django_delayq.transitions`` alone."""

from __future__ import annotations

from .record import Identity, Message, Transition, identity
from .steering import AuditEvent, Operation, Queue
from .workers import Rollup, Worker

__all__ = ["AuditEvent", "Identity", "Message", "Operation", "Queue", "Rollup", "Transition", "Worker", "identity"]
