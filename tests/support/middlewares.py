"""Middleware around the handlers for a part of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django_delayq.middleware import Middleware, install, remove


@contextmanager
def installed(*given: Middleware) -> Iterator[None]:
    """Have middleware around the handlers until the block ends, the first outermost."""
    with ExitStack() as stack:
        for one in given:
            install(one)
            stack.callback(remove, one)
        yield
