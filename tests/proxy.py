"""A TCP proxy before Redis that can lose replies: the command is carried out, and nobody hears of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """Listens on a port of its own and passes everything on, connection by connection."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._lose: list[bytes] = []
        self.lost: list[bytes] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def lose_reply_to(self, *commands: bytes) -> None:
        """Lose the reply to the next command in which each of these is found; the connection breaks with it."""
        with self._lock:
            self._lose += commands

    def turn_to(self, port: int) -> None:
        """Break all connections; new ones lead to another server."""
        self._upstream = port
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            _Link(self, client, server).start()

    def start(self, run: threading.Thread) -> None:
        self._threads.append(run)
        run.start()

    def __enter__(self) -> Self:
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(5)
        self.cut()
        for thread in self._threads:
            thread.join(5)

    # --- for the links ------------------------------------------------------------------------------------------------

    def opened(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open.update(ends)

    def closed(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(ends)
            for end in ends:
                end.close()

    def loses(self, request: bytes) -> bool:
        with self._lock:
            for command in self._lose:
                if command in request:
                    self._lose.remove(command)
                    self.lost.append(command)
                    return True
            return False


class _Link:
    """One connection of a client, and the one to the server behind it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self._losing = threading.Event()
        self._ends = 2
        self._lock = threading.Lock()

    def start(self) -> None:
        self.proxy.opened(self.client, self.server)
        for run in (self._requests, self._replies):
            self.proxy.start(threading.Thread(target=run, daemon=True))

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.client.recv(65536):
                if self.proxy.loses(data):
                    self._losing.set()
                self.server.sendall(data)
        self._end()

    def _replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(65536):
                if self._losing.is_set():
                    # The server has answered, so it is done.
                    break
                self.client.sendall(data)
        self._end()

    def _end(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._ends -= 1
            last = self._ends == 0
        if last:
            self.proxy.closed(self.client, self.server)
