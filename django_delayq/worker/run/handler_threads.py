"""The threads that run handlers: sync ones, and transactional ones of both kinds."""

from __future__ import annotations

import contextvars
import logging
import threading
import time

from ...core import actors
from ...core.outcomes import Outcome, Unentered
from ..parts import connections
from ..parts.begun_page import BegunPage
from ..parts.delivery import Delivery
from ..parts.reporting import report_delivered
from .executor import execute, not_entered
from .lane import Lane
from .recorder import Recorder
from .turns import Turns

logger = logging.getLogger("django_delayq")

# A thread that the database gave no transaction is offered nothing for this long, after the next refusal in a row for
# twice that, and so on. Seconds.
FIRST_REST = 5.0
# A thread is offered nothing for this long at most. Seconds.
LONGEST_REST = 60.0
# While the database refuses a thread, the others close their connections when they had nothing to do for this long: the
# recorder and other processes may need one. Seconds.
SHORT_CLOSED_AFTER = 1.0


def rest(refusals: int) -> float:
    """Return the seconds for which a thread is offered nothing after so many refusals in a row."""
    return min(LONGEST_REST, FIRST_REST * 2.0 ** min(refusals - 1, 20))


class HandlerThreads(Lane):
    """A fixed number of threads, each of which runs one handler at a time.

    Each thread owns its number in ``_refusals``, which the others read. ``_stopping`` is only ever set.
    """

    def __init__(self, threads: int, recorder: Recorder, worker: str, page: BegunPage) -> None:
        super().__init__(threads, recorder, worker, page)
        self.turns = Turns(self._queue, threads)
        # How often in a row the database gave each thread no transaction.
        self._refusals = [0] * threads
        self._stopping = threading.Event()
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
        self._stopping.set()
        for _number in range(self._all_places):
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
                if number in self._resting:
                    self._rest(number)
        self.turns.pass_on(number)
        connections.close_all()

    def _next(self, number: int) -> Delivery | None:
        """Return the next delivery, which only the thread that has the turn takes; None at the end."""
        closed_after = SHORT_CLOSED_AFTER if any(self._refusals) else connections.IDLE_CLOSED_AFTER
        if not (self.turns.has(number) or self.turns.take(number, closed_after)):
            connections.close_all()
            self.turns.take(number)
        return connections.wait_for(self._queue, closed_after)

    def _rest(self, number: int) -> None:
        """Take nothing for a while. Others take what is waiting."""
        self.turns.pass_on(number)
        self._stopping.wait(rest(self._refusals[number]))
        self._resting.discard(number)
        self.on_freed()

    def _run(self, delivery: Delivery, actor: str, number: int) -> None:
        if self._refuse(delivery, actor):
            return
        connections.before_task()
        outcome = self._execute(delivery, actor, number) if delivery.enter() else not_entered(delivery)
        connections.after_task()
        self._note_entry(delivery, outcome, number)
        self._note_outcome(delivery, outcome, actor)

    def _execute(self, delivery: Delivery, actor: str, number: int) -> Outcome:
        # Whatever follows may kill the process.
        self.page.note_begun(number, delivery.id)
        report_delivered(delivery)
        # A time zone or language that a handler activates ends with it.
        return contextvars.copy_context().run(execute, delivery, actor)

    def _note_entry(self, delivery: Delivery, outcome: Outcome, number: int) -> None:
        """Take the place of this thread out of the lane if the database gave it no transaction.

        That comes before the delivery is no longer held: otherwise another one would be claimed for this thread.
        """
        if isinstance(outcome, Unentered):
            self._refusals[number] += 1
            self._resting.add(number)
            self.on_released()
            logger.warning(
                "The database gave handler thread %d no transaction; the thread takes no message for %g s: %s",
                number,
                rest(self._refusals[number]),
                outcome.reason,
            )
        elif delivery.handler.transactional:
            self._refusals[number] = 0
