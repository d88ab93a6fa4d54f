"""The broker says when messages fall due. Redis is the broker, or the database when there is no Redis.

Other packages import only this module, ``base``, ``database``, ``broker_tuning`` and ``publisher``: the modules that
implement Redis are private.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from ..core.known_record import known_identity
from ..project import conf
from .address import describe, problem

if TYPE_CHECKING:
    from .redis import RedisBroker
else:
    # For annotations only: redis-py is imported when somebody needs a connection.
    RedisBroker = object

__all__ = ["WORKER_TIMEOUT", "RedisBroker", "check_settings", "describe", "index", "problem"]

# A worker waits this long for an answer before it considers Redis unavailable. Seconds.
WORKER_TIMEOUT = 2.0


def index(
    using: str, *, timeout: float = WORKER_TIMEOUT, identity: Callable[[], str] | None = None
) -> RedisBroker | None:
    """Make a broker on the project's Redis for a database alias; None when the settings name no Redis.

    ``timeout`` is in seconds, for connecting and for each answer. ``identity`` returns the identity of the database,
    for a caller that must not query the record; by default the broker asks the record for that and
    for the time. The caller closes the broker. Raises ``ImproperlyConfigured`` when the settings name no possible
    Redis.
    """
    settings = check_settings()
    if settings.REDIS is None:
        return None
    # Imported here: the keys need no models, and only a caller that needs a connection should wait for redis-py.
    from ..record import reads
    from .redis import RedisBroker

    if identity is not None:
        return RedisBroker(settings, using, timeout=timeout, identity=identity)

    def asked() -> str:
        return known_identity(using) or reads.identity(using)

    return RedisBroker(settings, using, timeout=timeout, identity=asked, now=partial(reads.known_now, using))


def check_settings() -> conf.Settings:
    """Return the settings.

    Raises ``ImproperlyConfigured`` for impossible ones, among them a REDIS to which nothing connects.
    """
    settings = conf.get()
    if settings.REDIS is not None and (found := problem(settings)):
        raise ImproperlyConfigured(f"DELAYQ['REDIS'] is impossible. {found}")
    return settings
