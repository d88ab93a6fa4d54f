"""The HTTP door in real processes: ``delayq_http``, and a project under Uvicorn."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from django.conf import settings

from tests.support.workers import PATIENCE, Worker

DOOR = ("django", "delayq_http", "--port", "0")
PROJECT = ("uvicorn", "tests.http.project:application", "--port", "0", "--lifespan", "off", "--no-access-log")


class Server(Worker):
    """A server at a port that is free, by default ``delayq_http``."""

    def __init__(self, *arguments: str, token: str = "", module: tuple[str, ...] = DOOR) -> None:
        self.token = token
        self._start([sys.executable, "-m", *module, *arguments], {"DELAYQ_TEST_SETTINGS": json.dumps(settings.DELAYQ)})
        found = self.wait_for(r"http://(.+):(\d+)\b")
        self.host, self.port = found[1], int(found[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {"X-Token": self.token})
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text else None

    def send_raw(self, text: bytes) -> socket.socket:
        """Send bytes, and return the socket."""
        opened = socket.create_connection((self.host, self.port), timeout=PATIENCE)
        opened.sendall(text)
        return opened

    def poll(self, query: str = "timeout=3600&ttr=3600", queue: str = "q1") -> socket.socket:
        """Send a poll of a queue, and return the socket."""
        return self.send_raw(
            f"GET /api/ns1/{queue}?{query} HTTP/1.1\r\nHost: x\r\nX-Token: {self.token}\r\n\r\n".encode()
        )

    def of_process(self, name: str) -> int:
        """Return a number that Linux knows of the process, such as ``Threads`` and ``VmRSS`` (kB)."""
        found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])


def answered(opened: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    read = b""
    try:
        while part := opened.recv(65_536):
            read += part
    except ConnectionResetError:
        pass
    return read
