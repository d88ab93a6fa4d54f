"""The numbers of the console, as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from django_delayq.console.console_tuning import timeouts, tuning
from tests.support.tuning import tunable


@pytest.fixture
def tuned() -> Iterator[Callable[..., None]]:
    """Give the console other numbers for the time of a test: ``tuned(at_once=2)``."""
    with tunable(tuning) as give:
        yield give


@pytest.fixture
def timed() -> Iterator[Callable[..., None]]:
    """Give statements of pages another time limit: ``timed(20, "long")``, in milliseconds; without names, all."""
    with tunable(timeouts) as give:
        yield lambda milliseconds, *kinds: give(**dict.fromkeys(kinds or timeouts.__slots__, milliseconds))
