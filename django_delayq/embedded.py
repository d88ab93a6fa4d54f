"""A worker in a process that does other work too: the threads of ``run_delayq`` without its supervisor.

For development, tests that need a real worker, notebooks, and hosts that run one process. In production use
``run_delayq``, which also does what this worker cannot:

* A handler that does not end at its timeout keeps its thread. A supervisor would replace the process.
* A message that kills its process takes this one down, with all that it does.
* Handlers and the other work share one interpreter: while one computes, the others wait.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, Self

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections as django_connections
from django.db import router

from .broker import check_settings, describe
from .core import actors, values
from .core.bounds import LENGTHS
from .core.durations import Duration
from .core.names import near
from .core.readable import patched_by
from .core.worker_options import Options
from .extensions import WorkerExtensions
from .models import Message
from .project import conf, pulled, validation
from .record import crashes
from .record.sql import commits_nothing, is_in_memory, unsupported
from .record.sql.troubles import in_words
from .worker.processes.process import BROKEN, FINISHED, WorkerProcess, all_roles
from .worker.run.delivery import Delivery
from .worker.run.recorder import Recorder
from .worker.run.reporting import report_moves
from .worker.shared import connections
from .worker.shared.due_services import Runner
from .worker.shared.log_writer import log_writer
from .worker.upkeep.heartbeat import HeartbeatFile

__all__ = ["EmbeddedWorker"]

logger = logging.getLogger("django_delayq")

# Besides handler threads: the recorder, the upkeep, the consumer, the signals and the operator. Connections.
OTHER_CONNECTIONS = 5
# A worker whose consumer has begun no round for this long is not alive. Seconds.
STALE_AFTER = 30.0
# The time between two touches of the heartbeat file. Seconds.
TOUCH_INTERVAL = 1.0
# A worker that ends has this time beyond twice its graceful timeout, as a worker process has. Seconds.
END_TIME = 15.0


class EmbeddedWorker:
    """Delivers messages in threads of this process, from ``start()`` to ``stop()`` or within a ``with`` block.

    ``queues`` names the queues in strict order of priority, or gives each its weight: ``{"a": 3, "b": 1}``; none: all.
    ``threads`` sync handlers and ``async_concurrency`` async ones run at once. ``graceful_timeout`` is how long running
    handlers may go on after ``stop``. ``name`` begins the worker's name in the log (default: the host's), ``roles`` are
    those of ``run_delayq --roles`` (default: all), and ``heartbeat_file`` is touched every second while the worker is
    alive. ``using`` is the database alias of the messages.

    It forks nothing, catches no signal, and ends in order when the interpreter ends. One object is one worker: several
    may run in a process, and each may be started again after its end. A process that is forked meanwhile has no worker.

    Raises ``ValueError`` for arguments that cannot be, and ``ImproperlyConfigured`` for impossible settings.
    """

    def __init__(
        self,
        *,
        queues: Collection[str] | Mapping[str, int] = (),
        threads: int = 4,
        async_concurrency: int = Options._field_defaults["async_concurrency"],
        graceful_timeout: Duration = Options._field_defaults["graceful_timeout"],
        name: str = "",
        roles: Collection[str] | None = None,
        heartbeat_file: str | os.PathLike[str] | None = None,
        using: str | None = None,
    ) -> None:
        check_settings()
        weights = queues.values() if isinstance(queues, Mapping) else ()
        self.options = Options(
            using=_database(using),
            queues=_queues(queues),
            weights=tuple(
                validation.checked("the weight of a queue", values.whole, weight, 1, 9999) for weight in weights
            ),
            threads=validation.checked("threads", values.whole, threads, 1),
            async_concurrency=validation.checked("async_concurrency", values.whole, async_concurrency, 1),
            roles=_roles(roles),
            graceful_timeout=validation.checked("graceful_timeout", values.span, graceful_timeout),
            name=validation.checked("name", values.word, name, 60) if name else "",
            heartbeat_file=None if heartbeat_file is None else os.fspath(heartbeat_file),
        )
        # Guards ``_process`` and ``_thread``: threads of the project may start and stop the worker.
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads, and return when messages are delivered.

        Raises ``RuntimeError`` if it runs, or where it would see nothing that this thread has written;
        ``ImproperlyConfigured`` if the tables are missing; and what a function with ``@worker_started`` raises.
        """
        _check_place(self.options)
        with self._lock:
            if self._is_running:
                raise RuntimeError("This EmbeddedWorker runs already; make another one, or stop it first")
            process = self._process = _Process(self.options)
            # A daemon: the interpreter ends it by ``atexit``, and waits for no handler.
            thread = self._thread = threading.Thread(target=process.serve, name="delayq-embedded", daemon=True)
            atexit.register(process.end_with_interpreter, thread)
            thread.start()
        try:
            process.begun.result()
        except BaseException:
            process.stop()
            _join(thread, END_TIME)
            raise

    def stop(self) -> bool:
        """End in order: take nothing more, let running handlers finish, and release what has not begun.

        Async handlers that still run after the graceful timeout are cancelled and released. Sync ones go on in their
        threads; their messages are delivered again when this process ends, or at the end of their leases. Returns True
        if all has ended. A handler that calls this gets False at once, for the end waits for the handler. Does nothing
        where no worker runs.
        """
        process, thread = self._process, self._thread
        if process is None or thread is None or process.pid != os.getpid():
            return True
        process.stop()
        if thread is threading.current_thread() or process.is_caller:
            return False
        _join(thread, 2 * self.options.graceful_timeout + END_TIME)
        if thread.is_alive():
            logger.error("Embedded worker %s does not end", process.name)
            return False
        return process.code == FINISHED

    @property
    def name(self) -> str | None:
        """The name of the worker in the log and in ``delayq_stats``; None before its first start."""
        return None if self._process is None else self._process.name

    @property
    def is_alive(self) -> bool:
        """True while the worker delivers: for the probes of the process. No query is made."""
        process = self._process
        return process is not None and self._is_running and process.is_responsive

    @property
    def _is_running(self) -> bool:
        process, thread = self._process, self._thread
        return process is not None and thread is not None and process.pid == os.getpid() and thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.stop)


