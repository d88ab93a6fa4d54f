"""The processes of a worker as its supervisor sees them: which start, which make way for others, which are killed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...core.worker_options import Options
from ...project import registry
from ...record import crashes
from ..shared.due_services import backoff
from ..shared.shared_state import SharedState
from .process import BROKEN, EXHAUSTED, STUCK
from .process_tuning import USUAL, ProcessTuning

logger = logging.getLogger("django_delayq")


@dataclass(slots=True)
class Child:
    """A worker process, as its supervisor sees it: while it lives, and until its claims are released."""

    pid: int
    name: str
    started: float
    shared: SharedState
    killed: bool = False
    # True when the supervisor killed it because it showed no life.
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
        return self.shared.ended or self.killed

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child is gone already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Children:
    """The worker processes of a supervisor, by pid while they run. Used by its main thread."""

    def __init__(
        self,
        options: Options,
        start: Callable[[], Child],
        release: Callable[[Child, Iterable[Child]], None],
        tuning: ProcessTuning = USUAL,
    ) -> None:
        """``start`` starts a process, or raises ``OSError``.

        ``release`` has the claims of a dead child released, and gets the living ones too.
        """
        self.options = options
        self.tuning = tuning
        self.running: dict[int, Child] = {}
        # True when all children are to end.
        self.is_stopping = False
        self._start = start
        self._release = release
        # The children that have reached --max-messages.
        self._exhausted = 0
        # How many in a row have died soon after their start, and when the next one starts (monotonic).
        self._quick_deaths = 0
        self._start_after = 0.0
        # True when the log says that no process can be started.
        self._is_refused = False
        self._over_at = time.monotonic() + (math.inf if options.max_runtime is None else options.max_runtime)

    @property
    def are_done(self) -> bool:
        """True when no child runs and none will: those that reach ``--max-messages`` end by themselves."""
        return (self.is_stopping or not self._wanted) and not self.running

    @property
    def seconds_to_start(self) -> float:
        """The seconds until the successor of a child that died may start."""
        return 0.0 if self.is_stopping else max(0.0, self._start_after - time.monotonic())

    def shows_life(self) -> bool:
        """Return whether the consumer of each child goes on. Children before their first round do not count."""
        now = time.monotonic()
        if self._quick_deaths > 1 and any(now - child.started < self.tuning.healthy for child in self.running.values()):
            # Children die as soon as they are started.
            return False
        # A function of the project may take minutes before the first round of a successor.
        beats = [beat for child in self.running.values() if (beat := child.shared.beat)]
        return bool(beats) and now - min(beats) < self.tuning.stale_after

    def check(self, elapsed: float) -> None:
        """Kill the children that hang, replace those that make way, start those that are missing, and end in time.

        ``elapsed``: the seconds since the last check.
        """
        self._kill_hung(elapsed)
        self._replace_in_order()
        self._start_missing()
        # Children end by themselves at --max-runtime, but not those that die and are replaced again.
        if time.monotonic() > self._over_at + self.tuning.check_interval:
            self.stop()

    def note_death(self, child: Child, code: int) -> None:
        """Have the claims of a dead child released, and decide when its successor starts."""
        self.running.pop(child.pid, None)
        ended = child.shared.ended
        if (not ended or code == BROKEN) and not child.killed:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            logger.error("Worker process %s died (%s)", child.name, how)
        if code != 0 or not ended:
            # The child is certainly dead: its claims need not wait for their leases.
            by_kill = code == -signal.SIGKILL and not child.hung
            child.died, child.death = time.monotonic(), crashes.Death(child.shared.begun, by_kill)
            self._release(child, self.running.values())
        if self.is_stopping or (ended and child.shared.replaced):
            return
        if ended and code == EXHAUSTED:
            self._exhausted += 1
            return
        if ended and code == 0 and time.monotonic() >= self._over_at:
            # If no limit is reached, somebody sent a signal to this child alone, and it is replaced.
            self.stop()
            return
        was_quick = time.monotonic() - child.started < self.tuning.healthy and not (ended and code == STUCK)
        self._quick_deaths = self._quick_deaths + 1 if was_quick else 0
        pause = backoff(self._quick_deaths - 1, 1.0) if self._quick_deaths > 1 else 0.0
        self._start_after = time.monotonic() + pause

    def stop(self) -> None:
        """Have all children end in order, and start no other."""
        self.is_stopping = True
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all children. Safe in a signal handler."""
        for child in list(self.running.values()):
            child.send(number)

    def kill(self) -> None:
        """Kill all children at once."""
        self.send(signal.SIGKILL)
        for child in self.running.values():
            if not child.killed:
                logger.warning("Worker process %s has not ended, and is killed", child.name)
            child.killed = True

    def _kill_hung(self, elapsed: float) -> None:
        """Kill children that show no life. Their deliveries count as crashed, as those of any process that dies."""
        longest = max((handler.lease for handler in registry.handlers().values()), default=0.0)
        limit = self.tuning.hung_after + 2 * (longest + self.options.graceful_timeout)
        # While this process was frozen, its children may have been frozen too.
        elapsed = min(elapsed, 2 * self.tuning.check_interval)
        for child in self.running.values():
            signs = child.shared.signs
            child.silent = child.silent + elapsed if signs == child.signs else 0.0
            child.signs = signs
            if child.silent > limit:
                child.send(signal.SIGKILL)
                logger.critical("Worker process %s has shown no life for %d s; it is killed", child.name, child.silent)
                child.silent, child.hung = 0.0, True

    def _replace_in_order(self) -> None:
        """Mark the children that make way for another one, and end when they hold nothing any more.

        A child is replaced for two reasons. It isolates a message, which may take long: one child at a time makes way
        for this. Or it is retired: at most as many of these finish as children work, so that the handlers that run at
        once are less than twice those that were asked for.
        """
        for child in self.running.values():
            shared, since = child.shared, child.shared.suspect_since
            # Of each child that has made way, whether it is retired.
            finishing = [other.shared.retired for other in self.running.values() if other.shared.replaced]
            if shared.replaced:
                continue
            if shared.retired and sum(finishing) < self.options.processes:
                shared.replaced = True
            elif since and time.monotonic() - since > self.tuning.replaced_after and all(finishing):
                shared.replaced = True
                logger.info("Worker process %s runs a message alone; another one takes its place", child.name)

    @property
    def _wanted(self) -> int:
        """The number of children that are to work: those that have reached ``--max-messages`` have no successors."""
        return self.options.processes - self._exhausted

    def _start_missing(self) -> None:
        """Start processes until there are as many as are wanted, without those that were replaced."""
        while time.monotonic() >= self._start_after:
            working = sum(not child.shared.replaced for child in self.running.values())
            if working >= self._wanted or len(self.running) >= self.options.most_processes:
                return
            try:
                child = self._start()
                self.running[child.pid] = child
                self._is_refused = False
            except OSError as error:
                # No process or no memory is left for it at the moment.
                self._start_after = time.monotonic() + self.tuning.check_interval
                if not self._is_refused:
                    logger.error("No worker process can be started; it is tried again: %s", error)
                self._is_refused = True
