"""Runs services in threads, with waits between their ticks, a backoff after errors, and a stop."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from django.db import Error as DatabaseError

from ...core.callables import always, never
from ...core.exceptions import BrokerUnavailable
from ...core.outages import Outage
from ...extensions import Service
from ...record.sql.sessions import lock_timeout
from . import connections

logger = logging.getLogger("django_delayq")

# A service that asks for a longer wait, or for one without end, is called again after a day. Seconds.
LONGEST_WAIT = 86_400.0

# A thread closes its database connections while no service that uses them is due for this long. Seconds.
RELEASED_FOR = 4.0


class DueServices:
    """Ticks services one after another, each after the wait that its last tick returned. Used by one thread.

    ``is_leader`` tells whether this process does what one process does for all (``Service.is_shared``).
    """

    # If the leader hangs, another process does its work when that is overdue by this time. Seconds.
    standby = 120.0
    # A transaction of a service that shares its thread with others waits for a lock up to this time: a process that
    # freezes in a transaction would stop them all. Milliseconds.
    lock_timeout = 2000

    def __init__(self, services: Sequence[Service], is_leader: Callable[[], bool] = always) -> None:
        self._is_leader = is_leader
        self.services = list(services)
        # By the index of the service: names may repeat, since any app can add services.
        self._due = [0.0] * len(self.services)
        self._errors = [0] * len(self.services)
        self._outages = [Outage() for _service in self.services]
        # The services whose last tick has left work half done, or has failed.
        self._go_on: set[int] = set()

    def run_due(self, is_stopping: Callable[[], bool] = never) -> float:
        """Tick each service that is due, until ``is_stopping``. Return the seconds until the next one is due."""
        for index in range(len(self.services)):
            if is_stopping():
                break
            if self._due_at(index) <= time.monotonic():
                wait = self._tick(index)
                self._due[index] = time.monotonic() + wait
        return max(0.0, min(map(self._due_at, range(len(self.services)))) - time.monotonic())

    @property
    def until_database(self) -> float:
        """The seconds until a service is due that uses the database."""
        due = [self._due_at(index) for index, service in enumerate(self.services) if service.uses_database]
        return min(due, default=float("inf")) - time.monotonic()

    def _due_at(self, index: int) -> float:
        # The first tick of every service is due at once: it may report, or find work that was left. A service goes on
        # with work that it has begun: the services of other processes wait for that, or begin anew.
        is_begun = not self._due[index] or index in self._go_on
        is_standby = self.services[index].is_shared and not is_begun and not self._is_leader()
        return self._due[index] + self.standby if is_standby else self._due[index]

    def _tick(self, index: int) -> float:
        """Tick the service at this index. Return how many seconds it waits."""
        service = self.services[index]
        self._go_on.discard(index)
        connections.before_task()
        try:
            with lock_timeout(self.lock_timeout if service.thread == Service.thread else 0):
                # An extension may return anything.
                wait = min(max(0.0, float(service.tick())), LONGEST_WAIT)
        except Exception as error:  # noqa: BLE001
            return self._back_off(index, error)
        finally:
            connections.after_task()
        if self._errors[index]:
            self._errors[index] = 0
            self._outages[index].end()
            logger.info("The %s works again", service.name)
        if wait == 0:
            self._go_on.add(index)
        return wait

    def _back_off(self, index: int, error: Exception) -> float:
        """Log the first of several like errors in a row. Return how many seconds to wait."""
        connections.note_error(error)
        service = self.services[index]
        self._errors[index] += 1
        self._go_on.add(index)
        wait = backoff(self._errors[index], service.longest_backoff)
        if self._outages[index].is_news(error):
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


class Runner(threading.Thread):
    """Runs services in one thread until stopped. Any thread may call ``stop``."""

    def __init__(self, name: str, services: DueServices) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self._services = services
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the thread after the tick that runs."""
        self._stopping.set()

    def run(self) -> None:
        """Tick each service when it is due."""
        try:
            while not self._stopping.is_set():
                wait = self._services.run_due(self._stopping.is_set)
                if self._services.until_database >= RELEASED_FOR:
                    connections.close_all()
                self._stopping.wait(wait)
        finally:
            connections.close_all()


def in_threads(services: Iterable[Service], is_leader: Callable[[], bool] = always) -> list[Runner]:
    """Return a runner for each thread that the services name, in their order."""
    by_thread: dict[str, list[Service]] = {}
    for service in services:
        by_thread.setdefault(service.thread, []).append(service)
    return [Runner(thread, DueServices(theirs, is_leader)) for thread, theirs in by_thread.items()]


def backoff(failures: int, most: float) -> float:
    """Return the seconds to wait after ``failures`` in a row: 0.1, 0.2, 0.4 … ``most``, plus up to a random quarter."""
    wait = min(most, 0.1 * 2.0 ** min(failures - 1, 20))
    return wait * (1 + random.random() / 4)
