"""Logs what became of deliveries: how many of each queue once a minute, and each message where that is asked for."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from queue import Queue

from ...core.durations import brief
from ...extensions import Service
from ..parts.delivery import Delivery
from ..parts.reporting import log_success, success_level

logger = logging.getLogger("django_delayq")

# Seconds between two lines of a queue.
INTERVAL = 60.0
# Batches of the recorder whose lines are not written yet. The recorder waits while there are more: a log on a full disk
# must not fill the memory.
MOST_WAITING = 100

# A delivery that succeeded, and when its handler ended (monotonic).
Succeeded = tuple[Delivery, float]


class OutcomeLog(Service):
    """Counts outcomes by queue, and logs the counts once a minute. The recorder's thread calls all methods.

    The lines of single messages are formatted and written in a thread of their own, which is started by the first one:
    the outcomes of other messages do not wait for them.
    """

    name = "log of outcomes"

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since = time.monotonic()
        self._waiting: Queue[Sequence[Succeeded] | None] = Queue(MOST_WAITING)
        self._writer: threading.Thread | None = None

    def consumed(self, successes: Sequence[Succeeded]) -> None:
        """Count messages that are consumed, and have a line written for each where the log takes these."""
        for queue, number in Counter([delivery.queue for delivery, _at in successes]).items():
            self.count(queue, "consumed", number)
        if not logger.isEnabledFor(success_level()):
            return
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="delayq-log", daemon=True)
            self._writer.start()
        self._waiting.put(successes)

    def count(self, queue: str, outcome: str, number: int = 1) -> None:
        """Count an outcome of deliveries of a queue: "consumed", "retried", "dead", "cancelled" or "released"."""
        self._counts[queue][outcome] += number

    def tick(self) -> float:
        """Log the counts since the last tick."""
        lasted, self._since = time.monotonic() - self._since, time.monotonic()
        for queue, counts in sorted(self._counts.items()):
            said = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(counts.items()))
            facts = {"queue": queue, "seconds": lasted, **counts}
            logger.info(
                "queue %s: %s in %s", queue, said, brief(lasted), extra={"delayq_event": "counted", "delayq": facts}
            )
        self._counts.clear()
        return INTERVAL

    def close(self) -> None:
        """Log what is left, and wait until each line is written."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None
        self.tick()

    def _write(self) -> None:
        while (successes := self._waiting.get()) is not None:
            for delivery, at in successes:
                try:
                    log_success(delivery, at - delivery.started_mono)
                except Exception:  # noqa: BLE001
                    # A filter of the project may raise anything, and would raise again for a line about that.
                    traceback.print_exc()
