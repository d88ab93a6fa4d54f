"""The HTTP door as a server by itself, on Uvicorn: it serves the addresses of lmstfy's wire and nothing else."""

from __future__ import annotations

import socket

from django.core.exceptions import ImproperlyConfigured
from django.urls import re_path

from ..management._common import Interruptible
from ..pull import waiters
from . import urls, views
from .asgi import Door

try:
    import uvicorn
except ImportError as error:
    raise ImproperlyConfigured(
        "The HTTP server needs the package uvicorn: pip install 'django-delayq[http]'"
    ) from error

# After a signal the answers that are on their way have this time. Seconds.
GRACEFUL_TIMEOUT = 30

urlpatterns = [*urls.urlpatterns, re_path("", views.unknown)]


class _DoorServer(uvicorn.Server):
    """Answers the polls that wait when a signal ends it."""

    def __init__(self, config: uvicorn.Config, interrupted: Interruptible) -> None:
        super().__init__(config)
        self._interrupted = interrupted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # A signal that came before Uvicorn caught them.
        self.should_exit = self.should_exit or self._interrupted.asked()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiters.end_waits()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ``OSError``."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve(listener: socket.socket, interrupted: Interruptible) -> None:
    """Answer requests until SIGTERM or SIGINT. What waits then is answered first; a second SIGINT ends it at once."""
    config = uvicorn.Config(
        Door(urlconf=__name__),
        # Not Uvicorn's own log: a token may stand in the query of an address.
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_TIMEOUT,
        ws="none",
    )
    _DoorServer(config, interrupted).run([listener])
