"""A certificate authority for one test, and a TLS front for a server that may have no TLS."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Self

OPENSSL = shutil.which("openssl")


class Authority:
    """Makes certificates with the openssl program."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.certificate, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, host: str) -> tuple[Path, Path]:
        """Make a certificate and a key for a host."""
        base = self.folder / f"{self.name}-{host}"
        certificate, key, request, names = (base.with_suffix(end) for end in (".crt", ".key", ".csr", ".ext"))
        _openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={host}", "-keyout", key, "-out", request),
        )
        names.write_text(f"subjectAltName=DNS:{host}\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", "2", "-extfile", names, "-out", certificate),
        )
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *map(str, arguments)], check=True, capture_output=True, timeout=60)


class Front:
    """Takes TLS connections on a port of its own and passes on what they hold in plain."""

    def __init__(self, certificate: Path, key: Path, upstream: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _address = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        """Serve one client until either end is gone: a client that refuses the certificate, or Redis when it ends."""
        with contextlib.suppress(OSError), plain:
            plain.settimeout(10)
            with (
                self._context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", self._upstream)) as server,
            ):
                self._open += [client, server]
                client.settimeout(0.02)
                _pass_on(client, server)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pass_on(client: ssl.SSLSocket, server: socket.socket) -> None:
    """Pass data on in both directions, in one thread because two threads must not share an SSL object."""
    server.setblocking(False)
    while True:
        with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
            data = client.recv(65536)
            if not data:
                return
            server.sendall(data)
        with contextlib.suppress(BlockingIOError):
            answer = server.recv(65536)
            if not answer:
                return
            client.settimeout(10)
            client.sendall(answer)
            client.settimeout(0.02)
