"""What every role has in common: the loop, the wait, the patience with errors, the stop."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence

from django.db import Error as DatabaseError

from ..exceptions import BrokerUnavailable
from . import connections

logger = logging.getLogger("django_delayq")


class Service:
    """A role: something to do now and then.

    ``tick`` does one bounded piece of it and returns in how many seconds to come back (0: at once). It may raise; the
    runner waits, longer each time, and calls again.
    """

    name = "service"
    # The longest wait after errors, in seconds.
    patience = 5.0

    def tick(self) -> float:
        raise NotImplementedError


class Runner(threading.Thread):
    """Runs services in one thread, each when it wants, until it is stopped."""

    def __init__(self, name: str, services: Sequence[Service]) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self.services = list(services)
        self._stopping = threading.Event()
        self._errors: dict[str, int] = {}

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        due = {service.name: 0.0 for service in self.services}
        try:
            while not self._stopping.is_set():
                for service in self.services:
                    if self._stopping.is_set():
                        return
                    if due[service.name] <= time.monotonic():
                        due[service.name] = time.monotonic() + self._tick(service)
                self._stopping.wait(max(0.0, min(due.values()) - time.monotonic()))
        finally:
            connections.close_all()

    def _tick(self, service: Service) -> float:
        connections.freshen()
        try:
            wait = service.tick()
        except Exception as error:  # noqa: BLE001
            return self._failed(service, error)
        finally:
            connections.scrub()
        if self._errors.pop(service.name, 0):
            logger.info("The %s works again", service.name)
        return wait

    def _failed(self, service: Service, error: Exception) -> float:
        count = self._errors[service.name] = self._errors.get(service.name, 0) + 1
        if count == 1:
            expected = isinstance(error, DatabaseError | BrokerUnavailable)
            logger.warning(
                "The %s waits: %s: %s",
                service.name,
                type(error).__name__,
                error,
                exc_info=None if expected else error,
            )
        return backoff(count, service.patience)


def backoff(failures: int, most: float) -> float:
    """0.1, 0.2, 0.4 … seconds, at most ``most``, with up to a quarter more at random."""
    wait = min(most, 0.1 * 2.0 ** min(failures - 1, 20))
    return wait * (1 + random.random() / 4)
