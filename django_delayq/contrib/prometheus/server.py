"""Answers Prometheus. The supervisor listens, and each of its processes accepts: a free process answers for all."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.core.management.base import CommandError
from django.db import Error as DatabaseError
from django.db import connections
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app, multiprocess
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ... import extensions
from ...api import pausing
from ...broker import RedisBroker, index
from ...core.clock import SECOND
from ...core.exceptions import BrokerUnavailable
from ...core.states import State
from ...core.worker_options import Options
from ...extensions import Service
from ...inspector import stats
from ...inspector.coming import Coming, TopicDue, due_by_topic, due_soon
from ...inspector.numbers import CAPS
from ...inspector.stats import QueueSnapshot, Snapshot, take_snapshot
from ...models import Message
from ...project import conf
from ...record import reads
from ...record.sql import statements
from ...record.sql.holders import Holder, oldest
from ...record.sql.sessions import TooSlow, statement_timeout
from ...restore import reading
from ...restore.horizon import refuse_foreign
from .counts import MOST_QUEUES, OTHER, Counting, SharedCounts

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

logger = logging.getLogger("django_delayq")

# A process looks after this time whether it is to end. Seconds.
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
    # The supervisor counts too: the messages of a dead process.
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

    Its timeout bounds the wait of a process for a connection, also when another process has just taken it.
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
    """Reads from a client and writes to it. Both have one deadline, whose clock runs only while either is done."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._connection = connection
        self._left = timeout

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
            # 0 would mean not to wait at all, and raise another error.
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
        client = _Client(self.connection, cast("_Server", self.server).client_timeout)
        self.rfile = io.BufferedReader(client)
        # It writes all that it is given at once, like the writer that it replaces.
        self.wfile = cast("io.BufferedIOBase", client)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(WSGIServer):
    """A server on a socket that listens already."""

    def __init__(self, listener: socket.socket, registry: CollectorRegistry, client_timeout: float) -> None:
        self.client_timeout = client_timeout
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # ``WSGIServer`` sets these attributes when it binds; the name of the host is of no use here.
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))

    def handle_error(self, request: object, client_address: object) -> None:
        """Log errors of clients at a low level: anybody may connect and say nothing, and must not fill the log."""
        logger.debug("A request for metrics failed", exc_info=True)


class MetricsServer(Service):
    """Answers one request at a time, in a thread of its own.

    A client that keeps others waiting is dropped: one for which the process waits longer than ``client_timeout``
    (seconds) in all, while it sends its request and takes the answer.
    """

    name = "metrics server"
    thread = "metrics"

    def __init__(self, listener: socket.socket, registry: CollectorRegistry, client_timeout: float = 5.0) -> None:
        self._server = _Server(listener, registry, client_timeout)

    def tick(self) -> float:
        """Wait for a request for a moment, and answer it."""
        self._server.handle_request()
        return 0.0


# --- gauges -----------------------------------------------------------------------------------------------------------


