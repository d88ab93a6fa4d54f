"""A TCP proxy between a worker and one of its servers, which can behave like a bad network."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from tests.support.workers import PATIENCE

# SO_LINGER with no time to linger: close() resets the connection.
ABRUPT = struct.pack("ii", 1, 0)


class Proxy:
    """Listens on a port of its own and passes all data on, connection by connection, until a test changes that."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        # Seconds by which data is delayed in each direction.
        self.delay = 0.0
        # Every so many replies one is cut in half, or dropped after the server has done its work. 0: none.
        self.tear_every = 0
        self.drop_every = 0
        self.hits = 0
        self.lost: list[bytes] = []
        # Set when somebody has said something on a connection that is silenced.
        self.held_back = threading.Event()
        # Clients at these addresses find nobody.
        self.shut_out: frozenset[str] = frozenset()
        self._lose: list[bytes] = []
        self._replies = 0
        self._clear = threading.Event()
        self._clear.set()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    # --- bad habits ---------------------------------------------------------------------------------------------------

    def lose_reply_to(self, *commands: bytes) -> None:
        """Lose the reply to the next command in which each of these is found; the connection breaks with it."""
        with self._lock:
            self._lose += commands

    def lead_to(self, port: int) -> None:
        """Lead new connections to another server. Those that are open stay."""
        self._upstream = port

    def turn_to(self, port: int) -> None:
        """Break all connections; new ones lead to another server."""
        self.lead_to(port)
        self.cut()

    @property
    def is_used(self) -> bool:
        """True when a connection is open."""
        return bool(self._open())

    def cut(self) -> None:
        """Break all connections."""
        for link in self._open():
            link.reset()

    def shut_out_all_of(self, *hosts: str) -> None:
        """Break all connections, and take none of clients at these addresses from now on."""
        self.shut_out = frozenset(hosts)
        self.cut()

    def swallow(self) -> None:
        """Hold all data back from now on. Connections stay open, and new ones are accepted."""
        self._clear.clear()

    def clear(self) -> None:
        """End all faults. Data that was held back arrives late."""
        self.delay, self.tear_every, self.drop_every = 0.0, 0, 0
        self._clear.set()

    def forget(self, said: bytes = b"") -> int:
        """Silence the present connections for ever, without closing them, and return their number. New ones work.

        ``said`` selects those on which a client has sent this.
        """
        forgotten = [link for link in self._open() if not link.forgotten and said in link.said]
        for link in forgotten:
            link.forgotten = True
        return len(forgotten)

    def reset_forgotten(self) -> None:
        """Reset the connections that were silenced, as keepalives do at last."""
        for link in self._open():
            if link.forgotten:
                link.reset()

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(PATIENCE)
        self.clear()
        links = self._open()
        self.cut()
        for link in links:
            link.join()

    def _open(self) -> list[_Link]:
        with self._lock:
            return list(self._links)

    def _accept(self) -> None:
        while True:
            try:
                client, (host, _port) = self._listener.accept()
            except OSError:
                return
            if host in self.shut_out:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    # --- for the links ------------------------------------------------------------------------------------------------

    def closed(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def loses(self, request: bytes) -> bool:
        with self._lock:
            for command in self._lose:
                if command in request:
                    self._lose.remove(command)
                    self.lost.append(command)
                    return True
            return False

    def hurdle(self, link: _Link) -> None:
        """Delay or hold data, which passes here in both directions."""
        if self.delay:
            time.sleep(self.delay)
        self._clear.wait()
        while link.forgotten and not link.broken:
            self.held_back.set()
            time.sleep(0.05)

    def fate(self) -> str:
        """Decide what happens to a reply: "" (pass it on), "tear" or "drop"."""
        with self._lock:
            self._replies += 1
            for word, every in (("tear", self.tear_every), ("drop", self.drop_every)):
                if every and self._replies % every == 0:
                    self.hits += 1
                    return word
        return ""


class _Link:
    """One connection of a client, and the one to the server behind it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.forgotten = self.broken = False
        # The beginning of what the client said.
        self.said = b""
        self._losing = threading.Event()
        self._lock = threading.Lock()
        self._running = 2
        self._threads = [
            threading.Thread(target=self._pump, args=pump, daemon=True)
            for pump in ((client, self._to_server), (server, self._to_client))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)

    def reset(self) -> None:
        with self._lock:
            self.broken = True
            if not self._running:
                # The sockets are closed: their numbers may belong to others by now.
                return
            for end in (self.client, self.server):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
                    end.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, deliver: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.proxy.hurdle(self)
                if self.broken:
                    break
                deliver(data)
        self.reset()
        with self._lock:
            self._running -= 1
            if self._running:
                return
            self.client.close()
            self.server.close()
        self.proxy.closed(self)

    def _to_server(self, data: bytes) -> None:
        if len(self.said) < 100_000:
            self.said += data
        if self.proxy.loses(data):
            self._losing.set()
        self.server.sendall(data)

    def _to_client(self, data: bytes) -> None:
        if self._losing.is_set():
            # The server has answered, so the request was carried out.
            raise ConnectionResetError
        fate = self.proxy.fate()
        if fate == "":
            self.client.sendall(data)
            return
        if fate == "tear":
            self.client.sendall(data[: len(data) // 2])
        raise ConnectionResetError
