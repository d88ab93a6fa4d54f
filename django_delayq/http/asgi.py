"""The door under ASGI: a poll that waits holds no thread, and a body that is too large is not read."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from django.core.handlers.asgi import ASGIRequest
from django.db import close_old_connections, connections
from django.http import HttpResponse
from django.urls import Resolver404, resolve

from . import calls, tokens, views

T = TypeVar("T")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
# The types of servers and frameworks differ, so any is accepted.
Application = Callable[[Any, Any, Any], Awaitable[None]]

# Whether the connection of a request is closing: a server reports it some moments later, and drops what is sent until
# then.
Closing = Callable[[Mapping[str, Any]], bool]

# The threads in which requests ask the database, each with connections of its own.
THREADS = 4
# The threads do not end with a request, as those of Django do, so they keep their connections. Seconds.
CONNECTION_MAX_AGE = 60
# The longest wait for a body. Seconds.
BODY_TIMEOUT = 60
# The status of a request whose client is gone.
GONE = 499


class _ClientGone(Exception):
    """The client is gone."""


class Door:
    """Answers requests for the addresses of the door, and has ``project`` answer all others.

    In asgi.py: ``application = Door(get_asgi_application())``. No middleware of the project runs for the door.
    ``body_timeout`` (seconds) is the longest wait for the body of a request.
    """

    def __init__(
        self,
        project: Application | None = None,
        urlconf: str | None = None,
        closing: Closing = lambda scope: False,
        body_timeout: float = BODY_TIMEOUT,
    ) -> None:
        self._project, self._urlconf, self._closing, self._body_timeout = project, urlconf, closing, body_timeout
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="delayq-http", initializer=_keep_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope) if scope["type"] == "http" else None
        if found is not None:
            await self._serve(*found, scope, receive, send)
        elif self._project is not None:
            await self._project(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[views.View, Mapping[str, str]] | None:
        """Return the view of the door for an address, and the names in that."""
        with contextlib.suppress(Resolver404):
            match = resolve(scope["path"].removeprefix(scope.get("root_path", "")), self._urlconf)
            if match.func in views.DOOR:
                return match.func, match.kwargs
        return (views.unknown, {}) if self._project is None else None

    async def _serve(
        self, view: views.View, names: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            request = ASGIRequest(scope, io.BytesIO(await self._read(scope, receive)))
        except _ClientGone:
            return
        except UnicodeDecodeError:
            response: HttpResponse | None = views.refused(tokens.RequestRefused(400, "invalid query"))
        except tokens.RequestRefused as error:
            response = views.refused(error)
            if scope["http_version"].startswith("1"):
                # The rest of the body follows, and not the next request.
                response["Connection"] = "close"
        else:
            attempt = await self.run(views.attempt, view, request, names)
            response = await self._response(*attempt, request, receive)
        if response is not None:
            await _send(response, send)

    async def _response(
        self, call: calls.Call | None, response: HttpResponse | None, request: ASGIRequest, receive: Receive
    ) -> HttpResponse | None:
        """Return the response. None: the client is gone, and the messages that were claimed for it went back."""
        if not isinstance(call, calls.Consume):
            return response
        gone = asyncio.ensure_future(receive())
        try:
            # A client that is gone already is noticed after this.
            await asyncio.sleep(0)
            if response is None:
                response = await self._poll(call, gone)
            if gone.done() or self._closing(request.scope):
                await self.run(call.settle, GONE)
                return None
            return response
        finally:
            gone.cancel()

    async def _poll(self, call: calls.Consume, gone: asyncio.Future[Any]) -> HttpResponse | None:
        """Wait until there are jobs, or the client is gone."""
        waits = asyncio.ensure_future(call.await_(self.run))
        try:
            await asyncio.wait((waits, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The call gives back the messages that it is about to claim.
            waits.cancel()
        await asyncio.wait([waits])
        return None if waits.cancelled() else await self.run(views.step, call, waits.result)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request, read as far as it may be. Raises ``RequestRefused`` and ``_ClientGone``."""
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        read = bytearray()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout):
                while max([len(read), *lengths]) <= calls.LARGEST_BODY:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    read += message.get("body", b"")
                    if not message.get("more_body"):
                        return bytes(read)
                raise tokens.RequestRefused(413, "body too large")
        raise tokens.RequestRefused(400, "failed to read body")

    def run(self, act: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Make a call in a thread that has connections to the databases."""
        return asyncio.get_running_loop().run_in_executor(self._threads, _with_connections, act, *args)


def _keep_connections() -> None:
    for alias in connections:
        connection = connections[alias]
        connection.settings_dict = {**connection.settings_dict, "CONN_MAX_AGE": CONNECTION_MAX_AGE}


def _with_connections(act: Callable[..., T], *args: Any) -> T:
    # Close a connection that broke or is old.
    close_old_connections()
    return act(*args)


async def _send(response: HttpResponse, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})
