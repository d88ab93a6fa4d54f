"""Clocks that a test gives a broker."""

from __future__ import annotations

from collections.abc import Callable

from django_delayq.core.clock import SECOND


def stopped_at(tenths: int) -> Callable[[], float]:
    """Return a clock that stands still within a tenth of a millisecond since 1970."""
    seconds = (tenths + 0.5) / SECOND
    return lambda: seconds
