"""A bank for the demo and the tests: an HTTP server that refuses the first calls about each payment."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Self


class Bank(ThreadingHTTPServer):
    """Refuses the first ``refusals`` calls about each order. Runs in threads of this process while it is entered."""

    daemon_threads = True

    def __init__(self, refusals: int = 2) -> None:
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.refusals = refusals
        # Order → calls, refused ones included.
        self.calls: Counter[int] = Counter()
        self._calling = threading.Lock()

    @property
    def url(self) -> str:
        """The address that the bank listens on."""
        return f"http://127.0.0.1:{self.server_port}/"

    def answer(self, order: int) -> HTTPStatus:
        """Count one call about an order, and return the status to answer with."""
        with self._calling:
            self.calls[order] += 1
            return HTTPStatus.OK if self.calls[order] > self.refusals else HTTPStatus.SERVICE_UNAVAILABLE

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()


class _RequestHandler(BaseHTTPRequestHandler):
    server: Bank
    timeout: ClassVar[int] = 5

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        order = json.loads(self.rfile.read(length))["order"]
        self.send_response(self.server.answer(order))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
