"""Connections that nobody waits for longer than for one timeout, whatever has to be done to make them.

This is the only module that uses a private attribute of redis-py, in ``socket_of``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis
from redis.sentinel import SentinelManagedConnection

if TYPE_CHECKING:
    AnyConnection = redis.Connection
else:
    AnyConnection = object

# Errors that are answers, though of these redis-py takes the second for one of the connection.
ANSWERS = (redis.ResponseError, redis.AuthenticationError)


class Attempt(threading.Thread):
    """Connects in a thread of its own, because nothing interrupts a lookup of a name. It ends when that has an end."""

    def __init__(self, address: str, connect: Callable[[], object]) -> None:
        # The process waits for no such thread when it ends.
        super().__init__(name="delayq-connect", daemon=True)
        self.address = address
        self.pid = os.getpid()
        self.began = time.monotonic()
        self.error: BaseException | None = None
        self._act: Callable[[], object] | None = connect

    def run(self) -> None:
        """Connect, and keep the error for the thread that waits."""
        assert self._act is not None
        _under_way.add(self)
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001
            self.error = error.with_traceback(None)
        finally:
            self._act = None
            _under_way.discard(self)

    @property
    def is_under_way(self) -> bool:
        """False in a process that was forked meanwhile, too: threads do not follow."""
        return self.pid == os.getpid() and self.is_alive()


# The attempts that have not ended.
_under_way: set[Attempt] = set()


def _is_stuck(address: str, timeout: float) -> bool:
    """Return whether an attempt to connect there has gone on for longer than ``timeout`` seconds."""
    long_ago = time.monotonic() - timeout
    return any(a.address == address and a.began < long_ago and a.is_under_way for a in tuple(_under_way))


class TimedConnection(AnyConnection):
    """A connection that nobody waits for longer than for one timeout, whatever has to be done to make it.

    That may be a lookup of names, a question to sentinels, TCP, TLS, the login and the choice of the database. An
    attempt that takes longer goes on: the connection is in its pool, for later callers. Until it has ended
    nobody waits for another one to the same address. The timeout is that for TCP, ``socket_connect_timeout``.
    """

    def __init__(self, *, address: str, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._address = address
        self._attempt: Attempt | None = None

    def connect(self) -> None:
        """Connect unless that is done. Raises any error of redis-py."""
        if self._attempt is not None and not self._attempt.is_under_way:
            self._attempt = None
        if self._attempt is None and self._is_connected():
            return
        timeout = self.socket_connect_timeout or 0.0
        if self._attempt is not None or _is_stuck(self._address, timeout):
            raise redis.TimeoutError(
                f"still not connected, after more than {timeout:g} s: is the name of its host found?"
            )
        try:
            attempt = None if self._is_one_step() else Attempt(self._address, self._make)
            if attempt is not None:
                attempt.start()
        except RuntimeError:
            # The process ends, or has too many threads.
            attempt = None
        if attempt is None:
            self._make()
        else:
            self._wait_for(attempt, timeout)

    def _is_connected(self) -> bool:
        return socket_of(self) is not None

    def _wait_for(self, attempt: Attempt, timeout: float) -> None:
        """Wait for an attempt up to ``timeout`` seconds, and raise its error. One that takes longer goes on."""
        self._attempt = attempt
        attempt.join(timeout)
        if attempt.is_alive():
            raise redis.TimeoutError(f"not connected within {timeout:g} s: name, TCP, TLS and login together")
        self._attempt = None
        error, attempt.error = attempt.error, None
        try:
            if error is not None:
                raise error
        finally:
            # Otherwise the error would hold this frame, and the frame the error.
            del error

    def _make(self) -> None:
        """Connect as redis-py does, and read what TLS sends after its handshake."""
        super().connect()  # type: ignore[no-untyped-call]
        if isinstance(self, redis.SSLConnection) and not self._logs_in():
            # What TLS sends after its handshake comes before the first answer, and is read with it. redis-py would take
            # it for an answer that nobody has asked for.
            with contextlib.suppress(*ANSWERS):
                self.send_command("PING")  # type: ignore[no-untyped-call]
                self.read_response()

    def _logs_in(self) -> bool:
        return bool(self.db or self.username or self.password or self.credential_provider or self.client_name)

    def _is_one_step(self) -> bool:
        """Return whether there is no name to look up, and nothing to do once the socket is connected."""
        if isinstance(self, redis.SSLConnection | SentinelManagedConnection) or self._logs_in():
            return False
        if isinstance(self, redis.UnixDomainSocketConnection):
            return True
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def socket_of(raw: Any) -> socket.socket | None:
    """Return the socket of a connection; None where redis-py keeps it elsewhere.

    redis-py has no public way to it. ``can_read`` waits for one connection only, and the listener has to wait for a
    pipe at the same time.
    """
    return getattr(raw, "_sock", None)
