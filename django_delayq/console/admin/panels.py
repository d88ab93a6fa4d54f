"""Panels: parts of a page that a process reads once every few seconds for all users, each with its own time limit.

A panel that cannot be read shows why and does not affect the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

from django.db import DatabaseError, InterfaceError
from django.utils.translation import gettext as _

from ...core.exceptions import BrokerFailing, BrokerUnavailable, UnusableBroker
from ..console_tuning import timeouts, tuning
from ..statements import OutOfTime, TooSlow, statement_timeout

T = TypeVar("T")
Given = TypeVarTuple("Given")


@dataclass(frozen=True, slots=True)
class Panel(Generic[T]):
    """A value that was read, or the error that prevented it."""

    value: T | None = None
    error: Exception | None = None

    @property
    def problem(self) -> str:
        """The reason why the panel could not be read, in the language of the reader; empty for a value."""
        match self.error:
            case None:
                return ""
            case TooSlow():
                text = _("Could not load: it took longer than %(seconds)g s.")
                return text % {"seconds": timeouts.page / 1000}
            case UnusableBroker():
                return str(self.error)
            case BrokerFailing():
                return _("Could not load: Redis cannot be used.")
            case BrokerUnavailable():
                return _("Could not load: Redis does not answer.")
        return _("Could not load: %(error)s.") % {"error": type(self.error).__name__}


# Each panel with the end of its time, by the monotonic clock.
_kept: dict[tuple[str, str], tuple[Panel[Any], float]] = {}
_locks: dict[tuple[str, str], threading.Lock] = {}


@dataclass(slots=True)
class Leeway:
    """For how much longer panels do (seconds), until when others begin to be read (monotonic), and how many."""

    longer: float = 0.0
    end: float = math.inf
    left: float = math.inf

    def may_begin(self) -> bool:
        """Count a panel that begins to be read, if it may."""
        self.left -= 1
        return self.left >= 0 and time.monotonic() <= self.end


_leeway: ContextVar[Leeway | None] = ContextVar("django_delayq_leeway", default=None)


def load(name: str, using: str, read: Callable[[*Given], T], *given: *Given, kept: float | None = None) -> Panel[T]:
    """Return what ``read(*given)`` returns, or returned in this process within the last ``kept`` seconds.

    The default is that of ``tuning``. ``name`` names the panel and everything on which its content depends, but for
    the database.
    """
    key, kept = (name, using), tuning.panel_kept if kept is None else kept
    with _locks.setdefault(key, threading.Lock()):
        panel, until = _kept.get(key, (None, 0.0))
        leeway = _leeway.get() or Leeway()
        if panel is None or until + leeway.longer < time.monotonic():
            if not leeway.may_begin():
                return Panel(error=OutOfTime())
            if len(_kept) >= tuning.panels:
                _kept.clear()
                # Whoever waits for one of them still has it.
                _locks.clear()
            panel = _read(using, read, given)
            if isinstance(panel.error, OutOfTime):
                # The next page reads this panel first.
                return panel
            good_for = min(kept, tuning.panel_kept) if panel.error else kept
            _kept[key] = panel, time.monotonic() + good_for
        return panel


def problems(*panels: Panel[Any]) -> list[str]:
    """Return why some panels could not be read, each reason once."""
    return sorted({panel.problem for panel in panels if panel.problem})


@contextmanager
def reading_few() -> Iterator[None]:
    """Let panels that were read before do for longer, and read few of the others: the next page reads more."""
    end = time.monotonic() + timeouts.navigation / 2000
    token = _leeway.set(Leeway(tuning.counts_kept, end, tuning.counts_read))
    try:
        yield
    finally:
        _leeway.reset(token)


def forget() -> None:
    """Drop all panels, so that each is read anew when it is next needed."""
    _kept.clear()


def _read(using: str, read: Callable[[*Given], T], given: tuple[*Given]) -> Panel[T]:
    """Read the data of a panel; a failure is kept in the panel, so that the others are shown."""
    try:
        with statement_timeout(using, timeouts.page):
            return Panel(read(*given))
    except (TooSlow, BrokerUnavailable, DatabaseError, InterfaceError) as error:
        # The traceback would keep all objects of its frames in memory.
        return Panel(error=error.with_traceback(None))
