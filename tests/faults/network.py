"""A network that misbehaves, between a worker and one of its servers: a TCP proxy with bad habits."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

# SO_LINGER with no time to linger: close() resets the connection.
ABRUPT = struct.pack("ii", 1, 0)


class Network:
    """Passes everything on to a port, until told otherwise."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        # Seconds, in each direction.
        self.delay = 0.0
        # Every so many replies are cut in half, or kept back after the server did what it was asked to. 0: none.
        self.tear_every = 0
        self.drop_every = 0
        self.hits = 0
        self._replies = 0
        self._clear = threading.Event()
        self._clear.set()
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def swallow(self) -> None:
        """From now on nothing arrives anywhere; connections stay open, and new ones are accepted."""
        self._clear.clear()

    def clear(self) -> None:
        """All is well again. What was swallowed meanwhile arrives late."""
        self.delay, self.tear_every, self.drop_every = 0.0, 0, 0
        self._clear.set()

    def forget(self, said: bytes = b"") -> int:
        """The connections of now stay open for ever and carry nothing any more; how many. New ones are well.

        ``said``: only those on which a client has said this.
        """
        with self._lock:
            forgotten = [link for link in self._links if not link.forgotten and not link.closed and said in link.said]
            for link in forgotten:
                link.forgotten = True
        return len(forgotten)

    def reset_forgotten(self) -> None:
        """Somebody notices at last."""
        with self._lock:
            links = [link for link in self._links if link.forgotten]
        for link in links:
            link.reset()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.append(link)
            link.start()

    def hurdle(self, link: _Link) -> None:
        """Everything passes here, in either direction."""
        if self.delay:
            time.sleep(self.delay)
        self._clear.wait()
        while link.forgotten and not link.closed:
            time.sleep(0.05)

    def fate(self) -> str:
        """What becomes of a reply: "", "tear" or "drop"."""
        with self._lock:
            self._replies += 1
            for word, every in (("tear", self.tear_every), ("drop", self.drop_every)):
                if every and self._replies % every == 0:
                    self.hits += 1
                    return word
        return ""

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(5)
        self.clear()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.reset()
        for link in links:
            link.join()


class _Link:
    """A client's connection and the one behind it."""

    def __init__(self, network: Network, client: socket.socket, server: socket.socket) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.forgotten = self.closed = False
        # The beginning of it.
        self.said = b""
        self._threads = [
            threading.Thread(target=self._pump, args=pump, daemon=True)
            for pump in ((client, self._to_server), (server, self._to_client))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(5)
        for end in (self.client, self.server):
            end.close()

    def reset(self) -> None:
        self.closed = True
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
                end.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, deliver: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.network.hurdle(self)
                if self.closed:
                    break
                deliver(data)
        self.reset()

    def _to_server(self, data: bytes) -> None:
        if len(self.said) < 100_000:
            self.said += data
        self.server.sendall(data)

    def _to_client(self, data: bytes) -> None:
        fate = self.network.fate()
        if fate == "":
            self.client.sendall(data)
            return
        if fate == "tear":
            self.client.sendall(data[: len(data) // 2])
        raise ConnectionResetError
