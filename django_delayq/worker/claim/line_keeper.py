"""Keeps a worker process within limits: admits what it claims, and moves lines up when deliveries end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from ...extensions import Service, WorkerExtension
from ...record import admission
from ...record.admission import LINES_TOGETHER
from ...record.sql.rows import Claimed, Moved, Ticket
from ...signals import MessageFacts
from ..parts.reporting import publish_scheduled

# The time between two looks at all lines, for places that became free while nobody was told, and for slots of rates.
# Seconds.
INTERVAL = 1.0
# The time between two looks by a process that knows no limit: a limit that was removed lets its messages go. Also the
# time after which a process that knows some lets go what waits for others. Seconds.
REMOVED_INTERVAL = 30.0
# Lines that one look reads at a time, and the time that one tick looks at most. Seconds.
LINES_PER_LOOK = 500
LONGEST_LOOK = 0.2


class Gate(WorkerExtension):
    """Claims messages within their limits. Exists only in a process that knows a limit.

    The consumer claims by it; threads of the worker tell it what ended. A thread of its own promotes.
    """

    def __init__(self, using: str, worker: str) -> None:
        super().__init__(using, worker)
        self._lock = threading.Lock()
        # Messages whose deliveries ended, and lines that may move up since.
        self._ended: set[int] = set()
        self._lines: set[str] = set()
        self._woken = threading.Event()

    def claim(
        self,
        using: str,
        tickets: Sequence[Ticket],
        leases: dict[str, float],
        worker: str,
        *,
        queue: str | None = None,
        ahead: float = 0.0,
    ) -> list[Claimed]:
        """Claim messages as ``transitions.claim`` does, as far as limits allow."""
        admitted = admission.claim(using, tickets, leases, worker, queue=queue, ahead=ahead)
        if admitted.lines:
            with self._lock:
                self._lines |= admitted.lines
            self._woken.set()
        return admitted.claimed

    def services(self, roles: frozenset[str]) -> Iterable[Service]:
        """Return the service that promotes what this process has made room for."""
        return (Promoter(self),)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        """Note the messages whose places became free."""
        self._note(messages)

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        """Note the messages whose places became free."""
        self._note(messages)

    def ended(self, moves: Sequence[Moved]) -> None:
        """Note the messages whose places became free."""
        self._note(moves)

    def _note(self, messages: Iterable[MessageFacts | Moved]) -> None:
        # The limit key is not known here, and makes no difference.
        ended = {message.id for message in messages if admission.limits_of(message.topic, message.queue, None)}
        if ended:
            with self._lock:
                self._ended |= ended
            self._woken.set()

    def wait(self, seconds: float) -> None:
        """Wait until a line may move up, for at most so many seconds."""
        self._woken.wait(seconds)

    def promote(self) -> None:
        """Promote the messages for which there is room since the last call."""
        self._woken.clear()
        with self._lock:
            ended, self._ended = self._ended, set()
            lines, self._lines = self._lines, set()
        try:
            if ended:
                lines |= admission.names_of(self.using, ended)
            promote(self.using, lines, self.worker)
        except Exception:
            with self._lock:
                self._ended |= ended
                self._lines |= lines
            raise

    def stop(self) -> None:
        """Promote for the deliveries that ended last."""
        self.promote()


def promote(using: str, lines: Iterable[str], worker: str) -> None:
    """Promote messages from lines, a batch of lines in a transaction, and publish them."""
    left = sorted(lines)
    while left:
        batch, left = left[:LINES_TOGETHER], left[LINES_TOGETHER:]
        moved, again = admission.promote(using, batch, f"worker:{worker}")
        publish_scheduled(using, moved)
        left += sorted(again)


class Promoter(Service):
    """Promotes messages as soon as a delivery of this process has ended."""

    name = "promoter"
    thread = "limits"

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def tick(self) -> float:
        """Promote, and wait for the next end of a delivery."""
        self.gate.promote()
        self.gate.wait(INTERVAL)
        return 0.0


class LineKeeper(Service):
    """Looks at all lines: what may begin, and was not promoted when its place became free, is promoted now."""

    name = "line-keeper"
    is_shared = True

    def __init__(self, using: str, worker: str, *, knows_limits: bool) -> None:
        self.using = using
        self.worker = worker
        self.knows_limits = knows_limits
        # The name after which the next look goes on.
        self._after = ""
        self._removed_at = 0.0

    def tick(self) -> float:
        """Look at lines for a moment; come back at once while there are more."""
        began = time.monotonic()
        removes = began >= self._removed_at
        while True:
            with_room, removed, self._after = admission.lines_that_move(self.using, self._after, LINES_PER_LOOK)
            promote(self.using, with_room, self.worker)
            if removes and removed:
                # Processes of the code before or after a deploy may know these limits: let nobody go all the time.
                promote(self.using, removed, self.worker)
            if not self._after:
                if removes:
                    self._removed_at = began + REMOVED_INTERVAL
                return INTERVAL if self.knows_limits else REMOVED_INTERVAL
            if time.monotonic() - began > LONGEST_LOOK:
                return 0.05
