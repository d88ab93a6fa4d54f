"""Receivers of signals, for as long as a block of code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.dispatch import Signal


@contextmanager
def receiving(receiver: Callable[..., object], *to: Signal) -> Iterator[None]:
    """Have a function receive signals until the block ends."""
    try:
        for signal in to:
            signal.connect(receiver, weak=False)
        yield
    finally:
        for signal in to:
            signal.disconnect(receiver)


@contextmanager
def heard(*to: Signal) -> Iterator[list[dict[str, Any]]]:
    """Return the arguments of the signals that are sent until the block ends, in their order."""
    arguments: list[dict[str, Any]] = []
    with receiving(lambda signal, **given: arguments.append(given), *to):
        yield arguments
