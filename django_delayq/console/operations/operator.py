"""Does what people started in the admin for many messages at once, batch by batch."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError, connections

from ...exceptions import BrokerUnavailable
from ...extensions import Service
from .. import operations
from ..models import Operation

logger = logging.getLogger("django_delayq")

# A step that failed this often in a row will not succeed.
TRIES = 5


class Operator(Service):
    """One operation at a time. While there is none it costs one small query every five seconds."""

    name = "operator"
    thread = "operator"
    interval = 5.0

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._current: Operation | None = None
        self._failures = 0

    def tick(self) -> float:
        operation = self._current
        if operation is None:
            if not operations.has_open(self.using):
                return self.interval
            operation = self._current = operations.take(self.using, self.worker)
            if operation is None:
                return self.interval
            logger.info("Operation %s begins, or goes on", operation)
        try:
            more = operations.run_step(self.using, operation, self.worker)
        except Exception as error:
            self._failed(operation, error)
            raise
        self._failures = 0
        if not more:
            self._current = None
        return 0.0

    def leave(self) -> None:
        """The process ends in order."""
        operations.give_back(self.using, self.worker)

    def _failed(self, operation: Operation, error: Exception) -> None:
        """Give up a step that fails again and again, unless it is the database or Redis that is away."""
        if isinstance(error, BrokerUnavailable) or not self._answers():
            return
        self._failures += 1
        if self._failures >= TRIES:
            logger.error("Operation %s failed: %s: %s", operation, type(error).__name__, error)
            operations.fail(self.using, operation, self.worker, f"{type(error).__name__}: {error}")
            self._failures, self._current = 0, None

    def _answers(self) -> bool:
        connection = connections[self.using]
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        except (DatabaseError, InterfaceError):
            return False
        return True
