"""The public extension point: an installed app adds to ``run_delayq``, restores, ``delayq_stats`` and ``delayq_check``.

An app registers its additions in its ``AppConfig.ready()``. The console adds its statistics and its operations this
way. While nothing is registered, the only cost is that a worker checks an empty tuple for each batch of messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from django.db import DatabaseError, InterfaceError

from .core.findings import Cause, Finding, Level
from .core.lazy import at_first_use
from .core.worker_options import Options
from .record.sql.rows import Claimed, Moved
from .signals import MessageFacts

if TYPE_CHECKING:
    from .models.workers import WorkerList
    from .restore.selection import Overdue, Selection, Tally

__all__ = [
    "Cause",
    "Claimed",
    "Finding",
    "HandledMessage",
    "Level",
    "Moved",
    "Options",
    "Overdue",
    "RestoreObserver",
    "RestoreStart",
    "Selection",
    "Service",
    "StatisticsSection",
    "Tally",
    "WorkerExtension",
    "WorkerList",
    "add_exposition",
    "add_to_check",
    "add_to_statistics",
    "add_to_workers",
    "add_worker_option",
    "observe_restores",
]

# These modules need models: an app may import this module before there are any.
if not TYPE_CHECKING:
    __getattr__ = at_first_use(
        __name__,
        {"WorkerList": "models.workers", **dict.fromkeys(("Overdue", "Selection", "Tally"), "restore.selection")},
    )

logger = logging.getLogger("django_delayq")


class Service:
    """A periodic duty of a worker process. Subclass it, and return it from ``WorkerExtension.services``."""

    # The log shows this name.
    name = "service"
    # Services of one thread take turns, and share a database connection. A service that may be busy for seconds has a
    # thread of its own, and so a connection of its own.
    thread = "upkeep"
    # True: the work is the same in every process, and one process does it for all while Redis answers. The others do it
    # once at their start and every two minutes; a process goes on while its ticks return 0 or raise.
    is_shared = False
    # False: the ticks use no database. A thread closes its connection while no service is due soon that uses it.
    uses_database = True
    # After each further error in a row the worker waits longer, up to this many seconds.
    longest_backoff = 5.0

    def tick(self) -> float:
        """Do one bounded piece of work. Return the seconds until the next tick (0: at once).

        It may raise: the worker logs the first of several errors in a row, waits, and calls it again.
        """
        raise NotImplementedError


class HandledMessage(MessageFacts, Protocol):
    """A message whose handler has run. ``runtime``: for how many seconds."""

    @property
    def runtime(self) -> float: ...


class WorkerExtension:
    """Adds services to one worker process, and follows the deliveries and moves of messages there. Subclass it.

    One object is made for each process. When a process has died, another one is made in its place, in a process that
    the supervisor starts for that: that one gets ``ended`` for the messages that the dead process held, and then
    ``stop``. The methods from ``claimed`` to ``ended`` are called by several threads of the worker, in batches, after
    the commit. They must be quick and must not use the database: the next message waits for them. Their exceptions are
    logged, and the worker goes on.
    """

    def __init__(self, using: str, worker: str) -> None:
        """``using`` is the database alias of the messages, ``worker`` the name of the process in the log."""
        self.using = using
        self.worker = worker

    def services(self, roles: frozenset[str]) -> Iterable[Service]:
        """Return the services to run in a process that has these roles."""
        return ()

    def claimed(self, claims: Sequence[Claimed]) -> None:
        """Note that these messages were claimed together."""

    def handled(self, messages: Sequence[HandledMessage]) -> None:
        """Note that the handlers of these messages have run, with whatever outcome."""

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        """Note that the handlers of these messages succeeded."""

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        """Note that the handlers of these messages failed, and that the messages will be delivered again."""

    def ended(self, moves: Sequence[Moved]) -> None:
        """Note other moves of messages: to *dead*, *cancelled* or *expired*, or back to *scheduled*.

        No handler failed for those that are scheduled again: they were released, or their worker crashed.
        """

    def stop(self) -> None:
        """Finish: the process ends in order, and its services have stopped. This method may use the database."""


@dataclass(frozen=True, slots=True)
class RestoreStart:
    """A restore that begins. ``who`` is its actor; ``described`` names its messages in words."""

    using: str
    who: str
    selection: Selection
    overdue: Overdue
    spread: float
    no_expired: bool
    described: str
    # The number of messages to put; None: not counted.
    total: int | None


class RestoreObserver(Protocol):
    """Follows one restore. Its exceptions are logged, and the restore goes on."""

    def progress(self, messages: int, tally: Tally, position: str | None) -> bool:
        """Note that ``messages`` more were handled; ``tally`` counts all so far. Return True to stop the restore."""

    def ended(self, tally: Tally, position: str | None, error: str) -> None:
        """Note the end of the restore: it is complete, was stopped at ``position``, or failed with ``error``."""


class StatisticsSection(Protocol):
    """A section of ``delayq_stats``: lines of text, and facts for ``--json``."""

    def lines(self) -> Iterable[str]:
        """Return the lines of text to print."""

    def facts(self) -> dict[str, Any]:
        """Return the keys and values to add to the JSON object."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerOption:
    """An option that an extension adds to ``run_delayq``."""

    flag: str
    begin: Callable[[Options, Any], None]
    argument: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.argument.get("dest") or self.flag.lstrip("-").replace("-", "_"))


