"""Facts that several people look at, asked for once every few seconds, each with a limit of its own.

One that cannot be had says so and leaves the others alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.db import DatabaseError, InterfaceError
from django.utils.translation import gettext as _

from ...exceptions import BrokerUnavailable
from ..statements import TooSlow, statement_timeout

T = TypeVar("T")

# How long the database may think about each statement of a panel. Milliseconds.
PATIENCE = 1000
# What could not be had is asked for again after this time. Seconds.
_AGAIN = 2.0
# Kept at most: each kind of facts is asked for in a few variants.
_MOST = 200


@dataclass(frozen=True, slots=True)
class Panel(Generic[T]):
    """Some facts, or what went wrong."""

    facts: T | None = None
    problem: str = ""


@dataclass(slots=True)
class _Kept:
    panel: Panel[Any]
    until: float


_kept: dict[tuple[object, ...], _Kept] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}


def load(key: tuple[object, ...], seconds: float, using: str, ask: Callable[[], T]) -> Panel[T]:
    """What ``ask`` answers, or answered to somebody in this process within so many seconds."""
    with _locks.setdefault(key, threading.Lock()):
        kept = _kept.get(key)
        if kept is None or kept.until < time.monotonic():
            if len(_kept) >= _MOST:
                _kept.clear()
            panel = _ask(using, ask)
            good_for = min(seconds, _AGAIN) if panel.problem else seconds
            kept = _kept[key] = _Kept(panel, time.monotonic() + good_for)
        return kept.panel


def forget() -> None:
    """Ask anew at the next time."""
    _kept.clear()


def _ask(using: str, ask: Callable[[], T]) -> Panel[T]:
    try:
        with statement_timeout(using, PATIENCE):
            return Panel(ask())
    except TooSlow:
        return Panel(problem=_("Could not load: it took longer than %(seconds)g s.") % {"seconds": PATIENCE / 1000})
    except BrokerUnavailable:
        return Panel(problem=_("Could not load: Redis does not answer."))
    except (DatabaseError, InterfaceError) as error:
        return Panel(problem=_("Could not load: %(error)s.") % {"error": type(error).__name__})
