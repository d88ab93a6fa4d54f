"""Stands in for the resolver of a host whose name server may fall silent."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

# The name of the host of Redis.
REDIS_HOST = "redis.torture"
# The C library gives up so many seconds after it has asked a name server that does not answer: twice 5 s.
GIVES_UP = 10.0

_resolve = socket.getaddrinfo


def take_its_place() -> None:
    """Have this process ask here for the name of the host of Redis, from now on."""
    socket.getaddrinfo = _find


def _find(host: Any, *args: Any, **options: Any) -> Any:
    """Find an address, or fail like the C library when the name server stays silent. Nobody asks it for a number."""
    if host == REDIS_HOST:
        silent, deadline = Path(os.environ["TORTURE_SILENT"]), time.monotonic() + GIVES_UP
        while silent.exists():
            if time.monotonic() > deadline:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            time.sleep(0.02)
        host = "127.0.0.1"
    return _resolve(host, *args, **options)
