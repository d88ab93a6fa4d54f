"""The threads that run handlers: sync ones, and transactional ones of both kinds."""

from __future__ import annotations

import contextvars
import threading
import time

from .. import actors
from . import connections
from .delivery import Delivery
from .executor import execute
from .lane import Lane
from .page import Page
from .recorder import Recorder
from .reporting import report_delivered
from .turns import Turns


class HandlerThreads(Lane):
    """A fixed number of threads, each of which runs one handler at a time."""

    def __init__(self, threads: int, recorder: Recorder, worker: str, page: Page) -> None:
        super().__init__(threads, recorder, worker, page)
        self.turns = Turns(self._queue, threads)
        workers = [
            threading.Thread(target=self._work, args=(number,), name=f"delayq-handler-{number}", daemon=True)
            for number in range(threads)
        ]
        self.members = [*self.turns.members, *workers]

    def put(self, delivery: Delivery) -> None:
        """Have a held delivery run as soon as a thread is free."""
        super().put(delivery)
        self.turns.note_waiting()

    def stop(self) -> None:
        """End each thread after the delivery that it runs."""
        for _number in range(self.places):
            self._queue.put(None)
        self.turns.stop()

    def _work(self, number: int) -> None:
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._next(number)) is not None:
                began = time.monotonic()
                self.turns.begin(number, delivery.topic)
                try:
                    self._run(delivery, actor, number)
                except BaseException as error:  # noqa: BLE001
                    self._note_failure(delivery, error, actor)
                finally:
                    self.held.remove(delivery)
                    self.turns.end(number, delivery.topic, time.monotonic() - began)
                self.on_freed()
        self.turns.pass_on(number)
        connections.close_all()

    def _next(self, number: int) -> Delivery | None:
        """Return the next delivery, which only the thread that has the turn takes; None at the end."""
        if not self.turns.has(number):
            self.turns.take(number)
        return self._queue.get()

    def _run(self, delivery: Delivery, actor: str, number: int) -> None:
        if self._refuse(delivery, actor):
            return
        # Whatever follows may kill the process.
        self.page.note_begun(number, delivery.id)
        connections.before_task()
        report_delivered(delivery)
        # A time zone or language that a handler activates ends with it.
        outcome = contextvars.copy_context().run(execute, delivery, actor)
        connections.after_task()
        self._note_outcome(delivery, outcome, actor)
