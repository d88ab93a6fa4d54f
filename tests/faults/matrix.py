"""A case: twenty messages, one failpoint, one thing that happens there, a healthy worker to finish, and a verdict.

Several cases run at the same time, each in a queue and with a process of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings

from django_delayq import transitions
from django_delayq.models import Message
from django_delayq.sql.rows import Ticket
from django_delayq.states import LIVE, State
from tests.workers import Worker, eventually

from .messages import NUMBER, SPREAD, committed, schedule_all
from .oracle import Verdict, judge
from .program import Program, freeze, wait_for_state

PRODUCER = ("before_insert", "after_insert", "before_put", "after_put")
WORKER = (
    "after_take",
    "after_claim",
    "before_handler",
    "after_handler",
    "before_succeed",
    "after_succeed",
    "after_commit",
    "before_record",
    "after_record",
    "before_put",
    "after_put",
)
LOADER = ("after_horizon", "mid_load")
RESTORE = ("mid_restore",)
REAPER = ("after_reap",)

# power: the supervisor cannot know that its child is dead, as when the whole host goes.
ACTIONS = ("kill", "power", "stop", "delay", "raise")

LEASE = 1.0
HASTY: dict[str, Any] = {
    "GRACE": 0.3,
    "SWEEP_INTERVAL": 0.3,
    "POLL_INTERVAL": 0.1,
    "LEASE": LEASE,
    "RETRY": ["0.05s"] * 50,
}


class Case(NamedTuple):
    """Who reaches which failpoint, and what happens there."""

    who: str
    point: str
    action: str

    @property
    def queue(self) -> str:
        return f"{self.who}-{self.point}-{self.action}"

    def failpoints(self, delay: float) -> str:
        action = {"power": "kill", "delay": f"delay={delay}"}.get(self.action, self.action)
        # What happens but once or twice, the first time; everything else when things are under way.
        nth = 3 if self.who == "producer" or self.point in WORKER[:-2] else 1
        return f"{self.point}:{action}:{nth}"


def every_case() -> list[Case]:
    """The whole matrix."""
    places = {"producer": PRODUCER, "worker": WORKER, "loader": LOADER, "restore": RESTORE, "reaper": REAPER}
    return [
        Case(who, point, action)
        for who, points in places.items()
        for point in points
        for action in ACTIONS
        # These have no supervisor.
        if not (action == "power" and who in ("producer", "restore"))
    ]


@contextmanager
def hasty() -> Iterator[None]:
    """Settings that keep nobody waiting."""
    with override_settings(DELAYQ={**settings.DELAYQ, **HASTY}):
        yield


def run(cases: Sequence[Case], folder: Path, *, delay: float = 2.0) -> dict[Case, Verdict]:
    """Run cases side by side. At most one of them may be a reaper's: that one works for all queues."""
    with hasty(), ExitStack() as stack:
        runs = [_Run(case, folder, delay) for case in cases]
        for one in runs:
            stack.callback(one.close)
            one.start()
        for one in runs:
            one.wait_until_reached()
        healthy = stack.enter_context(
            Worker("--processes", "1", "--threads", "4", "--queues", ",".join(case.queue for case in cases))
        )
        frozen = [one for one in runs if one.case.action == "stop"]
        if frozen:
            _two_leases()
            eventually(_nothing_to_reap, "all that can be taken over is taken over")
        for one in frozen:
            one.thaw()
        for one in runs:
            one.finish()
        assert healthy.stop() == 0, healthy.log
        connections.close_all()
        return {one.case: one.verdict() for one in runs}


def _two_leases() -> None:
    until = transitions.now("default") + timedelta(seconds=2 * LEASE)
    eventually(lambda: transitions.now("default") > until, "two leases run out")


def _nothing_to_reap() -> bool:
    """No lease has run out but of rows that a frozen process has locked."""
    with transaction.atomic():
        late = Message.objects.filter(state=State.RUNNING, leased_until__lt=transitions.now("default"))
        return not late.select_for_update(skip_locked=True).exists()


