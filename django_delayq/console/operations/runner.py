"""The service that does operations in a worker, step by step."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError, connections

from ...core.exceptions import BrokerUnavailable
from ...extensions import Service
from ..models import Operation
from . import lifecycle

logger = logging.getLogger("django_delayq")

# After so many failures of a step in a row the operation fails.
MAX_FAILURES = 5


class OperationRunner(Service):
    """Does one operation at a time. While there is none it issues one small query every five seconds."""

    # Also the role that runs it.
    name = "operator"
    thread = "operator"
    is_shared = True
    interval = 5.0

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._current: Operation | None = None
        self._failures = 0

    def tick(self) -> float:
        operation = self._current
        if operation is None:
            operation = self._current = lifecycle.lease_next(self.using, self.worker)
            if operation is None:
                return self.interval
            logger.info("Working on operation %s", operation)
        try:
            more = lifecycle.run_step(self.using, operation, self.worker)
        except Exception as error:
            self._failed(operation, error)
            raise
        self._failures = 0
        if not more:
            self._current = None
        return 0.0

    def release(self) -> None:
        """Release the operation, if there is one, when the process stops in order: another worker goes on at once."""
        if self._current is not None:
            lifecycle.release(self.using, self.worker)

    def _failed(self, operation: Operation, error: Exception) -> None:
        """Fail the operation after some failures in a row; those while the database or Redis is away do not count."""
        if isinstance(error, BrokerUnavailable):
            # It is leased again when its lease has run out. Until then those have their turn that need no Redis.
            self._current = None
            return
        if not self._database_answers():
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            text = f"{type(error).__name__}: {error}"
            logger.error("Operation %s failed after %d tries of a step: %s", operation, self._failures, text)
            lifecycle.fail(self.using, operation, self.worker, text)
            self._failures, self._current = 0, None

    def _database_answers(self) -> bool:
        connection = connections[self.using]
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        except (DatabaseError, InterfaceError):
            return False
        return True
