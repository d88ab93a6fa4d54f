"""Which queues are pulled by programs, and how often their messages are delivered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from django.db.models import Q, Value
from django.db.models.functions import Left
from django.db.models.lookups import Exact

from ..core import retry
from ..core.pull_queues import PREFIX, PullQueue, matching
from . import conf


def terms(queue: str) -> PullQueue | None:
    """Return what the settings declare of a queue that is pulled; None: workers serve it."""
    declared = conf.get().PULL_QUEUES
    return None if declared is None else matching(declared, queue)


def names() -> list[str]:
    """Return the pulled queues that the settings declare by their whole names."""
    return [name for name in conf.get().PULL_QUEUES or () if not name.endswith(PREFIX)]


def beginnings() -> list[str]:
    """Return the beginnings of names by which the settings declare pulled queues."""
    return [name.removesuffix(PREFIX) for name in conf.get().PULL_QUEUES or () if name.endswith(PREFIX)]


def rows() -> Q:
    """Return the condition that programs pull the queue of a message."""
    found = Q(queue__in=names())
    for beginning in beginnings():
        # Not by LIKE, for which case does not matter on SQLite.
        found |= Q(Exact(Left("queue", len(beginning)), Value(beginning)))
    return found


def without(queues: Iterable[str]) -> list[str]:
    """Return those of the queues that workers serve."""
    return list(queues) if conf.get().PULL_QUEUES is None else [queue for queue in queues if terms(queue) is None]


def policy(queue: str, stored: Any, max_attempts: int | None) -> retry.RetryPolicy:
    """Return the retry policy of a pulled message: its own, as it is stored, or the attempts that its queue allows."""
    if stored is not None:
        try:
            return retry.RetryPolicy.from_json(stored).limited(max_attempts)
        except ValueError:
            # Somebody else wrote into the row.
            pass
    return replace(retry.DEFAULT, max_attempts=max_attempts or (terms(queue) or PullQueue()).max_attempts)
