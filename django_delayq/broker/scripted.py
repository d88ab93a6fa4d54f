"""Calls of scripts without the work that a redis-py client does around each call: a third of a short call's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from .connection import PinnedConnection, is_closed, pop_idle

# A pool of fewer connections than this gets each of them back after a call, or other users of the pool would have none.
MIN_POOL_TO_PIN = 10


class ScriptConnections:
    """Calls scripts in place of a client. Between calls it keeps one connection and gives others back to the pool.

    So a process has no more connections than threads that call Redis at one moment, and this one.
    """

    def __init__(self, pool: Callable[[], redis.ConnectionPool]) -> None:
        self._pool = pool
        self._idle: deque[PinnedConnection] = deque()

    def execute_command(self, *command: Any) -> Any:
        """Send a command and wait for the answer. Raises ``RedisError`` and ``OSError``; sends nothing twice."""
        pinned = self._pop_idle() or PinnedConnection(self._pool())
        try:
            pinned.raw.send_command(*command)
            answer = pinned.raw.read_response()
        except BaseException:
            # Closed, because a server that refuses a call may have become a replica, and an answer may still be on its
            # way.
            pinned.close()
            raise
        if self._idle or pinned.pool.max_connections < MIN_POOL_TO_PIN:
            pinned.pool.release(pinned.raw)
        else:
            self._idle.append(pinned)
        return answer

    def _pop_idle(self) -> PinnedConnection | None:
        while (pinned := pop_idle(self._idle)) is not None:
            # After a failover a pool that asks Sentinel disowns its connections to the former master.
            if pinned.pool.owns_connection(pinned.raw) and not is_closed(pinned.raw):
                return pinned
            pinned.close()
        return None
