"""``manage.py run_delayq``: run a worker."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from django.core.management.base import BaseCommand, CommandError, CommandParser, SystemCheckError
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import translation

from ... import __version__, extensions, middleware
from ...api import pausing
from ...broker import check_settings, describe
from ...core import values
from ...core.findings import Level
from ...core.names import NOTHING, near
from ...core.readable import patched_by
from ...core.worker_options import Options
from ...extensions import WorkerOption
from ...inspector import diagnostics
from ...inspector.migrations import pending_migrations
from ...inspector.worker_list import asked
from ...models import Message
from ...project import conf, pulled, registry
from ...record.sql import has_one_writer
from ...record.sql.troubles import Trouble, in_words, trouble
from ...restore import reading
from ...worker.processes import output, plain_signals, reloading
from ...worker.processes.process import BROKEN, STUCK, OnceProcess, WorkerProcess, all_roles
from ...worker.processes.supervisor import Supervisor
from ...worker.run.reporting import be_verbose
from ...worker.shared.connections import leave_pools
from ...worker.shared.lifetime import in_megabytes, resident_memory
from ...worker.shared.log_writer import FINISH_TIME, log_writer
from .. import _common as common

logger = logging.getLogger("django_delayq")

# The options that say how much runs at once, and when a worker or one of its processes ends.
AT_ONCE = {
    "--processes": (common.positive, "worker processes (default: one per core, at most 4)"),
    "--threads": (common.positive, "handlers that run at once in each process (default %(default)s)"),
    "--async-concurrency": (
        common.positive,
        "async handlers that run at once on the event loop of each process (default %(default)s)",
    ),
}
LIMITS = {
    "--max-messages": (common.positive, "each process ends after this number of messages"),
    "--max-runtime": (common.lasting, "exit after this time, e.g. 1h"),
    "--max-tasks-per-child": (
        common.positive,
        "replace each worker process in order after this number of messages",
    ),
    "--max-memory-per-child": (
        common.memory,
        "replace each worker process in order when it has more resident memory than this, e.g. 200M",
    ),
    "--graceful-timeout": (
        common.duration,
        "how long running handlers may go on after the first signal (default %(default)gs)",
    ),
}
# The options whose defaults are those of ``Options``.
DEFAULTS = ("threads", "async_concurrency", "graceful_timeout")


class Command(BaseCommand):
    help = (
        "Run a worker, which delivers messages and has every role. Run as many workers as you like, on as many hosts; "
        "each may be killed at any moment. The first SIGTERM or SIGINT ends the worker when its running handlers are "
        "finished, the second ends it at once."
    )

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None, **options: bool) -> None:
        super().__init__(stdout, stderr, **options)
        self.stdout = output.Output(stdout or sys.stdout)
        self.stderr = output.Output(stderr or sys.stderr)
        self.stderr.style_func = self.style.ERROR

    def run_from_argv(self, argv: list[str]) -> None:
        output.occupy_closed()
        plain_signals.heed_as_pid_1()
        log_writer.start()
        code: object = 1
        try:
            super().run_from_argv(argv)
            code = 0
        except SystemExit as end:
            code = end.code or 0
            raise
        finally:
            log_writer.submit(output.drop_unwritten)
            if not log_writer.stop(FINISH_TIME):
                # Otherwise Python would wait at its end for the thread, which may hold the lock of a stream.
                os._exit(code if isinstance(code, int) else 1)

    def check(self, *args: Any, **options: Any) -> None:
        """Run the system checks of the project. Raises ``SystemCheckError`` with the exit code of wrong settings."""
        try:
            super().check(*args, **options)
        except SystemCheckError as error:
            error.returncode = common.MISCONFIGURED
            raise

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        epilog = "Apps add options of their own, which there are only while the app is in INSTALLED_APPS."
        parser = super().create_parser(prog_name, subcommand, epilog=epilog, **kwargs)
        common.give_hints(parser, _MEANT)
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--queue",
            action="append",
            type=_queue,
            default=[],
            metavar="QUEUE[=WEIGHT]",
            help="serve only this queue (repeatable): in strict order of priority, or by weight with a=3",
        )
        common.add_values(parser.add_argument, AT_ONCE)
        parser.add_argument(
            "--roles", type=_roles, help=f"have only these roles, separated by commas: {', '.join(all_roles())}"
        )
        parser.add_argument("--once", action="store_true", help="deliver the messages that are due now, and exit")
        common.add_values(parser.add_argument, LIMITS)
        parser.add_argument(
            "--worker-name", type=_name, help="the name of the worker in the log (default: the name of the host)"
        )
        parser.add_argument("--heartbeat-file", help="a file to touch every second while every process is responsive")
        parser.add_argument("--reload", action="store_true", help="restart when code changes (for development)")
        for option in extensions.worker_options():
            # An option has no default here: a switch with one would be on or off, and never left out.
            parser.add_argument(option.flag, **{**option.argument, "default": argparse.SUPPRESS})
        common.add_database(parser)
        parser.set_defaults(**{name: Options._field_defaults[name] for name in DEFAULTS})

    def handle(self, *args: Any, **options: Any) -> None:
        with log_writer.running():
            self._handle(options)

    def _handle(self, options: Mapping[str, Any]) -> None:
        _check_interpreter()
        with common.errors_as_exit_codes():
            check_settings()
            middleware.chain()
        chosen = _chosen(options)
        added = _added(options)
        _check_lifetimes(options)
        _check_once(chosen, once=options["once"])
        _ensure_logging(options["verbosity"])
        if options["verbosity"] > 1:
            be_verbose()
        if not options["once"]:
            leave_pools()
        with common.errors_as_exit_codes():
            _check_tables(chosen.using, waits=not options["once"])
        _log_queues(chosen)
        if options["once"]:
            self._once(chosen, is_silent=options["verbosity"] == 0)
        elif options["reload"]:
            reloading.run(self._inline, chosen, added)
        else:
            self._banner(chosen)
            _begin(chosen, added)
            code = Supervisor(chosen).run()
            if code:
                sys.exit(code)

    def _banner(self, options: Options) -> None:
        logger.info(
            "django-delayq %s, database %s, Redis: %s, queues: %s, %d x %d handlers, %d topics, pid %d",
            __version__,
            options.using,
            describe(conf.get()),
            ",".join(_in_words(options)) or "all",
            options.processes,
            options.threads,
            len(registry.handlers()),
            os.getpid(),
        )

    def _once(self, options: Options, *, is_silent: bool) -> None:
        process = OnceProcess(options)
        former = {}
        if threading.current_thread() is threading.main_thread():

            def end(*_: object) -> None:
                """End in order; the next signal ends the run as it ends any program."""
                for number in plain_signals.CAUGHT:
                    signal.signal(number, signal.SIG_DFL)
                process.stop()

            former = {number: signal.signal(number, end) for number in plain_signals.CAUGHT}
            plain_signals.switch(on=True)
        try:
            with common.errors_as_exit_codes():
                code = process.run()
        finally:
            plain_signals.switch(on=False)
            for number, handler in former.items():
                signal.signal(number, handler)
        if not is_silent:
            self.stdout.write(f"{process.delivered} delivered")
        if code in (STUCK, BROKEN):
            raise CommandError("The run ended early, and due messages may be left: the log says why.")

    def _inline(self, options: Options, added: Mapping[WorkerOption, Any]) -> None:
        """Run one worker process here, under the reloader, which ends this process when code changes."""
        self._banner(options)
        _begin(options, added)
        process = WorkerProcess(options)
        ended = threading.Event()

        def end() -> None:
            """Stop the worker before the reloader exits from its own thread, so that it releases its messages."""
            process.stop()
            ended.wait(options.graceful_timeout + 5)

        atexit.register(end)
        plain_signals.switch(on=True)
        try:
            if process.run() in (STUCK, BROKEN):
                logger.error("The worker has ended; it starts again when code changes")
        finally:
            ended.set()


def _check_interpreter() -> None:
    """Raise ``CommandError`` where no worker can run, or where no signal would stop it."""
    if not hasattr(os, "fork"):
        raise CommandError(
            "run_delayq needs Linux, macOS or another POSIX system, also with --once; "
            "on Windows, run it in WSL or in a container.",
            returncode=common.MISCONFIGURED,
        )
    if library := patched_by():
        raise CommandError(
            f"{library} has patched the standard library of this process, and nothing could stop a worker in it: start"
            " run_delayq without that patch. Worker processes have real threads, and an event loop for async handlers.",
            returncode=common.MISCONFIGURED,
        )


def _chosen(options: Mapping[str, Any]) -> Options:
    """Return the options of the worker. Raises ``CommandError`` for values that no worker can have."""
    using = common.database(options)
    queues, weights = _queues(options["queue"])
    same = {name: options[name] for name in Options._fields if name in options}
    own = {"using": using, "queues": queues, "weights": weights, "name": options["worker_name"] or ""}
    return Options(**{**same, **own, "processes": options["processes"] or default_processes(using)})


def _name(text: str) -> str:
    return common.checked(values.word, text, 60)


def _added(options: Mapping[str, Any]) -> dict[WorkerOption, Any]:
    """Return the options of extensions that were given, with their values."""
    added = {option: value for option in extensions.worker_options() if (value := options.get(option.name)) is not None}
    flags = [option.flag for option in added] + ["--reload"] * options["reload"]
    if flags and options["once"]:
        raise common.wrong_usage(f"{', '.join(flags)}: only for a worker that stays; leave out --once")
    return added


def _check_once(options: Options, *, once: bool) -> None:
    """Raise ``CommandError`` if ``--once`` would deliver nothing, or would not see the rows of an open transaction."""
    if once and not options.has("consumer"):
        raise common.wrong_usage("--once delivers messages: give --roles that have the consumer")
    if once and connections[options.using].in_atomic_block:
        raise common.wrong_usage(
            "run_delayq --once delivers in threads of its own, which do not see what this transaction has written. "
            "In a test, deliver with django_delayq.testing: delayq.drain()."
        )


def _begin(options: Options, added: Mapping[WorkerOption, Any]) -> None:
    """Call the extensions whose options were given, before the first process starts."""
    with common.errors_as_exit_codes():
        for option, value in added.items():
            option.begin(options, value)


def _check_lifetimes(options: Mapping[str, Any]) -> None:
    """Raise ``CommandError`` for limits of processes that do not exist, contradict each other, or are too small."""
    limit = options["max_memory_per_child"]
    names = ("processes", "max_tasks_per_child", "max_memory_per_child", "heartbeat_file")
    counted = {**options, "processes": (options["processes"] or 1) > 1}
    given = ", ".join(f"--{name.replace('_', '-')}" for name in names if counted[name])
    for mode in ("once", "reload"):
        if given and options[mode]:
            raise common.wrong_usage(f"{given}: only for a worker with worker processes; leave out --{mode}")
    if not limit and not options["max_tasks_per_child"]:
        return
    if options["max_messages"]:
        raise common.wrong_usage(
            "--max-tasks-per-child and --max-memory-per-child replace a process, and --max-messages ends it for good; "
            "leave one of them out"
        )
    # This process has loaded the project, as its children will have.
    used = resident_memory()
    if limit and used >= limit:
        raise common.wrong_usage(
            f"--max-memory-per-child {in_megabytes(limit)}: a worker process uses {in_megabytes(used)} before its "
            "first message"
        )


def default_processes(using: str) -> int:
    """Return the number of processes: one per core, at most four; one on SQLite, which has one writer."""
    if has_one_writer(using):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(4, cores))


def _check_tables(using: str, *, waits: bool) -> None:
    """Raise an error if tables or rights are missing, or if the database is away and the worker does not wait."""
    try:
        pending = pending_migrations(using)
        missing = Message._meta.db_table not in connections[using].introspection.table_names()
        hidden = diagnostics.of_row_security(diagnostics.hidden_rows(using))
    except DatabaseError as error:
        if not waits or trouble(error) in (Trouble.OUTDATED, Trouble.FORBIDDEN):
            raise
        logger.warning("The worker starts and tries again until it can work: %s", in_words(error))
        return
    if missing:
        raise CommandError("The tables are missing: run manage.py migrate.", returncode=common.MISCONFIGURED)
    if pending:
        logger.warning("Migrations are not applied yet (%s): run manage.py migrate", ", ".join(pending))
    with translation.override(None):
        for finding in hidden:
            level = logging.ERROR if finding.level == Level.CRITICAL else logging.WARNING
            logger.log(level, "%s: %s", finding.name, finding.text)


def _log_queues(options: Options) -> None:
    """Log which queues are paused, and which queues only ``--queue`` names: these may be misspelt."""
    try:
        known = reading.queues(options.using) if options.queues else []
        paused = pausing.paused(options.using)
    except DatabaseError:
        # The worker waits until the database can be asked.
        return
    for name in sorted(paused.keys() & set(options.queues or conf.get().QUEUES or paused)):
        pausing.log_paused(paused[name])
    for queue in options.queues:
        if like := near(queue, known):
            text = "This worker serves the queue %s, which nothing else names. Did you mean %s?"
            logger.warning(text, queue, like)
        elif queue not in known:
            logger.info("This worker serves the queue %s, which nothing else names yet", queue)


def _ensure_logging(verbosity: int) -> None:
    """Write the log to stderr if the project has configured no logging; with verbosity 0 write it nowhere."""
    if logger.hasHandlers():
        return
    # Without any handler Python itself would write warnings to stderr.
    handler = logging.StreamHandler() if verbosity else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s"))
    logger.addHandler(handler)
    # The threads of handlers log below INFO that a delivery begins.
    logger.setLevel(logging.DEBUG if verbosity > 2 else logging.INFO)


def _queue(text: str) -> tuple[str, int]:
    """Read the name of a queue, and its weight or 0."""
    name, sign, weight = (part.strip() for part in text.partition("="))
    if "," in name:
        each = " ".join(f"--queue {one.strip()}" for one in text.split(","))
        raise argparse.ArgumentTypeError(f"one queue, not several: write {each}")
    queue = common.queue_name(name)
    if sign and not (weight.isascii() and weight.isdecimal() and len(weight) <= 4 and int(weight)):
        raise argparse.ArgumentTypeError(f"{name}={weight}: a weight is a whole number from 1 to 9999")
    return queue, int(weight) if sign else 0


def _queues(given: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of queues, and their weights if there are any."""
    names, weights = tuple(name for name, _weight in given), tuple(weight for _name, weight in given if weight)
    if len(set(names)) != len(names):
        raise common.wrong_usage("--queue names a queue twice.")
    if refused := set(names) - set(pulled.without(names)):
        raise common.wrong_usage(f"--queue: programs pull {', '.join(sorted(refused))} (DELAYQ['PULL_QUEUES']).")
    if weights and len(weights) != len(names):
        raise common.wrong_usage("Give all queues a weight (--queue a=3 --queue b=1), or none (strict order).")
    return names, weights


