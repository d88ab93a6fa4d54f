"""Registers the console with the queue's extension point, and the system check of its settings with Django."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.core import checks
from django.db import DatabaseError, InterfaceError

from .. import extensions, signals
from ..checks import TAG, errors
from ..core import actors
from ..extensions import HandledMessage, RestoreObserver, RestoreStart, Service, StatisticsSection, WorkerExtension
from ..project import conf, console_conf
from ..record.sql.rows import Claimed, Moved
from ..signals import MessageFacts

logger = logging.getLogger("django_delayq")


class ConsoleExtension(WorkerExtension):
    """Counts what happens to messages, and runs operations in processes with the role ``operator``."""

    def __init__(self, using: str, worker: str) -> None:
        from .operations.lifecycle import OperationRunner
        from .statistics.rollups import RollupWriter, UnwrittenCounts

        super().__init__(using, worker)
        self.counts = UnwrittenCounts()
        self._writer = RollupWriter(using, self.counts)
        self._runner = OperationRunner(using, worker)

    def services(self, roles: frozenset[str]) -> Iterator[Service]:
        from .operations.lifecycle import OperationLook
        from .statistics.rollups import RollupCompactor

        yield self._writer
        if "janitor" in roles:
            yield RollupCompactor(self.using)
        if self._runner.name in roles:
            yield from (OperationLook(self._runner), self._runner)

    def claimed(self, claims: Sequence[Claimed]) -> None:
        self.counts.claimed(claims)

    def handled(self, messages: Sequence[HandledMessage]) -> None:
        self.counts.handled(messages)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        self.counts.ended("consumed", messages)

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        self.counts.ended("retried", messages)

    def ended(self, moves: Sequence[Moved]) -> None:
        self.counts.moved(moves)

    def stop(self) -> None:
        # If the database is away, the last counts are lost, and another worker goes on with the operation after its
        # lease.
        try:
            try:
                self._writer.tick()
            finally:
                self._runner.release()
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The console of a worker that ends could not write to the database: %s", error)


def _observe_restore(start: RestoreStart) -> RestoreObserver:
    from .operations.work import RestoreOperation

    return RestoreOperation(start)


def _statistics(using: str, now: datetime) -> StatisticsSection:
    from .statistics.section import collect

    return collect(using, now)


def _record_action(**event: Any) -> None:
    """Write the action that ``operator_action`` tells of to the audit log."""
    from . import audit

    facts = {name: event[name] for name in ("message_id", "reason", "outcomes")}
    # The context of the action, which names the actor, may have ended by the commit.
    with actors.acting_as(event["actor"]):
        audit.record(event["using"], event["action"], event["target"], **facts)


def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check ``DELAYQ["CONSOLE"]``: ``delayq.E001`` to ``E003``. Touches neither the database nor Redis."""
    _settings, problems = console_conf.parse(conf.section("CONSOLE"))
    return errors(problems)


def register() -> None:
    """Register the extension and the check. Called when the apps are ready; imports tables and services when needed."""
    extensions.add_to_workers(ConsoleExtension, roles=("operator",))
    extensions.observe_restores(_observe_restore)
    extensions.add_to_statistics(_statistics)
    signals.operator_action.connect(_record_action, dispatch_uid="django_delayq.console.additions")
    checks.register(check_settings, TAG)
