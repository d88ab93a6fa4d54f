"""The tables of the queue. Only ``record/transitions.py`` moves the states of messages."""

from __future__ import annotations

from .limit_overrides import LimitOverride
from .messages import Message, Transition
from .queue import Queue
from .workers import Worker

__all__ = ["LimitOverride", "Message", "Queue", "Transition", "Worker"]
