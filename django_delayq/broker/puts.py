"""Puts that are sent without waiting for their answers. The answer to one is read before the next one is sent.

A producer has committed its message already. Redis only has to learn of it soon, so the answer is not worth a round
trip. An error in a late answer is raised by the next put, which is sent all the same. A put is sent once more when it
may have been lost with its connection, or when the server did not know the script.

No more than one put on a connection has no answer yet. A process that ends at once closes its sockets; the kernel drops
what the server has not read yet from a socket that holds an answer which nobody read. So it could drop a second put.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import redis

from ..core import failpoints
from . import scripts
from .connection import PinnedConnection, is_closed, pop_idle
from .keys import Keys


class SentPut(NamedTuple):
    """A put as it was sent."""

    keys: Keys
    identity: str
    now: int
    entries: list[int]


class PutConnection(PinnedConnection):
    """One connection, and the last put on it if its answer was not read."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self.unread: SentPut | None = None
        # A new connection may lead to a new server: the first call sends the script in full.
        self._script_is_known = False

    def read(self) -> bool:
        """Wait for the answer to the last put unless it was read; return whether it was read now. Raises its error."""
        if self.unread is None:
            return False
        try:
            self.raw.read_response(disconnect_on_error=False)
        except redis.exceptions.NoScriptError:
            self._script_is_known = False
            # Another process may have put newer due times of these messages meanwhile: this put must not undo that.
            self.write(self.unread, "fill")
            self.raw.read_response(disconnect_on_error=False)
        self.unread = None
        return True

    def write(self, put: SentPut, mode: str = "set") -> None:
        """Write a put to the socket, after the answer to the last one was read."""
        command = scripts.load("put").command(
            put.keys, put.entries, in_full=not self._script_is_known, now=put.now, mode=mode, identity=put.identity
        )
        self.raw.send_command(*command)
        self._script_is_known = True
        self.unread = put


class PutConnections:
    """The connections of a broker for puts: as many as there are threads that put at the same time.

    Any thread may call it. The idle ones are in a deque, whose operations are atomic: the thread that pops a connection
    owns it until it appends it again.
    """

    def __init__(self, pool: Callable[[], redis.ConnectionPool]) -> None:
        self._pool = pool
        self._idle: deque[PutConnection] = deque()
        # At the end of the process too, so that no answer is left unread.
        self.close = weakref.finalize(self, _read_and_close, self._idle)

    def send(self, put: SentPut) -> bool:
        """Send a put; return whether an answer to an earlier one was read. Raises any error of redis-py."""
        failpoints.reach("before_put")
        idle, lost = pop_idle(self._idle), None
        refusal: redis.ResponseError | None = None
        while True:
            connection = idle or PutConnection(self._pool())
            try:
                if lost is not None:
                    connection.write(lost, "fill")
                answered = connection.read()
                if is_closed(connection.raw):
                    raise redis.ConnectionError("closed by the server")
                connection.write(put)
                break
            except BaseException as error:
                connection.close()
                if isinstance(error, redis.ResponseError) and refusal is None:
                    # The last put was refused, perhaps by a server that has become a replica.
                    idle, lost, refusal = None, None, error
                elif idle is not None and isinstance(error, redis.ConnectionError | redis.TimeoutError):
                    # The server closed the connection while it was idle, perhaps before it read the last put; or the
                    # network dropped it without notice.
                    idle, lost = None, connection.unread
                else:
                    raise
        self._idle.append(connection)
        failpoints.reach("after_put")
        if refusal is not None:
            raise refusal
        return answered

    def flush(self) -> None:
        """Wait for all answers on the connections that no thread is using. Raises their errors."""
        flushed = []
        try:
            while (connection := pop_idle(self._idle)) is not None:
                try:
                    connection.read()
                except BaseException:
                    connection.close()
                    raise
                flushed.append(connection)
        finally:
            self._idle.extend(reversed(flushed))


def _read_and_close(idle: deque[PutConnection]) -> None:
    """Wait for all answers and close the connections. It holds no reference to their owner, which may be gone."""
    while idle:
        connection = idle.pop()
        if connection.pid == os.getpid():
            with contextlib.suppress(Exception):
                connection.read()
        connection.close()
