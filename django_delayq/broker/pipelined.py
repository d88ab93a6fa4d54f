"""Puts that are sent without waiting for their answers, which are read before a later one is sent.

Who schedules a message has committed it already; that Redis knows of it is a hint, and the reply to a hint is not worth
a round trip, nor, among many, a look at the socket. What an answer says late is acted on late: an error is raised by a
put after it. What may have been lost with its connection, or because the server did not know the script, is sent once
more.
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

from . import scripts
from .connection import PinnedConnection, rested
from .keys import Keys

# With so many answers still to come, one of them is waited for before more is sent.
AHEAD = 16
# Answers are looked for when there may be so many of them, or so many seconds after the last look. What was lost
# between two looks is sent again after the second.
TOGETHER = 8
LOOK = 0.01


class Sent(NamedTuple):
    """One call of the script, and when it was sent."""

    keys: Keys
    now: str | int
    entries: list[int]
    at: float


class PipelinedConnection(PinnedConnection):
    """One connection, and the puts on it whose answers were not read."""

    def __init__(self, pool: redis.ConnectionPool, patience: float) -> None:
        super().__init__(pool)
        self.unread: deque[Sent] = deque()
        self._patience = patience
        # Behind a new connection there may be a new server: the first call brings the script along.
        self._is_known = False
        self._looked = time.monotonic()

    def put(self, keys: Keys, now: str | int, entries: list[int], *, mode: str = "set") -> int:
        """Send it; how many answers of earlier ones have come. Raises what they say, or that they do not come."""
        read = 0
        if len(self.unread) >= TOGETHER or time.monotonic() - self._looked > LOOK:
            read = self.read(AHEAD)
        if not self.unread and self.raw.can_read(0):
            raise redis.ConnectionError("closed by the server")
        self._send(keys, now, entries, mode)
        return read

    def read(self, leave: int) -> int:
        """Read the answers that are there, waiting while more than ``leave`` are not; how many there were.

        Raises the first that was an error, when all others have been read too: who is told of one closes the line, and
        what is sent again must have arrived before.
        """
        read = 0
        refused: redis.ResponseError | None = None
        self._looked = time.monotonic()
        while self.unread:
            sent = self.unread[0]
            if len(self.unread) <= leave and not self.raw.can_read(0):
                if time.monotonic() - sent.at > self._patience:
                    raise redis.TimeoutError(f"no answer within {self._patience:g} s")
                break
            try:
                self.raw.read_response(disconnect_on_error=False)
            except redis.exceptions.NoScriptError:
                self._is_known = False
                # Later puts of the same messages may have come through: this one must not undo them.
                self._send(sent.keys, sent.now, sent.entries, "fill")
            except redis.ResponseError as error:
                refused, leave = refused or error, 0
            self.unread.popleft()
            read += 1
        if refused is not None:
            raise refused
        return read

    def _send(self, keys: Keys, now: str | int, entries: list[int], mode: str) -> None:
        self.raw.send_command(*_head(keys, now, mode, not self._is_known), *entries)
        self._is_known = True
        self.unread.append(Sent(keys, now, entries, time.monotonic()))


@lru_cache(maxsize=256)
def _head(keys: Keys, now: str | int, mode: str, in_full: bool) -> list[Any]:
    """The command without its entries."""
    return scripts.load("put").command(
        in_full=in_full,
        delayed=keys.delayed,
        ready=keys.ready,
        meta=keys.meta,
        wake=keys.wake,
        now=now,
        mode=mode,
    )


class PipelinedConnections:
    """As many lines as there are threads that put at the same time."""

    def __init__(self, pool: Callable[[], redis.ConnectionPool], patience: float) -> None:
        self._pool = pool
        self._patience = patience
        self._resting: deque[PipelinedConnection] = deque()
        # A socket that is closed with answers in it takes along what the server has not read yet.
        self.close = weakref.finalize(self, _end, self._resting)

    def put(self, keys: Keys, now: str | int, entries: list[int]) -> int:
        """Send it; how many answers of earlier ones were good. Raises ``RedisError`` and ``OSError``."""
        connection = rested(self._resting)
        lost: Iterable[Sent] = ()
        if connection is not None:
            try:
                return self._put(connection, keys, now, entries)
            except redis.ConnectionError:
                # Closed by the server while it rested: what was under way may not have been read.
                lost = connection.unread
        return self._put(PipelinedConnection(self._pool(), self._patience), keys, now, entries, lost)

    def _put(
        self, connection: PipelinedConnection, keys: Keys, now: str | int, entries: list[int], lost: Iterable[Sent] = ()
    ) -> int:
        try:
            for sent in lost:
                connection.put(sent.keys, sent.now, sent.entries, mode="fill")
            read = connection.put(keys, now, entries)
        except BaseException:
            connection.close()
            raise
        self._resting.append(connection)
        return read

    def settle(self) -> None:
        """Wait for all answers on the lines that no thread is using. Raises what they say."""
        settled = []
        try:
            while (connection := rested(self._resting)) is not None:
                try:
                    connection.read(0)
                except BaseException:
                    connection.close()
                    raise
                settled.append(connection)
        finally:
            self._resting.extend(reversed(settled))


def _end(resting: deque[PipelinedConnection]) -> None:
    """At the end of the process at the latest."""
    while resting:
        connection = resting.pop()
        if connection.is_ours:
            with contextlib.suppress(redis.RedisError, OSError):
                connection.read(0)
        connection.close()
