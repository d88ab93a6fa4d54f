"""The release of the claims of worker processes that have died."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from django.db import Error as DatabaseError

from ...core import actors
from ...core.worker_options import Options
from ...extensions import WorkerExtensions
from ...record import crashes
from ...record.sql.troubles import in_words
from ..run.reporting import report_moves
from ..shared import connections
from ..upkeep.heartbeat import delete_rows
from .children import Child
from .process_tuning import USUAL, ProcessTuning

logger = logging.getLogger("django_delayq")

# Starts a process that calls the first argument with the others, and exits with the code that this returns. Returns its
# pid.
Forking = Callable[..., int]


class Releases:
    """The children of a supervisor that have died, and the process that releases their claims.

    A silent database, or a receiver of the project, may keep that process for long. Then it is killed, and another one
    tries again: the supervisor itself waits for nobody.
    """

    def __init__(self, options: Options, fork_to: Forking, tuning: ProcessTuning = USUAL) -> None:
        self.options = options
        self.tuning = tuning
        self._fork_to = fork_to
        self._supervisor = os.getpid()
        self.waiting: list[Child] = []
        # The process that releases claims (0: there is none), and how many of the first waiting children it handles.
        self.pid = 0
        self._number = 0
        # When the last one was started (monotonic).
        self._tried = -math.inf

    def add(self, dead: Child, living: Iterable[Child]) -> None:
        """Have the claims of a child released that has died.

        When all children were killed together, no message is to blame: somebody else did that.
        """
        self.waiting.append(dead)
        killed = [dead for dead in self.waiting if self._was_just_killed(dead)]
        if len(killed) > 1 and all(child.started > killed[0].died for child in living):
            for one in killed:
                one.death = replace(one.death, of_all=True)

    def go_on(self, *, final: bool = False) -> None:
        """Start the process if there is something for it, and end one that has taken too long.

        ``final``: all children are dead, so no others can have been killed together with these.
        """
        now = time.monotonic()
        dead = [*takewhile(lambda dead: final or not self._may_have_company(dead), self.waiting)]
        if self.pid:
            if now - self._tried >= self.tuning.longest_release:
                os.kill(self.pid, signal.SIGKILL)
        elif dead and now - self._tried >= self.tuning.check_interval:
            self._tried = now
            # If the system refuses a process, the next call tries again.
            with contextlib.suppress(OSError):
                self.pid, self._number = self._fork_to(self._release_all, dead), len(dead)

    @property
    def is_soon(self) -> bool:
        """True when the supervisor learns in a moment whether others were killed together with the first child."""
        return bool(self.waiting) and self._may_have_company(self.waiting[0])

    def note_end(self, *, done: bool) -> None:
        """Take note of the end of the process that released claims. It may have released only some."""
        dead = self.waiting[: self._number]
        if done:
            del self.waiting[: self._number]
            self._tried = -math.inf
        elif not dead[0].waits:
            logger.warning("The claims of %s are released as soon as possible", ", ".join(one.name for one in dead))
        for one in dead:
            one.waits = True
        self.pid = 0

    def kill(self) -> None:
        """End the process: nobody waits for it any longer."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _may_have_company(self, dead: Child) -> bool:
        """Return whether other children may turn out to have been killed together with this one."""
        return self.options.processes > 1 and not dead.shut_down and self._was_just_killed(dead)

    def _release_all(self, dead: Sequence[Child]) -> int:
        """Release the claims of dead children, in a process of its own. Return the exit code."""
        try:
            for child in dead:
                self.release(child)
        except DatabaseError as error:
            if not dead[0].waits:
                logger.warning("No claims can be released: %s", in_words(error))
            return 1
        finally:
            connections.close_all()
        return 0

    def release(self, dead: Child) -> None:
        """Release what a dead child had claimed, and take its row away."""
        using, name = self.options.using, dead.name
        actor = f"supervisor:{actors.host()}/{self._supervisor}"
        moved = crashes.release_worker(using, name, actor=actor, shutdown=dead.shut_down, death=dead.death)
        extensions = WorkerExtensions(using, name)
        report_moves(using, moved, extensions)
        delete_rows(using, [name])
        extensions.stop()

    def _was_just_killed(self, dead: Child) -> bool:
        """Return whether a child was killed so lately that others may follow."""
        return dead.death.by_kill and time.monotonic() - dead.died < self.tuning.together
