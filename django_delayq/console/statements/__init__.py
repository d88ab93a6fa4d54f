"""The console's SQL that depends on the database's vendor, and how long the statements of a page may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from django.db import OperationalError, connections

from ...record.sql import sessions
from ...record.sql.sessions import TooSlow
from ..console_tuning import timeouts
from .portable_console import PortableConsole
from .postgresql_console import PostgreSQLConsole

__all__ = ["OutOfTime", "TooSlow", "answering_within", "console_statements", "in_time", "is_late", "statement_timeout"]

# PostgreSQL's code of a statement that waited for a lock for too long.
LOCK_NOT_AVAILABLE = "55P03"

T = TypeVar("T")
Given = ParamSpec("Given")

# The time by which the page that this thread makes has to be ready, by the monotonic clock; None: no limit.
_end: ContextVar[float | None] = ContextVar("django_delayq_page_end", default=None)


class OutOfTime(TooSlow):
    """Other parts of the page have used up its time: this part might be fast by itself."""


def console_statements(using: str) -> PortableConsole:
    """Return the console's statements for the database behind an alias."""
    return (PostgreSQLConsole if connections[using].vendor == "postgresql" else PortableConsole)(using)


@contextmanager
def answering_within(milliseconds: int) -> Iterator[None]:
    """Bound the time of all statements inside that have a limit. Of two contexts the one that ends first counts."""
    end, outer = time.monotonic() + milliseconds / 1000, _end.get()
    token = _end.set(end if outer is None else min(end, outer))
    try:
        yield
    finally:
        _end.reset(token)


def is_late() -> bool:
    """Tell whether the time is over that ``answering_within`` gives."""
    end = _end.get()
    return end is not None and end < time.monotonic()


@contextmanager
def statement_timeout(using: str, milliseconds: int) -> Iterator[None]:
    """Raise ``TooSlow`` when a statement inside takes longer than ``milliseconds``, or the page has no time left.

    A statement for which a reader waits (``timeouts.count`` or longer) may take longer than the page's time, but then
    waits for no lock.
    """
    left = milliseconds if (end := _end.get()) is None else int((end - time.monotonic()) * 1000)
    if left <= 0:
        raise OutOfTime
    is_long = milliseconds >= timeouts.count
    try:
        with (
            sessions.lock_timeout(left) if left < milliseconds and is_long else nullcontext(),
            sessions.statement_timeout(using, milliseconds if is_long else min(milliseconds, left)),
        ):
            yield
    except TooSlow as error:
        if left < milliseconds and not is_long:
            raise OutOfTime from error
        raise
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) == LOCK_NOT_AVAILABLE:
            raise TooSlow from error
        raise


def in_time(
    using: str, milliseconds: int, read: Callable[Given, T], *given: Given.args, **named: Given.kwargs
) -> T | None:
    """Return what ``read(*given, **named)`` returns; None when a statement of it takes longer than that."""
    try:
        with statement_timeout(using, milliseconds):
            return read(*given, **named)
    except TooSlow:
        return None
