"""Calls of scripts without what a client does around each: a third of the time that a short one takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from .connection import PinnedConnection, has_ended, rested

# A pool of fewer connections gets each back at once: others have none otherwise.
FEW = 10


class ScriptConnections:
    """Stands for a client where a script is called: as many connections as there are threads that call at once."""

    def __init__(self, pool: Callable[[], redis.ConnectionPool]) -> None:
        self._pool = pool
        self._resting: deque[PinnedConnection] = deque()

    def execute_command(self, *command: Any) -> Any:
        """Send it and wait for the answer. Raises ``RedisError`` and ``OSError``; nothing is sent twice."""
        pinned = self._rested() or PinnedConnection(self._pool())
        try:
            pinned.raw.send_command(*command)
            answer = pinned.raw.read_response()
        except BaseException:
            # Whoever refuses may have become a replica, and an answer may still be on its way.
            pinned.close()
            raise
        if pinned.pool.max_connections < FEW:
            pinned.pool.release(pinned.raw)
        else:
            self._resting.append(pinned)
        return answer

    def _rested(self) -> PinnedConnection | None:
        while (pinned := rested(self._resting)) is not None:
            # A pool that asks Sentinel disowns connections to who is no longer the master.
            if pinned.pool.owns_connection(pinned.raw) and not has_ended(pinned.raw):
                return pinned
            pinned.close()
        return None
