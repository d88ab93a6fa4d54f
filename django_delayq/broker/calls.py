"""Calls of scripts without what a client does around each: a third of the time that a short one takes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import redis

from .connection import has_ended

# A pool of fewer connections gets each back at once: others have none otherwise.
FEW = 10


class _Rested(NamedTuple):
    connection: Any
    pool: redis.ConnectionPool
    pid: int


class Calls:
    """Stands for a client where a script is called: as many connections as there are threads that call at once."""

    def __init__(self, pool: Callable[[], redis.ConnectionPool]) -> None:
        self._pool = pool
        self._resting: deque[_Rested] = deque()

    def execute_command(self, *command: Any) -> Any:
        """Send it and wait for the answer. Raises ``RedisError`` and ``OSError``; nothing is sent twice."""
        pool, connection = self._connection()
        try:
            connection.send_command(*command)
            answer = connection.read_response()
        except BaseException:
            # Whoever refuses may have become a replica, and an answer may still be on its way.
            self._give_up(connection, pool)
            raise
        if pool.max_connections < FEW:
            pool.release(connection)
        else:
            self._resting.append(_Rested(connection, pool, os.getpid()))
        return answer

    def _connection(self) -> tuple[redis.ConnectionPool, Any]:
        while self._resting:
            try:
                rested = self._resting.pop()
            except IndexError:
                # Another thread was quicker.
                break
            if rested.pid != os.getpid():
                continue
            # A pool that asks Sentinel disowns connections to who is no longer the master.
            if rested.pool.owns_connection(rested.connection) and not has_ended(rested.connection):
                return rested.pool, rested.connection
            self._give_up(*rested[:2])
        pool = self._pool()
        return pool, pool.get_connection()

    @staticmethod
    def _give_up(connection: Any, pool: redis.ConnectionPool) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            connection.disconnect()
            pool.release(connection)
