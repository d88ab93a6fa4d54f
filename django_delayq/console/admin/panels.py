"""Panels: parts of a page that a process reads once every few seconds for all users, each with its own time limit.

A panel that cannot be read shows why and does not affect the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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


def load(name: str, using: str, read: Callable[[*Given], T], *given: *Given, kept: float | None = None) -> Panel[T]:
    """Return what ``read(*given)`` returns, or returned in this process within the last ``kept`` seconds.

    The default is that of ``tuning``. ``name`` names the panel and everything on which its content depends, but for
    the database.
    """
    key, kept = (name, using), tuning.panel_kept if kept is None else kept
    with _locks.setdefault(key, threading.Lock()):
        panel, until = _kept.get(key, (None, 0.0))
        if panel is None or until < time.monotonic():
            if len(_kept) >= tuning.panels:
                _kept.clear()
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


def keep(name: str, using: str, value: object, seconds: float) -> None:
    """Keep a value for this number of seconds."""
    _kept[name, using] = Panel(value), time.monotonic() + seconds


def kept(name: str, using: str) -> Any:
    """Return a value that is kept, or None."""
    panel, until = _kept.get((name, using), (None, 0.0))
    return panel.value if panel is not None and until > time.monotonic() else None


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
