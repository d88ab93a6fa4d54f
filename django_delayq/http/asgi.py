"""The door under ASGI: a poll that waits holds no thread, and a body that is too large is not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from django.db import close_old_connections, connections
from django.urls import Resolver404, resolve

from . import calls, tokens, views
from .exchange import LARGEST_BODY, Reply, Request, RequestRefused

T = TypeVar("T")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
# The types of servers and frameworks differ, so any is accepted.
Application = Callable[[Any, Any, Any], Awaitable[None]]

# Whether the connection of a request is closing. ``receive`` reports it some moments later, and what is sent until then
# is dropped.
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
    """Answers requests for the addresses of the door, and has ``project`` answer all others; without it, refuses them.

    In asgi.py: ``application = Door(get_asgi_application())``. No middleware of the project runs for the door.
    ``body_timeout`` (seconds) is the longest wait for the body of a request.
    """

    def __init__(
        self,
        project: Application | None = None,
        urlconf: str | None = None,
        closing: Closing | None = None,
        body_timeout: float = BODY_TIMEOUT,
    ) -> None:
        self._project, self._urlconf, self._closing, self._body_timeout = project, urlconf, closing, body_timeout
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="delayq-http", initializer=_keep_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._path(scope) if scope["type"] == "http" else None
        if path is not None:
            await self._serve(path, scope, receive, send)
        elif self._project is not None:
            await self._project(scope, receive, send)

    def _path(self, scope: Scope) -> str | None:
        """Return an address without the prefix of the door; None: the project answers the request."""
        address: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._project is None:
            return address.removeprefix("/")
        with contextlib.suppress(Resolver404):
            match = resolve(address, self._urlconf)
            if match.func is views.door:
                return str(match.kwargs["path"])
        return None

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Reply | None
        try:
            request = _request(path, scope, await self._read(scope, receive))
        except _ClientGone:
            return
        except RequestRefused as error:
            # The rest of the body follows, and not the next request.
            closes = {"Connection": "close"} if scope["http_version"].startswith("1") else {}
            answer = error.answer._replace(headers=closes)
        else:
            answer = await self._answer(request, scope, receive)
        if answer is not None:
            await _send(answer, send)

    async def _answer(self, request: Request, scope: Scope, receive: Receive) -> Reply | None:
        """Return the answer. None: the client is gone, and the messages that were claimed for it went back."""
        call, answer = await self.run(views.attempt, request)
        if tokens.used:
            # Beside the answer.
            self._threads.submit(_with_connections, tokens.write_uses)
        if isinstance(call, calls.Consume):
            if answer is None:
                answer = await self._poll(call, receive)
            if answer is None or await self._is_gone(scope, receive):
                await self.run(call.settle, GONE)
                return None
        return answer

    async def _poll(self, call: calls.Consume, receive: Receive) -> Reply | None:
        """Wait until there are jobs, or the client is gone."""
        waits, gone = asyncio.ensure_future(call.await_(self.run)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait((waits, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            # The call gives back the messages that it is about to claim.
            waits.cancel()
        await asyncio.wait([waits])
        return None if waits.cancelled() else await self.run(views.step, call, waits.result)

    async def _is_gone(self, scope: Scope, receive: Receive) -> bool:
        """Return whether the client is gone, as far as the server knows at this moment."""
        if self._closing is not None:
            return self._closing(scope)
        gone = asyncio.ensure_future(receive())
        # A client that is gone already is noticed after this.
        await asyncio.sleep(0)
        is_gone = gone.done()
        gone.cancel()
        return is_gone

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request, read as far as it may be. Raises ``RequestRefused`` and ``_ClientGone``."""
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        read = bytearray()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout):
                while max([len(read), *lengths]) <= LARGEST_BODY:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    read += message.get("body", b"")
                    if not message.get("more_body"):
                        return bytes(read)
                raise RequestRefused(413, "body too large")
        raise RequestRefused(400, "failed to read body")

    def run(self, act: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Make a call in a thread that has connections to the databases."""
        return asyncio.get_running_loop().run_in_executor(self._threads, _with_connections, act, *args)


def _keep_connections() -> None:
    for alias in connections:
        connection = connections[alias]
        # A pool keeps connections itself, and allows no other to do so.
        if not connection.settings_dict.get("OPTIONS", {}).get("pool"):
            connection.settings_dict = {**connection.settings_dict, "CONN_MAX_AGE": CONNECTION_MAX_AGE}


def _with_connections(act: Callable[..., T], *args: Any) -> T:
    # Close a connection that broke or is old.
    close_old_connections()
    try:
        return act(*args)
    finally:
        # One of a pool goes back.
        close_old_connections()


def _request(path: str, scope: Scope, body: bytes) -> Request:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return Request(scope["method"], path, dict(query), headers, body)


async def _send(answer: Reply, send: Send) -> None:
    headers, body = answer.written()
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
