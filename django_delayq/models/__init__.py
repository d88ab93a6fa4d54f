"""The tables. Rows of messages are written by ``django_delayq.transitions`` alone."""

from __future__ import annotations

from .queues import Queue
from .record import Identity, Message, Transition, identity
from .workers import Worker

__all__ = ["Identity", "Message", "Queue", "Transition", "Worker", "identity"]
