"""The actor of a move: a worker, a user, a command. Every row of the log names it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

# Characters of an actor's name.
LENGTH = 200

_actor: ContextVar[str | None] = ContextVar("django_delayq_actor", default=None)


@cache
def host() -> str:
    """Return the short name of this host."""
    return socket.gethostname().split(".")[0][:60] or "localhost"


def current() -> str:
    """Return the actor of this context: the one set with ``acting_as``, else this process."""
    return _actor.get() or f"process:{host()}/{os.getpid()}"


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """Name the actor of all moves made inside, e.g. ``"user:anna"``."""
    token = _actor.set("".join(c if c.isprintable() else "?" for c in actor)[:LENGTH])
    try:
        yield
    finally:
        _actor.reset(token)
