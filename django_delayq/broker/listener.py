"""The listener of a worker process: sleeps until a queue is notified, for exactly as long as asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from ..core.readable import Waker, wait_readable
from .connection import is_closed
from .timed import socket_of

# A connection on which no token came for this long may have been dropped by the network without notice. Seconds.
MAX_LISTENING = 60.0

# The longest wait where redis-py does not show the socket of a connection. Seconds.
LOOK_INTERVAL = 0.05


class Listener:
    """Waits for a token in one of several lists. One thread listens; any thread may call ``wake`` and ``reset``.

    Redis checks the timeout of a BLPOP only ``hz`` times a second (10 by default). So the command is sent without a
    timeout, and the wait happens on the client's socket. A BLPOP that was not answered in time stays in force for the
    next ``listen``. After an answer only the next ``listen`` sends a new BLPOP, so that a worker that is busy until
    then takes no token from another. A worker that becomes busy for long without having got a token calls ``stop``.
    """

    def __init__(self, connect: Callable[[], redis.Redis]) -> None:
        self._connect = connect
        self._client: redis.Redis | None = None
        self._connection: Any = None
        # The lists of the BLPOP that has no answer yet, and when it was sent (monotonic, seconds).
        self._lists: tuple[str, ...] = ()
        self._sent_at = 0.0
        self._is_stale = False
        self._waker = Waker()

    def listen(self, lists: Sequence[str], timeout: float) -> bool:
        """Sleep for up to ``timeout`` seconds; return whether a token came."""
        try:
            return self._listen(tuple(lists), timeout)
        except Exception:
            self._disconnect()
            raise

    def _listen(self, lists: tuple[str, ...], timeout: float) -> bool:
        """Wait for a token on the connection with the BLPOP, which is made and sent first if need be."""
        if self._is_stale or (self._lists and self._lists != lists) or time.monotonic() - self._sent_at > MAX_LISTENING:
            if self.stop():
                # Redis may have given a token to the old connection in the step in which it read its end: look at once.
                timeout = 0.0
            self._disconnect()
            self._is_stale = False
        if self._connection is not None and not self._lists and is_closed(self._connection):
            self._disconnect()
        if self._connection is None:
            if self._client is None:
                self._client = self._connect()
            self._connection = self._client.connection_pool.get_connection()
        if not self._lists:
            self._connection.send_command("BLPOP", *lists, 0)
            self._lists = lists
            self._sent_at = time.monotonic()
        answer = socket_of(self._connection)
        if answer is None:
            # The answer cannot be waited for beside the waker: the caller looks for it again and again.
            timeout, answers = min(timeout, LOOK_INTERVAL), []
        else:
            answers = [answer]
        readable = wait_readable([self._waker, *answers], max(0.0, timeout))
        if self._waker in readable:
            self._waker.forget()
        if answer in readable or self._connection.can_read(0):
            self._connection.read_response()
            self._lists = ()
            return True
        return False

    def wake(self) -> None:
        """End the ``listen`` of another thread, or the next one."""
        self._waker.wake()

    def reset(self) -> None:
        """Have the next ``listen`` use a new connection: the present one may be dead without notice."""
        self._is_stale = True

    def stop(self) -> bool:
        """Take no token any more, and return whether one could have come."""
        is_listening = bool(self._lists)
        if is_listening:
            self._disconnect()
        return is_listening

    def _disconnect(self) -> None:
        """Give up the connection, and with it the BLPOP that waits on it."""
        self._lists = ()
        if self._connection is not None:
            self._connection.disconnect()
            if self._client is not None:
                self._client.connection_pool.release(self._connection)
            self._connection = None

    def close(self) -> None:
        """Close the connection and the waker."""
        self._disconnect()
        if self._client is not None:
            self._client.close()
            self._client = None
        self._waker.close()