@dataclass(slots=True)
class Additions:
    """What the apps of this process have added."""

    workers: list[Callable[[str, str], WorkerExtension]] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    worker_options: list[WorkerOption] = field(default_factory=list)
    restore_observers: list[Callable[[RestoreStart], RestoreObserver]] = field(default_factory=list)
    statistics: list[Callable[[str, datetime], StatisticsSection]] = field(default_factory=list)
    findings: list[Callable[[str, WorkerList], Iterable[Finding]]] = field(default_factory=list)
    expositions: list[Callable[[str, str], bytes]] = field(default_factory=list)


additions = Additions()


def add_to_workers(make: Callable[[str, str], WorkerExtension], *, roles: Iterable[str] = ()) -> None:
    """Have each worker process make an extension with ``make(using, worker)``.

    ``roles`` are the roles that the extension adds: ``run_delayq --roles`` takes them besides its own, and
    ``WorkerExtension.services`` gets the roles of the process.
    """
    if make not in additions.workers:
        additions.workers.append(make)
        additions.roles.extend(role for role in roles if role not in additions.roles)


def add_worker_option(flag: str, begin: Callable[[Options, Any], None], **argument: Any) -> None:
    """Add an option to ``run_delayq``: its ``flag``, and the keyword arguments of argparse's ``add_argument``.

    When the option is given, the supervisor calls ``begin(options, value)`` before it starts worker processes:
    ``options`` are those of the worker, among them ``using`` and ``processes``. What ``begin`` opens, such as a socket,
    all processes inherit; there it may also call ``add_to_workers``. It raises ``CommandError`` for an impossible
    value. A ``default`` of the option does not count.
    """
    if all(option.flag != flag for option in additions.worker_options):
        additions.worker_options.append(WorkerOption(flag, begin, argument))


def observe_restores(make: Callable[[RestoreStart], RestoreObserver]) -> None:
    """Have each restore make an observer: the restores of ``delayq_restore`` and of loaders."""
    if make not in additions.restore_observers:
        additions.restore_observers.append(make)


def add_to_statistics(make: Callable[[str, datetime], StatisticsSection]) -> None:
    """Add a section to ``delayq_stats``: ``make(using, now)`` collects it."""
    if make not in additions.statistics:
        additions.statistics.append(make)


def add_to_check(find: Callable[[str, WorkerList], Iterable[Finding]]) -> None:
    """Add findings to ``delayq_check``, and to the problems on the console's pages: ``find(using, workers)``.

    ``workers.at`` is the moment by the record's clock. The texts may be translated: the command asks for the original.
    Its exception is logged, and counts as a critical finding.
    """
    if find not in additions.findings:
        additions.findings.append(find)