# The options under the names that the workers of other libraries give them.
_MEANT = {
    **dict.fromkeys(("-c", "--concurrency", "--worker-threads"), "--threads"),
    **dict.fromkeys(("-Q", "-q", "--queues", "--queue-name"), "--queue, once for each queue"),
    **dict.fromkeys(("-l", "--loglevel", "--log-level"), "-v 2"),
    **dict.fromkeys(("-P", "--pool", "--autoscale", "-w", "--workers"), "--processes and --threads"),
    **dict.fromkeys(("-n", "--hostname", "--name"), "--worker-name"),
    **dict.fromkeys(("--batch", "--burst", "--one-shot", "--run-once"), "--once"),
    **dict.fromkeys(("--watch", "--autoreload"), "--reload"),
    **dict.fromkeys(("--soft-time-limit", "--time-limit"), "timeout= at @handler"),
    "--max-jobs": "--max-messages",
    # These options are not needed: manage.py names the project, and each worker makes the messages of schedules.
    **dict.fromkeys(("-A", "--app", "worker", "-B", "--beat", "--scheduler", "--with-scheduler"), NOTHING),
    **dict.fromkeys(("-E", "--events", "-k", "--worker-type", "-O", "-D", "--detach", "--pidfile"), NOTHING),
    **dict.fromkeys(("--prefetch-multiplier", "--without-gossip", "--without-mingle"), NOTHING),
    **dict.fromkeys(("default", "high", "low"), "--queue, once for each queue"),
}


def _in_words(options: Options) -> Iterable[str]:
    if options.weights:
        return map("{}={}".format, options.queues, options.weights)
    return options.queues or conf.get().QUEUES


def _roles(text: str) -> frozenset[str]:
    known = set(all_roles())
    given = (name.strip() for name in text.split(","))
    names = frozenset(name if name in known else name.removesuffix("s") for name in given)
    unknown = names - known
    if unknown:
        said = ", ".join(asked({name: near(name, known) for name in sorted(unknown)}))
        raise argparse.ArgumentTypeError(f"there is no role {said}; the roles are {', '.join(all_roles())}")
    return names
