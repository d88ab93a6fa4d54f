"""The broker says when messages fall due. Redis is the broker, or the database when there is no Redis.

Other packages import only this module, ``base`` and ``database``: the modules that implement Redis are private.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from ..core.record_clock import record_clock
from ..project import conf
from .address import describe, problem

if TYPE_CHECKING:
    from .base import Index

__all__ = ["WORKER_TIMEOUT", "check_settings", "describe", "index", "problem"]

# A worker waits this long for an answer before it considers Redis unavailable. Seconds.
WORKER_TIMEOUT = 2.0


def index(
    using: str, *, timeout: float = WORKER_TIMEOUT, identity_of: Callable[[str], str] | None = None
) -> Index | None:
    """Make a broker on the project's Redis for a database alias; None when the settings name no Redis.

    ``timeout`` is in seconds, for connecting and for each answer. ``identity_of`` returns the identity of the database
    behind an alias, for a caller that must not query the record; by default the broker asks the record for that and
    for the time. The caller closes the broker. Raises ``ImproperlyConfigured`` when the settings name no possible
    Redis.
    """
    settings = check_settings()
    if settings.REDIS is None:
        return None
    # Imported here: it imports redis-py, which only who needs a connection should wait for.
    from .redis import RedisBroker

    find = identity_of or _identity
    now = record_clock(using).seconds if identity_of else lambda: _now(using)
    return RedisBroker(settings, using, timeout=timeout, identity=lambda: find(using), now=now)


def check_settings() -> conf.Settings:
    """Return the settings.

    Raises ``ImproperlyConfigured`` for impossible ones, among them a REDIS to which nothing connects.
    """
    settings = conf.get()
    if settings.REDIS is not None and (found := problem(settings)):
        raise ImproperlyConfigured(f"DELAYQ['REDIS'] is impossible. {found}")
    return settings


def _identity(using: str) -> str:
    # Imported here: the scripts and the keys need no models.
    from ..record.identity import identity, known_identity

    return known_identity(using) or identity(using)


def _now(using: str) -> float:
    known = record_clock(using)
    if not known.is_sure:
        from ..record import transitions

        # While the database is away, Redis is looked after as before.
        with contextlib.suppress(DatabaseError):
            transitions.now(using)
    return known.seconds()