class _Process(WorkerProcess):
    """What a worker process does, in a thread of a process with other work. ``serve`` is that thread."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.pid = os.getpid()
        # Done when messages are delivered, or with the error of the start.
        self.begun: Future[None] = Future()
        self._file = HeartbeatFile(options.heartbeat_file) if options.heartbeat_file else None
        self._touch_at = 0.0

    def serve(self) -> None:
        """Work until stopped."""
        with log_writer.running(has_main=False):
            try:
                _check_tables(self.options.using)
                # Look at the state once before the first wait.
                self.look()
                self.run(self._watch)
            except BaseException as error:
                self.code = BROKEN
                if self.begun.done():
                    logger.exception("Embedded worker %s has failed", self.name)
                else:
                    try:
                        self._abandon()
                    finally:
                        # Who starts this worker waits for it.
                        self.begun.set_exception(error)
            if not self.begun.done():
                # It was stopped while it started.
                self.begun.set_result(None)
            elif self.code == BROKEN and not self.begun.exception():
                logger.critical("Embedded worker %s has ended by itself; start it again", self.name)
            connections.close_all()
            if not self.pool.held():
                atexit.unregister(self.end_with_interpreter)

    def end_with_interpreter(self, thread: threading.Thread) -> None:
        """End in order, and release what the handlers hold that end with their threads now."""
        if self.pid != os.getpid():
            return
        self.stop()
        _join(thread, 2 * self.options.graceful_timeout + END_TIME)
        using = self.options.using
        try:
            moved = crashes.release_worker(using, self.name, actor=f"worker:{self.name}", shutdown=True)
            report_moves(using, moved, WorkerExtensions(using, self.name))
        except DatabaseError as error:
            logger.warning("The messages of %s are released when their leases end: %s", self.name, in_words(error))
        connections.close_all()

    def _name_sessions(self) -> None:
        """Leave the names of sessions alone: other parts of this process open sessions, too."""

    @property
    def is_caller(self) -> bool:
        """True in the threads of this worker, and in what its handlers have other threads call."""
        is_handler = actors.current().startswith(f"worker:{self.name}/")
        return is_handler or threading.current_thread() in (self.consumer, *self.threads)

    def _watch(self) -> bool:
        if not self.begun.done():
            self._log_start()
            self.begun.set_result(None)
        now = time.monotonic()
        if self._file is not None and now >= self._touch_at and self.is_responsive:
            self._touch_at = now + TOUCH_INTERVAL
            self._file.touch()
        return False

    @property
    def is_responsive(self) -> bool:
        """True while the consumer makes rounds and the recorder records."""
        beat = self.beat
        return not self.recorder.hangs() and (not beat or time.monotonic() - beat < STALE_AFTER)

    def _log_start(self) -> None:
        options = self.options
        logger.info(
            "Embedded worker %s delivers in this process: database %s, Redis: %s, queues: %s, %d handlers. It has no "
            "supervisor: a handler that does not end keeps its thread, a message that kills its process kills this one,"
            " and handlers share its interpreter. In production, use run_delayq",
            self.name,
            options.using,
            describe(conf.get()),
            ",".join(options.queues or conf.get().QUEUES) or "all",
            options.threads,
        )

    def _on_stuck(self, deliveries: list[Delivery]) -> None:
        # Deliveries that have ended after all may be forgotten.
        self._stuck.intersection_update(self.pool.held())
        for delivery in deliveries:
            if delivery not in self._stuck:
                self._stuck.add(delivery)
                logger.error("%r does not end at its timeout, and keeps its thread; restart this process", delivery)

    def _shut_down(self) -> None:
        super()._shut_down()
        if left := self.pool.held():
            logger.warning(
                "Handlers go on in this process after the end of its worker: %s. Their messages are delivered again "
                "when the process ends, or at the end of their leases",
                ", ".join(map(repr, left)),
            )

    def _abandon(self) -> None:
        """End what has started of a worker that cannot start: the system may refuse any of its threads."""
        self.pool.stop()
        threads: list[Runner | Recorder] = [*self.runners, self.recorder]
        for thread in threads:
            thread.stop()
            if thread.is_alive():
                thread.join(timeout=2)
        self.recorder.sender.finish(0.0)
        self.parts.extensions.stop()
        self.parts.brokers.close()


def _join(thread: threading.Thread, timeout: float) -> None:
    """Wait for a thread. Ctrl-C ends the wait, on Windows too."""
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.5)


# --- checks -----------------------------------------------------------------------------------------------------------


def _queues(given: Collection[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValueError(f"queues must be several names, not {given!r}: write [{given!r}]")
    names = tuple(validation.checked("queue", values.word, name, LENGTHS.queue) for name in given)
    if len(set(names)) != len(names):
        raise ValueError(f"queues must name each queue once, not {', '.join(names)}")
    if refused := set(names) - set(pulled.without(names)):
        raise ValueError(f"queues: programs pull {', '.join(sorted(refused))} (DELAYQ['PULL_QUEUES'])")
    return names


def _roles(given: Collection[str] | None) -> frozenset[str] | None:
    if given is None:
        return None
    if isinstance(given, str):
        raise ValueError(f"roles must be several names, not {given!r}: write [{given!r}]")
    if (unknown := sorted(set(given) - set(all_roles()))) or not given:
        raise ValueError(f"roles must be of {', '.join(all_roles())}, not {', '.join(unknown) or 'none'}")
    return frozenset(given)


def _database(given: str | None) -> str:
    using = router.db_for_write(Message) if given is None else given
    if using not in django_connections:
        like = near(using, django_connections)
        raise ValueError(f"There is no database {using!r} in DATABASES.{f' Did you mean {like}?' if like else ''}")
    if reason := unsupported(using) or commits_nothing(using):
        raise ImproperlyConfigured(reason)
    return using


def _check_place(options: Options) -> None:
    """Raise an error where no worker can run in this process, or where it would see nothing."""
    using = options.using
    if library := patched_by():
        raise RuntimeError(f"{library} has patched the standard library of this process, and a worker needs threads")
    if is_in_memory(using):
        raise ImproperlyConfigured(
            f"The database {using!r} is in memory, where threads lock each other out: give it a file. In a test, "
            "TEST = {'NAME': …} in DATABASES does that"
        )
    if django_connections[using].in_atomic_block:
        raise RuntimeError(
            "An EmbeddedWorker delivers in threads of its own, which do not see what this transaction has written. In "
            "a test, use TransactionTestCase or transactional_db, or deliver with django_delayq.testing"
        )
    pool = django_connections[using].settings_dict["OPTIONS"].get("pool")
    size = _size_of(pool) if pool else None
    needed = options.threads + OTHER_CONNECTIONS
    if size is not None and size < needed:
        raise ImproperlyConfigured(
            f"A worker with {options.threads} threads keeps up to {needed} connections, and the pool of the database "
            f"{using!r} has {size}: give it a larger max_size, or the worker fewer threads"
        )


def _size_of(pool: Any) -> int:
    """Return the most connections of Django's option ``pool``: psycopg's pool has four if nothing is said."""
    given = pool if isinstance(pool, dict) else {}
    return int(given.get("max_size") or given.get("min_size", 4))


def _check_tables(using: str) -> None:
    """Raise an error if the tables are missing. If the database is away, the worker waits for it."""
    try:
        names = django_connections[using].introspection.table_names()
    except DatabaseError as error:
        logger.warning("The worker starts and tries again until it can work: %s", in_words(error))
        return
    if Message._meta.db_table not in names:
        raise ImproperlyConfigured("The tables are missing: run manage.py migrate.")
