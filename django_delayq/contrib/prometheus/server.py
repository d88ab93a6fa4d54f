"""Answers Prometheus. The supervisor listens, and each of its processes accepts: who is free answers for all."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.core.management.base import CommandError
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app, multiprocess
from prometheus_client.registry import Collector

from ... import extensions
from ...core.worker_options import Options
from ...extensions import Service
from .counts import Counting, SharedCounts
from .gauges import Gauges

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("django_delayq")

# A client is dropped that has a process wait for this long in all, while it sends its request and takes the answer: it
# keeps others waiting. Seconds.
CLIENT_TIMEOUT = 5.0
# How often a process looks whether it is to end. Seconds.
LOOK_INTERVAL = 0.5
# The file of metrics that a process has just made is empty for a moment. It is read again at most this many times.
READ_AGAIN = 20
# Seconds before it is read again.
READ_AGAIN_AFTER = 0.05


def serve(options: Options, host: str, port: int) -> None:
    """Listen, and have each process of this worker count and answer. Raises ``CommandError`` when the port is taken."""
    try:
        listener = _listen(host, port)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise CommandError(f"--metrics-port: cannot listen on {host or '*'}:{port}: {why}") from error
    # The supervisor counts too: what becomes of the messages of a dead process.
    shared = SharedCounts(options.most_processes + 1)
    registry = CollectorRegistry()
    registry.register(shared)
    registry.register(Gauges(options.using))
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry.register(OwnMetrics())
    extensions.add_to_workers(partial(Metrics, shared=shared, server=MetricsServer(listener, registry)))
    logger.info("Metrics are served on port %d, at /metrics", listener.getsockname()[1])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Its timeout is how long a process waits for a connection, also when another one has just taken it.
    """
    if not host and socket.has_dualstack_ipv6():
        listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.settimeout(LOOK_INTERVAL)
    return listener


class OwnMetrics(Collector):
    """The project's own metrics, which prometheus_client keeps in files of each process."""

    def __init__(self) -> None:
        self._files = multiprocess.MultiProcessCollector(None)

    def collect(self) -> Iterable[Metric]:
        """Read the files. Raises ``struct.error`` when one stays empty."""
        for _try in range(READ_AGAIN):
            with suppress(struct.error):
                return list(self._files.collect())
            time.sleep(READ_AGAIN_AFTER)
        return list(self._files.collect())


class Metrics(Counting):
    """Counts in one process, and has it answer."""

    def __init__(self, using: str, worker: str, shared: SharedCounts, server: MetricsServer) -> None:
        super().__init__(using, worker, shared)
        self._server = server

    def services(self, roles: frozenset[str]) -> Iterator[Service]:
        yield self._server

    def stop(self) -> None:
        super().stop()
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            # The name of a worker is that of the host, the process id, and a random part.
            with suppress(OSError):
                multiprocess.mark_process_dead(int(self.worker.split("/")[-2]))


class _Client(io.RawIOBase):
    """Reads from a client and writes to it. It has one deadline for both, which stands still while neither is done."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = CLIENT_TIMEOUT

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        with self._waiting():
            return self._connection.recv_into(buffer)

    def write(self, data: Buffer) -> int:
        with self._waiting():
            self._connection.sendall(data)
        return memoryview(data).nbytes

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time. Raises ``ConnectionAbortedError``, which the server expects of clients, at the deadline."""
        began = time.monotonic()
        try:
            # 0 would mean not to wait at all, which is another error.
            self._connection.settimeout(max(self._left, 0.001))
            yield
        except TimeoutError as error:
            raise ConnectionAbortedError("the client is too slow") from error
        finally:
            self._left -= time.monotonic() - began


class _Handler(WSGIRequestHandler):
    """Reads one request and answers it before the client's deadline, and logs nothing."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        client = _Client(self.connection)
        self.rfile = io.BufferedReader(client)
        # It writes all that it is given at once, as the writer does that it replaces.
        self.wfile = cast("io.BufferedIOBase", client)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(WSGIServer):
    """A server on a socket that listens already."""

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # What WSGIServer finds out when it binds; the name of the host is of no use here.
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what a client did wrong where it does not fill the log: anybody may connect and say nothing."""
        logger.debug("A request for metrics failed", exc_info=True)


class MetricsServer(Service):
    """Answers one request at a time, in a thread of its own."""

    name = "metrics server"
    thread = "metrics"

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        self._server = _Server(listener, registry)

    def tick(self) -> float:
        """Wait for a request for a moment, and answer it."""
        self._server.handle_request()
        return 0.0