class _Run:
    """One case on its way."""

    def __init__(self, case: Case, folder: Path, delay: float) -> None:
        self.case = case
        self.lines = folder / case.queue
        self.failpoints = case.failpoints(delay)
        self.program: Program | None = None
        self._reached_by = 0

    def start(self) -> None:
        """Up to where the fault can happen at any time."""
        queue, lines = self.case.queue, str(self.lines)
        match self.case.who:
            case "producer":
                self.program = self._program("tests.faults.producer", queue, lines, "0", str(NUMBER))
            case "restore":
                schedule_all(queue, lines)
                self.program = self._program("django", "delayq_restore", "--queue", queue, "--batch-size", "5", "--yes")
            case "loader":
                schedule_all(queue, lines)
                self.program = self._worker("loader,sweeper,consumer,recorder")
                self._cut_power()
            case "reaper":
                self._claim_and_vanish()
                self.program = self._worker("loader,sweeper,consumer,recorder,reaper")
                self._cut_power()
            case _:
                self.program = self._worker("loader,sweeper,consumer,recorder")

    def _program(self, *arguments: str) -> Program:
        return Program(*arguments, failpoints=self.failpoints)

    def _worker(self, roles: str) -> Program:
        # No reaper: the one of the healthy worker, or of the reaper's own case, has to do it.
        return self._program(
            *("django", "run_delayq", "--processes", "1", "--threads", "2"),
            *("--queues", self.case.queue, "--roles", roles, "--graceful-timeout", "10"),
        )

    def _cut_power(self) -> None:
        """Make sure that the supervisor will not see its child's end."""
        assert self.program is not None
        if self.case.action == "power":
            self.program.wait_for_children(1)
            freeze(self.program.pid)

    def _claim_and_vanish(self) -> None:
        messages = schedule_all(self.case.queue, str(self.lines))
        last = max(message.due_at for message in messages)
        eventually(lambda: transitions.now("default") > last, "all are due")
        leases = {message.topic: LEASE for message in messages}
        claimed = transitions.claim("default", [Ticket(m.pk) for m in messages], leases, "nobody/1/0")
        assert len(claimed) == NUMBER
        until = transitions.now("default") + timedelta(seconds=LEASE)
        eventually(lambda: transitions.now("default") > until, "the leases run out")

    def wait_until_reached(self) -> None:
        assert self.program is not None
        if self.case.who == "worker":
            self.program.wait_for(f"Loaded queue {self.case.queue}")
            self._cut_power()
            schedule_all(self.case.queue, str(self.lines))
        self._reached_by = self.program.wait_for_failpoint()
        if self.case.action == "stop":
            wait_for_state(self._reached_by, "T")

    def thaw(self) -> None:
        os.kill(self._reached_by, signal.SIGCONT)

    def finish(self) -> None:
        """Until all are finished and nothing more can come of those that took part."""
        assert self.program is not None
        if self.case.who in ("producer", "restore"):
            code = self.program.wait()
            killed = code == -signal.SIGKILL
            assert killed == (self.case.action == "kill"), f"{self.case}: exit code {code}\n{self.program.log}"
        elif self.case.action == "power":
            self.program.kill()
        eventually(self._is_drained, f"{self.case}: all are finished", timeout=60)
        if self.case.who not in ("producer", "restore") and self.case.action != "power":
            # Late outcomes of those that were frozen or slow have their say, too.
            assert self.program.stop() == 0, self.program.log

    def _is_drained(self) -> bool:
        there = Message.objects.filter(queue=self.case.queue)
        return there.exists() and not there.filter(state__in=LIVE).exists()

    def verdict(self) -> Verdict:
        number = committed(self.case.queue) if self.case.who == "producer" else NUMBER
        failed_after_effect = (self.case.point, self.case.action) == ("after_handler", "raise")
        found = judge(self.case.queue, number, self.lines, failures=int(failed_after_effect))
        if self.case.action == "power":
            # That its lease ran out is all that can be known of a delivery that died there.
            found.w1, found.w2 = found.w1 + found.w2, 0
        return found

    def close(self) -> None:
        if self.program is not None:
            self.program.close()


__all__ = ["ACTIONS", "SPREAD", "Case", "every_case", "run"]
