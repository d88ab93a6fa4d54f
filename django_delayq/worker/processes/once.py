"""``run_delayq --once``: a worker process that delivers all messages that are due, and ends when none can begin."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator

from ...core.worker_options import Options
from ...extensions import Service
from ..parts import connections
from .assembly import Parts, assemble
from .process import WorkerProcess


class OnceProcess(WorkerProcess):
    """Finds messages by query, since Redis may have lost some, and has none of the services of a worker that stays."""

    def __init__(self, options: Options) -> None:
        # The number of deliveries whose outcomes were recorded; the recorder's thread counts.
        self.delivered = 0
        super().__init__(options)

    def _assemble(self) -> Parts:
        return assemble(self.options, redis=False, on_recorded=self._count, on_idle=self.look)

    def _count(self, number: int) -> None:
        self.delivered += number

    def _services(self, stuck_after: float) -> Iterator[Service]:
        return self._watches(stuck_after)

    def run(self, watch: Callable[[], bool] = lambda: False) -> int:
        """Free the messages of workers that are gone, and work until nothing can begin. Return the exit code."""
        reaper = self.parts.reaper
        reaper.tick()
        if reaper.is_confirming:
            select.select([self._wake_read], [], [], reaper.confirm_after)
            reaper.tick()
        return super().run(watch)

    def _is_over(self) -> bool:
        return self.parts.consumer.is_done or super()._is_over()

    def _sign_off(self) -> None:
        connections.after_task()
