"""The HTTP door as a server by itself, on Uvicorn: it serves the addresses of lmstfy's wire and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..management._common import Interruptible
from ..pull import waiters
from .asgi import Door

try:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise ImproperlyConfigured(
        "The HTTP server needs the package uvicorn: pip install 'django-delayq[http]'"
    ) from error

# After a signal the server waits up to this time for the answers that are on their way. Seconds.
GRACEFUL_TIMEOUT = 30


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Gives the door the connection of each request."""

    app_state: dict[str, Any]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": transport}


def _closing(scope: Mapping[str, Any]) -> bool:
    is_closing: bool = scope["state"]["connection"].is_closing()
    return is_closing


class _DoorServer(uvicorn.Server):
    """Answers the polls that wait when a signal ends it."""

    def __init__(self, config: uvicorn.Config, interrupted: Interruptible) -> None:
        super().__init__(config)
        self._interrupted = interrupted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # A signal may have come before Uvicorn caught signals.
        self.should_exit = self.should_exit or self._interrupted.asked()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiters.end_waits()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ``OSError``."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Connections inherit TCP_NODELAY. Without it the body of an answer waits until the client acknowledges the head: 40
    # ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(listener: socket.socket, interrupted: Interruptible) -> None:
    """Answer requests until SIGTERM or SIGINT, and then those that wait; a second SIGINT ends the server at once."""
    config = uvicorn.Config(
        Door(closing=_closing),
        http=_Protocol,
        # The header of a proxy would change the address of a request.
        proxy_headers=False,
        # Not Uvicorn's own log: a token may stand in the query of an address.
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_TIMEOUT,
        ws="none",
    )
    _DoorServer(config, interrupted).run([listener])
