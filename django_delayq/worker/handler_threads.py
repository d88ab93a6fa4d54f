"""The threads that run handlers: sync ones, and transactional ones of both kinds."""

from __future__ import annotations

import contextvars
import threading

from .. import actors
from . import connections
from .delivery import Delivery
from .executor import execute
from .lane import Lane
from .page import Page
from .recorder import Recorder
from .reporting import report_delivered


class HandlerThreads(Lane):
    """A fixed number of threads, each of which runs one handler at a time."""

    def __init__(self, threads: int, recorder: Recorder, worker: str, page: Page) -> None:
        super().__init__(threads, recorder, worker, page)
        self.members = [
            threading.Thread(target=self._work, args=(number,), name=f"delayq-handler-{number}", daemon=True)
            for number in range(threads)
        ]

    def stop(self) -> None:
        """End each thread after the delivery that it runs."""
        for _member in self.members:
            self._queue.put(None)

    def _work(self, number: int) -> None:
        actor = f"worker:{self.worker}/{number}"
        with actors.acting_as(actor):
            while (delivery := self._queue.get()) is not None:
                try:
                    self._run(delivery, actor, number)
                except BaseException as error:  # noqa: BLE001
                    self._note_failure(delivery, error, actor)
                finally:
                    self.held.remove(delivery)
                self.on_freed()
        connections.close_all()

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
