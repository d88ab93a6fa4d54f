"""Puts that are sent without waiting for their answers. The answers are read before a later put is sent.

A producer has committed its message already. Redis only has to learn of it soon, so the answer is not worth a round
trip. With many puts it is not even worth a check of the socket for each. An error in a late answer is raised by a later
put. A put is sent once more when it may have been lost with its connection, or when the server did not know the script.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import redis

from ..exceptions import ForeignBroker
from . import scripts
from .connection import PinnedConnection, pop_idle
from .keys import Keys

# With more unread answers than this on one connection, a put waits for the oldest first.
MAX_UNREAD = 16
# A put first reads answers when there are this many unread ones, or this many seconds after the last reading. A put
# that was lost between two readings is sent again after the second.
READ_AT_UNREAD = 8
READ_INTERVAL = 0.01


class UnreadPut(NamedTuple):
    """A put whose answer was not read, and when it was sent (monotonic, seconds)."""

    keys: Keys
    identity: str
    now: str | int
    entries: list[int]
    sent_at: float


class PipelinedConnection(PinnedConnection):
    """One connection, and the puts on it whose answers were not read. ``timeout``: seconds for each answer."""

    def __init__(self, pool: redis.ConnectionPool, timeout: float) -> None:
        super().__init__(pool)
        self.unread: deque[UnreadPut] = deque()
        self._timeout = timeout
        # A new connection may lead to a new server: the first call sends the script in full.
        self._script_is_known = False
        self._read_at = time.monotonic()

    def put(self, keys: Keys, identity: str, now: str | int, entries: list[int], *, mode: str = "set") -> int:
        """Send a put; return how many earlier answers were read. Raises their errors, or that an answer is late."""
        read = 0
        if len(self.unread) >= READ_AT_UNREAD or time.monotonic() - self._read_at > READ_INTERVAL:
            read = self.read(MAX_UNREAD)
        if not self.unread and self.raw.can_read(0):
            raise redis.ConnectionError("closed by the server")
        self._send(keys, identity, now, entries, mode)
        return read

    def read(self, leave: int) -> int:
        """Read the answers that have come, and wait while more than ``leave`` have not; return how many were read.

        Raises the first error only after all other answers were read: the caller then closes the connection, and every
        put that was sent again has to arrive before that.
        """
        read = 0
        refused: redis.ResponseError | ForeignBroker | None = None
        self._read_at = time.monotonic()
        while self.unread:
            oldest = self.unread[0]
            if len(self.unread) <= leave and not self.raw.can_read(0):
                if time.monotonic() - oldest.sent_at > self._timeout:
                    raise redis.TimeoutError(f"no answer within {self._timeout:g} s")
                break
            try:
                if self.raw.read_response(disconnect_on_error=False)[0] == b"foreign":
                    refused, leave = refused or ForeignBroker(), 0
            except redis.exceptions.NoScriptError:
                self._script_is_known = False
                # Later puts of the same messages may have arrived: this one must not undo them.
                self._send(oldest.keys, oldest.identity, oldest.now, oldest.entries, "fill")
            except redis.ResponseError as error:
                refused, leave = refused or error, 0
            self.unread.popleft()
            read += 1
        if refused is not None:
            raise refused
        return read

    def _send(self, keys: Keys, identity: str, now: str | int, entries: list[int], mode: str) -> None:
        self.raw.send_command(*_head(keys, identity, now, mode, not self._script_is_known), *entries)
        self._script_is_known = True
        self.unread.append(UnreadPut(keys, identity, now, entries, time.monotonic()))


@lru_cache(maxsize=256)
def _head(keys: Keys, identity: str, now: str | int, mode: str, in_full: bool) -> list[Any]:
    """Return the command without its entries."""
    return scripts.load("put").command(keys, in_full=in_full, now=now, mode=mode, identity=identity)


class PipelinedConnections:
    """The pipelined connections of a broker: as many as there are threads that put at the same time."""

    def __init__(self, pool: Callable[[], redis.ConnectionPool], timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._idle: deque[PipelinedConnection] = deque()
        # At the end of the process too: a socket that is closed with unread answers in it drops what the server has not
        # read yet.
        self.close = weakref.finalize(self, _read_and_close, self._idle)

    def put(self, keys: Keys, identity: str, now: str | int, entries: list[int]) -> int:
        """Send a put; return how many answers of earlier ones were read. Raises any error of redis-py."""
        connection = pop_idle(self._idle)
        lost: Iterable[UnreadPut] = ()
        if connection is not None:
            try:
                return self._put(connection, keys, identity, now, entries)
            except redis.ConnectionError:
                # The server closed the connection while it was idle, perhaps before it read all puts.
                lost = connection.unread
        return self._put(PipelinedConnection(self._pool(), self._timeout), keys, identity, now, entries, lost)

    def _put(
        self,
        connection: PipelinedConnection,
        keys: Keys,
        identity: str,
        now: str | int,
        entries: list[int],
        lost: Iterable[UnreadPut] = (),
    ) -> int:
        try:
            for unread in lost:
                connection.put(unread.keys, unread.identity, unread.now, unread.entries, mode="fill")
            read = connection.put(keys, identity, now, entries)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return read

    def flush(self) -> None:
        """Wait for all answers on the connections that no thread is using. Raises their errors."""
        flushed = []
        try:
            while (connection := pop_idle(self._idle)) is not None:
                try:
                    connection.read(0)
                except BaseException:
                    connection.close()
                    raise
                flushed.append(connection)
        finally:
            self._idle.extend(reversed(flushed))


def _read_and_close(idle: deque[PipelinedConnection]) -> None:
    """Wait for all answers and close the connections. It holds no reference to their owner, which may be gone."""
    while idle:
        connection = idle.pop()
        if connection.is_ours:
            with contextlib.suppress(Exception):
                connection.read(0)
        connection.close()
