"""Runs services in threads, with waits between their ticks, a backoff after errors, and a stop."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence

from django.db import Error as DatabaseError

from ..exceptions import BrokerUnavailable
from ..extensions import Service
from . import connections

logger = logging.getLogger("django_delayq")


class Runner(threading.Thread):
    """Runs services in one thread, each after the wait that its last tick returned, until stopped.

    The thread owns everything but ``_stopping``, which any thread may set.
    """

    def __init__(self, name: str, services: Sequence[Service]) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self.services = list(services)
        self._stopping = threading.Event()
        # By the place of the service: names may repeat, since any app can add services.
        self._due = [0.0] * len(self.services)
        self._errors = [0] * len(self.services)

    def stop(self) -> None:
        """End the thread after the tick that runs."""
        self._stopping.set()

    def run(self) -> None:
        """Tick each service when it is due."""
        try:
            while not self._stopping.is_set():
                for place in range(len(self.services)):
                    if self._stopping.is_set():
                        return
                    if self._due[place] <= time.monotonic():
                        self._due[place] = time.monotonic() + self._tick(place)
                self._stopping.wait(max(0.0, min(self._due) - time.monotonic()))
        finally:
            connections.close_all()

    def _tick(self, place: int) -> float:
        """Tick the service at this place. Return how many seconds it waits."""
        service = self.services[place]
        connections.before_task()
        try:
            wait = service.tick()
        except Exception as error:  # noqa: BLE001
            return self._back_off(place, error)
        finally:
            connections.after_task()
        if self._errors[place]:
            self._errors[place] = 0
            logger.info("The %s works again", service.name)
        return wait

    def _back_off(self, place: int, error: Exception) -> float:
        """Log the first of several errors in a row. Return how many seconds to wait."""
        service = self.services[place]
        self._errors[place] += 1
        wait = backoff(self._errors[place], service.longest_backoff)
        if self._errors[place] == 1:
            expected = isinstance(error, DatabaseError | BrokerUnavailable)
            logger.warning(
                "The %s failed and is tried again in %.1f s: %s: %s",
                service.name,
                wait,
                type(error).__name__,
                error,
                exc_info=None if expected else error,
            )
        return wait


def in_threads(services: Iterable[Service]) -> list[Runner]:
    """Return a runner for each thread that the services name, in their order."""
    by_thread: dict[str, list[Service]] = {}
    for service in services:
        by_thread.setdefault(service.thread, []).append(service)
    return [Runner(thread, theirs) for thread, theirs in by_thread.items()]


def backoff(failures: int, most: float) -> float:
    """Return the seconds to wait after ``failures`` in a row: 0.1, 0.2, 0.4 … ``most``, plus up to a random quarter."""
    wait = min(most, 0.1 * 2.0 ** min(failures - 1, 20))
    return wait * (1 + random.random() / 4)
