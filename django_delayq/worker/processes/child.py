"""A worker process, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from ...record import crashes
from ..parts.lifetime import BegunPage


@dataclass(slots=True)
class Child:
    """A worker process, as its supervisor sees it: while it lives, and until its claims are released."""

    pid: int
    name: str
    started: float
    page: BegunPage
    killed: bool = False
    # True when it showed no life and was killed for that.
    hung: bool = False
    # The signs of life at the last check, and for how many seconds there was none.
    signs: float = 0.0
    silent: float = 0.0
    # When it was found dead (monotonic), and its traces.
    died: float = 0.0
    death: crashes.Death = crashes.UNSEEN
    # True when the log says that its claims wait.
    waits: bool = False

    @property
    def shut_down(self) -> bool:
        """True when it has ended in order, or on command: none of its messages crashed."""
        return self.page.ended or self.killed

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child is gone already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
