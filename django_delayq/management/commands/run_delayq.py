"""``manage.py run_delayq``: the worker."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import sys
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseError
from django.db import connections, router
from django.db.migrations.executor import MigrationExecutor
from django.utils import autoreload

from django_delayq import __version__, conf, durations, registry, validation
from django_delayq.broker import describe
from django_delayq.exceptions import InvalidMessage
from django_delayq.models import Message
from django_delayq.worker.budget import Budget
from django_delayq.worker.connections import leave_pools
from django_delayq.worker.once import drain
from django_delayq.worker.options import Options, all_roles
from django_delayq.worker.process import WorkerProcess
from django_delayq.worker.supervisor import Supervisor

logger = logging.getLogger("django_delayq")


class Command(BaseCommand):
    help = (
        "Deliver messages: every role in one command. Run as many of them as you like, on as many hosts; any may be "
        "killed at any moment. First SIGTERM or SIGINT: finish what runs and exit. Second: exit at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--queues", type=_queues, default=(), help="only these, in strict order of priority: a,b")
        parser.add_argument("--processes", type=_positive, help="worker processes (default: the cores, at most 4)")
        parser.add_argument("--threads", type=_positive, default=8, help="handlers at once in each process")
        parser.add_argument("--roles", type=_roles, help=f"only these roles: {','.join(all_roles())}")
        parser.add_argument("--once", action="store_true", help="deliver what is due now, and exit")
        parser.add_argument("--max-messages", type=_positive, help="exit after so many deliveries in all")
        parser.add_argument("--max-runtime", type=_duration, help="exit after this time, e.g. 1h")
        parser.add_argument(
            "--graceful-timeout",
            type=_duration,
            help="how long running handlers may go on at the end (default 30s)",
        )
        parser.add_argument("--worker-name", default="", help="shown in the log instead of the host's name")
        parser.add_argument("--heartbeat-file", help="touched every second while every process goes round")
        parser.add_argument("--reload", action="store_true", help="start anew when code changes (development)")
        parser.add_argument("--database", help="the database alias to work on")

    def handle(self, *args: Any, **options: Any) -> None:
        settings = conf.get()
        using = options["database"] or router.db_for_write(Message)
        if using not in connections:
            raise CommandError(f"There is no database {using!r}.", returncode=2)
        name = options["worker_name"]
        if name and (len(name) > 60 or not conf.WORD.fullmatch(name)):
            raise CommandError("--worker-name is up to 60 of the characters A-Z a-z 0-9 _ . -", returncode=2)
        given = options["graceful_timeout"]
        chosen = Options(
            using=using,
            queues=options["queues"],
            processes=options["processes"] or default_processes(using),
            threads=options["threads"],
            roles=options["roles"],
            max_messages=options["max_messages"],
            max_runtime=options["max_runtime"],
            graceful_timeout=settings.GRACEFUL_TIMEOUT if given is None else given,
            name=name,
            heartbeat_file=options["heartbeat_file"],
        )
        _ensure_logging(options["verbosity"])
        if not options["once"]:
            leave_pools()
        _check_tables(using)
        if options["once"]:
            self._once(chosen)
        elif options["reload"]:
            autoreload.run_with_reloader(self._inline, chosen)
        else:
            self._banner(chosen)
            code = Supervisor(chosen).run()
            if code:
                sys.exit(code)

    def _banner(self, options: Options) -> None:
        logger.info(
            "django-delayq %s, database %s, Redis: %s, queues: %s, %d x %d handlers, %d topics, pid %d",
            __version__,
            options.using,
            describe(conf.get()),
            ",".join(options.queues or conf.get().QUEUES) or "all",
            options.processes,
            options.threads,
            len(registry.handlers()),
            os.getpid(),
        )

    def _once(self, options: Options) -> None:
        stop = threading.Event()
        former = {}
        if threading.current_thread() is threading.main_thread():
            former = {
                number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
            }
        try:
            delivered = drain(options, stop)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self.stdout.write(f"{delivered} delivered")

    def _inline(self, options: Options) -> None:
        """In this process, under the reloader, which ends it when code changes."""
        self._banner(options)
        process = WorkerProcess(options, Budget(options.max_messages))
        ended = threading.Event()

        def end() -> None:
            """The reloader exits from its own thread: what runs here gives its messages back first."""
            process.stop()
            ended.wait(options.graceful_timeout + 5)

        atexit.register(end)
        try:
            process.run()
        finally:
            ended.set()


def default_processes(using: str) -> int:
    """The cores, at most four; one on SQLite, which has one writer."""
    if connections[using].vendor == "sqlite":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(4, cores))


def _check_tables(using: str) -> None:
    """A database that is away is waited for; one without our tables will not do."""
    try:
        executor = MigrationExecutor(connections[using])
        mine = [node for node in executor.loader.graph.leaf_nodes() if node[0] == Message._meta.app_label]
        pending = executor.migration_plan(mine)
        missing = Message._meta.db_table not in connections[using].introspection.table_names()
    except DatabaseError as error:
        logger.warning("The database does not answer yet: %s", error)
        return
    if missing:
        raise CommandError("The tables are missing: run manage.py migrate.", returncode=78)
    if pending:
        logger.warning("Migrations are pending: run manage.py migrate")


def _ensure_logging(verbosity: int) -> None:
    """A project that configured no logging still sees what the worker does."""
    if verbosity == 0 or logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _duration(text: str) -> float:
    try:
        span = durations.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if span < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return span


def _queues(text: str) -> tuple[str, ...]:
    try:
        names = tuple(validation.queue(name.strip()) for name in text.split(","))
    except InvalidMessage as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError("a queue is named twice")
    return names


def _roles(text: str) -> frozenset[str]:
    names = frozenset(name.strip().removesuffix("s") for name in text.split(","))
    unknown = names - set(all_roles())
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such role: {', '.join(sorted(unknown))}; there are {', '.join(all_roles())}"
        )
    return names
