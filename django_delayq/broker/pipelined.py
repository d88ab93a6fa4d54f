"""Puts that are sent without waiting for their answers. The answers are read before a later put is sent.

A producer has committed its message already. Redis only has to learn of it soon, so the answer is not worth a round
trip. With many puts it is not even worth a check of the socket for each. An error in a late answer is raised by a later
put. A put is sent once more when it may have been lost with its connection, or when the server did not know the script.

To wake Redis costs more than a put itself. So a put that is in no hurry, and follows another one closely, is given to
the kernel with the flag MSG_MORE. The kernel keeps it back, and sends it with the next put that has no such flag, or by
itself after ``KEPT_FOR``. No thread or timer of this process has a part in that.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import redis

from ..core.exceptions import ForeignBroker
from . import scripts
from .connection import PinnedConnection, is_plain_tcp, pop_idle, socket_of
from .keys import Keys

# With more unread answers than this on one connection, a put waits for the oldest first.
MAX_UNREAD = 16
# A put first reads answers when there are this many unread ones, or this many seconds after the last reading. A put
# that was lost between two readings is sent again after the second.
READ_AT_UNREAD = 8
READ_INTERVAL = 0.01
# A put in no hurry is kept back if the last one left less than these seconds ago. No more than MAX_UNREAD are.
GATHER_INTERVAL = 0.01
# The kernel keeps a put back for this long at most. Seconds.
KEPT_FOR = 0.2
# None: this system has no such flag, and no put is kept back.
MSG_MORE: int | None = getattr(socket, "MSG_MORE", None)


@dataclass(slots=True)
class UnreadPut:
    """A put whose answer was not read, and when it was sent or will be at the latest (monotonic, seconds)."""

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
        self._sent_at = -math.inf
        # The puts that are kept back. They are the last of the unread ones.
        self._kept: list[UnreadPut] = []
        self._can_keep = MSG_MORE is not None and is_plain_tcp(socket_of(self.raw))

    def put(
        self,
        keys: Keys,
        identity: str,
        now: str | int,
        entries: list[int],
        *,
        mode: str = "set",
        gather: bool = False,
    ) -> int:
        """Send a put; return how many earlier answers were read. Raises their errors, or that an answer is late.

        ``gather``: the put may be kept back for a moment, and makes nothing later than it is.
        """
        moment = time.monotonic()
        if gather:
            mode = "fill"
            if self._can_keep and moment - self._sent_at < GATHER_INTERVAL and len(self._kept) < MAX_UNREAD:
                self._keep(UnreadPut(keys, identity, now, entries, moment + KEPT_FOR))
                return 0
        read = 0
        if len(self.unread) >= READ_AT_UNREAD or moment - self._read_at > READ_INTERVAL:
            read = self.read(MAX_UNREAD + len(self._kept))
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
            if leave < len(self._kept):
                self._push()
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
        packed = _packed(keys, identity, now, mode, entries, in_full=not self._script_is_known)
        self.raw.send_packed_command([packed])
        self._script_is_known = True
        self._all_sent()
        self.unread.append(UnreadPut(keys, identity, now, entries, self._sent_at))

    def _keep(self, put: UnreadPut) -> None:
        """Give a put to the kernel, which sends it later."""
        assert MSG_MORE is not None
        packed = _packed(put.keys, put.identity, put.now, "fill", put.entries, in_full=not self._script_is_known)
        try:
            socket_of(self.raw).sendall(packed, MSG_MORE)
        except OSError as error:
            raise redis.ConnectionError(str(error)) from error
        self._kept.append(put)
        self.unread.append(put)

    def _push(self) -> None:
        """Have the kernel send what it keeps back: setting this option, even anew, does that (tcp(7))."""
        socket_of(self.raw).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._all_sent()

    def _all_sent(self) -> None:
        self._sent_at = time.monotonic()
        if self._kept:
            for put in self._kept:
                put.sent_at = self._sent_at
            self._kept.clear()


def _packed(keys: Keys, identity: str, now: str | int, mode: str, entries: list[int], *, in_full: bool) -> bytes:
    """Return the command as Redis reads it: the number of its words, then each word after the number of its bytes."""
    count, head = _packed_head(keys, identity, now, mode, in_full)
    words = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, entries)])
    return b"*%d\r\n%b%b" % (count + len(entries), head, words.encode())


@lru_cache(maxsize=256)
def _packed_head(keys: Keys, identity: str, now: str | int, mode: str, in_full: bool) -> tuple[int, bytes]:
    """Return the command without its entries, and the number of its words: all puts to a queue begin with them."""
    command = scripts.load("put").command(keys, in_full=in_full, now=now, mode=mode, identity=identity)
    words = [str(word).encode() for word in command]
    return len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class PipelinedConnections:
    """The pipelined connections of a broker: as many as there are threads that put at the same time."""

    def __init__(self, pool: Callable[[], redis.ConnectionPool], timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._idle: deque[PipelinedConnection] = deque()
        # At the end of the process too: a socket that is closed with unread answers in it drops what the server has not
        # read yet.
        self.close = weakref.finalize(self, _read_and_close, self._idle)

    def put(self, keys: Keys, identity: str, now: str | int, entries: list[int], *, gather: bool = False) -> int:
        """Send a put; return how many answers of earlier ones were read. Raises any error of redis-py.

        ``gather``: the put may be kept back for a moment, and makes nothing later than it is.
        """
        connection = pop_idle(self._idle)
        lost: Iterable[UnreadPut] = ()
        if connection is not None:
            try:
                return self._put(connection, keys, identity, now, entries, gather=gather)
            except redis.ConnectionError:
                # The server closed the connection while it was idle, perhaps before it read all puts.
                lost = connection.unread
        connection = PipelinedConnection(self._pool(), self._timeout)
        return self._put(connection, keys, identity, now, entries, lost, gather=gather)

    def _put(
        self,
        connection: PipelinedConnection,
        keys: Keys,
        identity: str,
        now: str | int,
        entries: list[int],
        lost: Iterable[UnreadPut] = (),
        *,
        gather: bool,
    ) -> int:
        try:
            for unread in lost:
                connection.put(unread.keys, unread.identity, unread.now, unread.entries, mode="fill")
            read = connection.put(keys, identity, now, entries, gather=gather)
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