class Gauges:
    """Reads the gauges of one database alias.

    A statement that takes longer than ``timeout`` (seconds) is stopped, and Redis counts as unreachable when it takes
    longer to answer. Of the queues and topics that begin with ``prefix``, ``most_queues`` have gauges of their own.
    """

    def __init__(self, using: str, timeout: float = 2.0, most_queues: int = MOST_QUEUES, *, prefix: str = "") -> None:
        self.using = using
        self._prefix = prefix
        self._timeout = timeout
        self._most_queues = most_queues

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. Those that cannot be read are left out; ``delayq_database_up`` and its like say so."""
        try:
            found, due = self._tried(self._read_record), self._tried(self._read_due)
        finally:
            # Until the next scrape the server needs no session for this thread.
            connections[self.using].close()
        yield GaugeMetricFamily("delayq_database_up", "1 when the database answers in time.", value=bool(found))
        yield from found
        yield from due
        broker = index(self.using, timeout=self._timeout)
        if broker is not None:
            yield from self._read_redis(broker)

    def _tried(self, read: Callable[[], list[Metric]]) -> list[Metric]:
        """Return what ``read`` returns; nothing when the database fails or is too slow."""
        try:
            return read()
        except (DatabaseError, TooSlow):
            # The next question needs a transaction that is not broken.
            connections[self.using].close()
            return []

    def _read_record(self) -> list[Metric]:
        """Return the metrics of queues, dead messages and live workers."""
        with statement_timeout(self.using, int(self._timeout * 1000)):
            snapshot = take_snapshot(self.using)
            paused = pausing.paused(self.using)
            dead = stats.count_capped(Message.objects.using(self.using).filter(state=State.DEAD), CAPS.rows)
            alive = stats.alive(self.using, snapshot.at)
            holders = oldest(statements(self.using).snapshot_holders() or [])
        chosen = snapshot._replace(queues=self._chosen(snapshot.queues))
        return [
            *_of_queues(chosen, set(self._chosen(paused)), self._most_queues),
            _of_holders(holders),
            GaugeMetricFamily(
                "delayq_scheduled_messages_estimate",
                "Scheduled messages of all queues; above the limit of a queue, the estimate of the database.",
                value=snapshot.scheduled.count,
            ),
            GaugeMetricFamily("delayq_running_messages", "Messages that workers hold.", value=snapshot.running.count),
            GaugeMetricFamily("delayq_dead_messages", "Dead messages in the record.", value=dead.count),
            GaugeMetricFamily("delayq_workers_alive", "Worker processes that are alive.", value=alive),
        ]

    def _read_due(self) -> list[Metric]:
        """Return the metrics of messages that are due, by topic, and of those that will be soon."""
        with statement_timeout(self.using, int(self._timeout * 1000)):
            now, paused = reads.now(self.using), pausing.paused(self.using)
            topics = due_by_topic(self.using, now, stats.overdue_cutoff(now), paused)
            coming = due_soon(self.using, now, reading.queues(self.using))
        most = self._most_queues
        return [*_of_topics(self._chosen(topics), most), *_of_coming(self._chosen(coming), most)]

    def _chosen(self, found: Mapping[str, T]) -> dict[str, T]:
        return {name: numbers for name, numbers in found.items() if name.startswith(self._prefix)}

    def _read_redis(self, broker: RedisBroker) -> Iterator[Metric]:
        """Yield the gauges of Redis. It counts as down when it takes no writes, or has the ids of another database."""
        try:
            meta = broker.read_meta()
            up = True
            # While the database is away, nobody can tell whose Redis it is.
            with suppress(DatabaseError):
                refuse_foreign(self.using, meta)
            broker.write_nothing()
        except BrokerUnavailable:
            up = False
        finally:
            broker.close()
            connections[self.using].close()
        yield GaugeMetricFamily("delayq_redis_up", "1 when Redis takes writes, with ids of this database.", value=up)
        if not up or meta.horizon_tenths is None:
            return
        yield GaugeMetricFamily(
            "delayq_redis_horizon_ahead_seconds",
            "How far ahead Redis is filled.",
            value=(meta.horizon_tenths - meta.now_tenths) / SECOND,
        )
        yield GaugeMetricFamily(
            "delayq_redis_last_load_timestamp_seconds",
            "When the last load began: HORIZON before the horizon.",
            value=meta.horizon_tenths / SECOND - conf.get().HORIZON,
        )
        if (found := broker.cluster.hash_slot) is not None:
            replicas = GaugeMetricFamily(
                "delayq_redis_cluster_replicas",
                "Replicas of the node of a Redis Cluster that has the ids.",
                labels=["slot", "owner"],
            )
            replicas.add_metric([str(found.number), found.owner], len(found.replicas))
            yield replicas


def _of_queues(snapshot: Snapshot, paused: set[str], most: int) -> list[Metric]:
    """Return the gauges of each queue. Queues beyond ``most`` share the label ``other``."""
    about = {
        "delayq_scheduled_messages": "Scheduled messages, counted up to 10,000 in each queue.",
        "delayq_limited_messages": "Messages that wait for a limit, counted up to 10,000 in each queue.",
        "delayq_ready_messages": "Messages that are due and not yet overdue.",
        "delayq_overdue_messages": "Messages that should have been claimed by now.",
        "delayq_oldest_overdue_age_seconds": "How long ago the oldest overdue message fell due; 0: none is overdue.",
        "delayq_oldest_limited_age_seconds": "How long ago the limited message fell due that waits longest; 0: none.",
        "delayq_queue_paused": "1 when the queue is paused.",
    }
    families = [GaugeMetricFamily(name, text, labels=["queue"]) for name, text in about.items()]
    sums: dict[str, list[float]] = {}
    for place, queue in enumerate(sorted({*snapshot.queues, *paused})):
        numbers = _numbers(snapshot.queues.get(queue, QueueSnapshot()), snapshot.at, queue in paused)
        label = queue if place < most else OTHER
        before = sums.setdefault(label, [0.0] * len(families))
        combined = [*map(sum, zip(before[:4], numbers[:4], strict=True)), *map(max, before[4:], numbers[4:])]
        sums[label] = combined
    for label, numbers in sums.items():
        for family, number in zip(families, numbers, strict=True):
            family.add_metric([label], number)
    return [*families]


def _of_topics(topics: Mapping[str, TopicDue], most: int) -> list[Metric]:
    """Return the gauges of due messages of each topic. Topics beyond ``most`` share the label ``other``."""
    about = {
        "delayq_topic_due_messages": "Messages of a topic that are due.",
        "delayq_topic_ready_messages": "Messages of a topic that are due and not yet overdue.",
        "delayq_topic_overdue_messages": "Messages of a topic that should have been claimed by now.",
    }
    families = [GaugeMetricFamily(name, text, labels=["topic"]) for name, text in about.items()]
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(families))
    for place, (topic, due) in enumerate(topics.items()):
        label = topic if place < most else OTHER
        sums[label] = [before + number.count for before, number in zip(sums[label], due, strict=True)]
    for label, numbers in sums.items():
        for family, number in zip(families, numbers, strict=True):
            family.add_metric([label], number)
    return [*families]


def _of_coming(coming: Mapping[str, Mapping[str, Coming]], most: int) -> list[Metric]:
    """Return the gauges of what falls due soon in each queue. Queues beyond ``most`` share the label ``other``."""
    numbers: Counter[tuple[str, str]] = Counter()
    work: defaultdict[tuple[str, str], float] = defaultdict(float)
    for place, (queue, spans) in enumerate(coming.items()):
        for within, soon in spans.items():
            each = (queue if place < most else OTHER, within)
            numbers[each] += soon.number.count
            work[each] += soon.seconds or 0.0
    labels = ["queue", "within"]
    messages = GaugeMetricFamily("delayq_due_messages", "Messages that fall due within this time.", labels=labels)
    seconds = GaugeMetricFamily("delayq_due_seconds", "How long handlers will run for these messages.", labels=labels)
    for each, number in numbers.items():
        messages.add_metric([*each], number)
        seconds.add_metric([*each], work[each])
    return [messages, seconds]


def _of_holders(holders: list[Holder]) -> Metric:
    """Return how old the snapshots are that keep PostgreSQL from cleaning the table."""
    about = "Transactions that have begun since an old snapshot was taken; 0, of nobody: none is old."
    family = GaugeMetricFamily("delayq_old_snapshot_transactions", about, labels=["kind", "name", "owner"])
    for holder in holders or [Holder("", "", "", None, 0)]:
        family.add_metric([holder.kind, holder.name, holder.owner], holder.transactions)
    return family


def _numbers(queue: QueueSnapshot, now: datetime, is_paused: bool) -> list[float]:
    counts = (queue.scheduled, queue.limited, queue.ready, queue.overdue)
    ages = (_age(oldest, now) for oldest in (queue.oldest_overdue, queue.oldest_limited))
    return [*(number.count for number in counts), *ages, is_paused]


def _age(oldest: datetime | None, now: datetime) -> float:
    return 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())