def add_exposition(expose: Callable[[str, str], bytes]) -> None:
    """Have ``/metrics`` of the HTTP door answer ``expose(using, prefix)``, in the text format of Prometheus.

    The answer goes to those who may see the queues that begin with the prefix. If several apps add one, the first
    answers.
    """
    if expose not in additions.expositions:
        additions.expositions.append(expose)


def roles() -> tuple[str, ...]:
    """Return the roles that extensions of workers add."""
    return tuple(additions.roles)


def worker_options() -> tuple[WorkerOption, ...]:
    """Return the options that extensions add to ``run_delayq``."""
    return tuple(additions.worker_options)


def exposition() -> Callable[[str, str], bytes] | None:
    """Return what ``/metrics`` of the HTTP door answers; None: no app adds it."""
    return next(iter(additions.expositions), None)


def statistics(using: str, now: datetime) -> list[StatisticsSection]:
    """Collect the sections that were added to ``delayq_stats``."""
    return [make(using, now) for make in additions.statistics]


def findings(using: str, workers: WorkerList) -> list[Finding]:
    """Collect the findings that were added to ``delayq_check``."""
    return [found for find in additions.findings for found in _found(find, using, workers)]


def _found(find: Callable[[str, WorkerList], Iterable[Finding]], using: str, workers: WorkerList) -> list[Finding]:
    try:
        return list(find(using, workers))
    except (DatabaseError, InterfaceError):
        # An error of the database concerns all findings.
        raise
    except Exception as error:
        name = f"{find.__module__}.{getattr(find, '__qualname__', find)}"
        logger.exception("An extension failed: %s", name)
        return [Finding("Extension", Level.CRITICAL, f"{name}: {type(error).__name__}: {error}")]


class WorkerExtensions:
    """Calls all extensions of one worker process, and logs their exceptions."""

    def __init__(self, using: str, worker: str, own: Iterable[WorkerExtension] = ()) -> None:
        """``own`` are those of the queue itself."""
        made = (_call(make, using, worker) for make in additions.workers)
        self._all = (*own, *(extension for extension in made if extension is not None))

    def services(self, roles: frozenset[str]) -> list[Service]:
        return [service for extension in self._all for service in _call(_services, extension, roles) or []]

    def claimed(self, claims: Sequence[Claimed]) -> None:
        for extension in self._all if claims else ():
            _call(extension.claimed, claims)

    def handled(self, messages: Sequence[HandledMessage]) -> None:
        for extension in self._all if messages else ():
            _call(extension.handled, messages)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        for extension in self._all if messages else ():
            _call(extension.consumed, messages)

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        for extension in self._all if messages else ():
            _call(extension.retried, messages)

    def ended(self, moves: Sequence[Moved]) -> None:
        for extension in self._all if moves else ():
            _call(extension.ended, moves)

    def stop(self) -> None:
        for extension in self._all:
            _call(extension.stop)


class RestoreObservers:
    """Calls all observers of one restore, and logs their exceptions."""

    def __init__(self, start: RestoreStart) -> None:
        self._all = [observer for make in additions.restore_observers if (observer := _call(make, start)) is not None]

    def progress(self, messages: int, tally: Tally, position: str | None) -> bool:
        # A list, not a generator: every observer is called, also when an earlier one returns True.
        answers = [_call(observer.progress, messages, tally, position) for observer in self._all]
        return any(answers)

    def ended(self, tally: Tally, position: str | None, error: str = "") -> None:
        for observer in self._all:
            _call(observer.ended, tally, position, error)


def _services(extension: WorkerExtension, roles: frozenset[str]) -> list[Service]:
    return list(extension.services(roles))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit):
        # No extension ends a thread of a worker.
        logger.exception("An extension failed: %s", getattr(function, "__qualname__", function))
        return None
