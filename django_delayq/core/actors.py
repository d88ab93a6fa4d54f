"""The actor of a move: a worker, a user, a command. Every row of the log names it.

A context also knows the message whose handler runs in it, if that message has a key.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from .bounds import LENGTHS

_actor: ContextVar[str | None] = ContextVar("django_delayq_actor", default=None)
# The message with a key whose handler runs in this context: its database, topic and key, and its id.
_own: ContextVar[tuple[tuple[str, str, str], int] | None] = ContextVar("django_delayq_own", default=None)


@cache
def host() -> str:
    """Return the short name of this host."""
    return socket.gethostname().split(".")[0][:60] or "localhost"


def current() -> str:
    """Return the actor of this context: the one set with ``acting_as``, else this process."""
    return _actor.get() or f"process:{host()}/{os.getpid()}"


def new_run() -> str:
    """Return what tells one run of a worker process from another: a pid that is used again must not inherit claims."""
    return secrets.token_hex(3)


def worker_name(given: str, pid: int, run: str) -> str:
    """Return the name of a worker process. It begins with the name that was ``given``, or with that of the host."""
    return f"{given or host()}/{pid}/{run}"


def of_user(name: str) -> str:
    """Return the actor that a user of the admin is."""
    return f"user:{name}"


def display_name(actor: str) -> str:
    """Return an actor as pages name it: a user by the name alone."""
    return actor.removeprefix("user:")


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """Name the actor of all moves made inside, e.g. ``"user:anna"``."""
    token = _actor.set("".join(c if c.isprintable() else "?" for c in actor)[: LENGTHS.actor])
    try:
        yield
    finally:
        _actor.reset(token)


def own_message(using: str, topic: str, key: str) -> int | None:
    """Return the id of the message whose handler runs in this context, if it has this topic and key."""
    own = _own.get()
    return own[1] if own is not None and own[0] == (using, topic, key) else None


@contextmanager
def handling(using: str, topic: str, key: str, message_id: int) -> Iterator[None]:
    """Note that the handler of a message with a key runs inside, so that it may schedule under its own key."""
    token = _own.set(((using, topic, key), message_id))
    try:
        yield
    finally:
        _own.reset(token)
