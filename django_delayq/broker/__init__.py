"""The broker says when messages fall due. Redis is the broker, or the database when there is no Redis.

Other packages import only this module, ``base`` and ``database``: the modules that implement Redis are private.
"""

from __future__ import annotations

from .. import conf
from .base import Index
from .connection import describe
from .redis import RedisBroker

__all__ = ["WORKER_TIMEOUT", "describe", "index"]

# A worker waits this long for an answer before it considers Redis unavailable. Seconds.
WORKER_TIMEOUT = 2.0


def index(using: str, *, timeout: float = WORKER_TIMEOUT) -> Index | None:
    """Make a broker on the project's Redis for a database alias; None when the settings name no Redis.

    ``timeout`` is in seconds, for connecting and for each answer. The caller closes the broker.
    """
    settings = conf.get()
    return None if settings.REDIS is None else RedisBroker(settings, using, timeout=timeout)
