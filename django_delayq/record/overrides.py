"""What this process knows of the limits that somebody changed at run time.

A claim takes nothing while the record has a change that this process has not read: so no delivery begins under a
limit that holds no more, and nobody has to ask for changes while there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from django.db.models import Case, Value, When

from ..core.forks import after_fork
from ..core.limits import Limit, parts, topic_name
from ..models.limit_overrides import LimitOverride


class Known(NamedTuple):
    """The overrides in force, by the names of their limits, and the id of the last change."""

    last: int = 0
    in_force: Mapping[str, LimitOverride] = {}
    # When the record had told them (monotonic).
    at: float = float("-inf")


# What this process has read, by database alias. A thread replaces the value of an alias as a whole, under the lock.
_known: dict[str, Known] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


# A process that was forked while another thread had the lock would wait for ever.
after_fork(_renew_lock)

NOTHING = Known()
# Pages and commands read the overrides again when those that the process has are older than this. Seconds.
FRESH = 0.5


def known(using: str) -> Known:
    """Return the overrides that this process has read."""
    return _known.get(using, NOTHING)


def read(using: str) -> None:
    """Read the overrides. Of two threads that read at one moment the one with the later change is right."""
    asked = time.monotonic()
    rows = LimitOverride.objects.using(using).annotate(
        holds=Case(When(LimitOverride.IN_FORCE, then=Value(True)), default=Value(False))
    )
    found = list(rows.order_by("pk"))
    last, in_force = max([row.pk for row in found], default=0), {row.name: row for row in found if row.holds}
    with _lock:
        if asked >= known(using).at or last >= known(using).last:
            _known[using] = Known(last, in_force, time.monotonic())


def read_again(using: str) -> None:
    """Read the overrides, unless they were read within ``FRESH``."""
    if time.monotonic() - known(using).at > FRESH:
        read(using)


def doubt(using: str) -> None:
    """Have ``read_again`` read the overrides in any case: this process changes one."""
    with _lock:
        _known[using] = known(using)._replace(at=NOTHING.at)


def deciding(using: str, name: str) -> LimitOverride | None:
    """Return the override that decides on the limit of this name; None: the code decides.

    The override of a topic is like another declaration: it counts for each key by itself, unless the key has an
    override of its own. One that pauses the topic pauses all its keys.
    """
    if not (in_force := known(using).in_force):
        return None
    own, (kind, what, _key) = in_force.get(name), parts(name)
    of_topic = in_force.get(topic_name(what, None)) if kind == "topic" else None
    return of_topic if of_topic is not None and (own is None or of_topic.is_pause) else own


def over(using: str, name: str, declared: Limit | None) -> Limit | None:
    """Return the limit of this name that holds: as the code declares it, or as somebody changed it."""
    override = deciding(using, name)
    return declared if override is None else override.over(declared)
