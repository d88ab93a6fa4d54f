"""Cases of twenty messages each: one fault at one failpoint, then a healthy worker that finishes, then a verdict.

Several cases run at the same time, each in a queue and with a process of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import redis
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings

from django_delayq.core.states import LIVE
from django_delayq.models import Message
from django_delayq.models import Worker as WorkerRow
from django_delayq.models.messages import lease_is_over
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Ticket
from tests import settings as servers
from tests.support import known_scripts
from tests.support.record_of import is_past
from tests.support.workers import Worker, eventually

from .lossy import NEXT, Network
from .messages import NUMBER, committed, schedule, schedule_all
from .oracle import DIED, RAN_OUT, SHUT, judge
from .program import Program, freeze, wait_for_state

PRODUCER = ("before_insert", "after_insert", "before_put", "after_put")
WORKER = (
    "before_take",
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

# Failpoints before or after which the program speaks to Redis.
TO_REDIS = frozenset({"before_take", "after_take", "before_put", "after_put", *LOADER, *RESTORE, *REAPER})
# Failpoints in handlers, not all of which have a connection of their own.
HANDLER = frozenset({"before_handler", "after_handler"})
# Failpoints of the recorder's thread, which holds outcomes whose leases are no longer extended.
RECORDER = frozenset({"before_record", "after_record", "before_put", "after_put"})

# power: the supervisor cannot know that its child is dead, as when the whole host goes. raise: an error on a connection
# that is well. reset: no error, but the connections are broken. lose: what is said next is executed, its reply lost.
ACTIONS = ("kill", "power", "stop", "delay", "raise", "reset", "lose")

LEASE = 1.0
HASTY: dict[str, Any] = {
    "GRACE": 0.3,
    "POLL_INTERVAL": 0.1,
    "LEASE": LEASE,
    "RETRY": ["0.05s"] * 50,
}


class Case(NamedTuple):
    """One case: the program, the failpoint that it reaches, and the fault that happens there."""

    who: str
    point: str
    action: str

    @property
    def queue(self) -> str:
        return f"{self.who}-{self.point}-{self.action}"

    @property
    def failpoints(self) -> str:
        # "lose": the program waits there until the network knows which reply to lose.
        action = {"power": "kill", "delay": "delay=2", "lose": "stop"}.get(self.action, self.action)
        port = self.port if self.action == "reset" else None
        actions = [action] if port is None else [action, f"reset={port}"]
        return ",".join(f"{self.point}:{action}:{self._nth}" for action in actions)

    @property
    def port(self) -> int | None:
        """The port of the server to which a reset breaks all connections of the process, besides the thread's own."""
        assert servers.REDIS_SERVER is not None
        assert servers.POSTGRES_SERVER is not None
        if self.point in TO_REDIS:
            return servers.REDIS_SERVER.port
        return servers.POSTGRES_SERVER.port if self.point in HANDLER else None

    @property
    def _nth(self) -> int:
        """Return at which passage the fault happens: a late one, or the first where there are only a few."""
        if self.point == "before_take":
            # The first takes find nothing.
            return 8
        if self.who == "worker" and self.point in ("before_put", "after_put"):
            # The first put makes its connection.
            return 2 if self.action in ("reset", "lose") else 1
        return 3 if self.who in ("producer", "worker") else 1

    @property
    def windows(self) -> tuple[str, ...]:
        """The windows in which an effect outside a transaction may happen again."""
        if self.who != "worker" and self.point != "mid_load":
            # Nothing is handled there, or not yet.
            return SHUT
        match self.action:
            case "kill":
                return DIED
            case "power" | "stop":
                return RAN_OUT
            case "delay" if self.point in RECORDER:
                return RAN_OUT
        return SHUT

    @property
    def failures(self) -> int:
        """The number of handlers that fail after their effect and are retried."""
        return int((self.point, self.action) == ("after_handler", "raise"))


def every_case() -> list[Case]:
    """Return all cases of the matrix."""
    places = {"producer": PRODUCER, "worker": WORKER, "loader": LOADER, "restore": RESTORE, "reaper": REAPER}
    return [
        Case(who, point, action)
        for who, points in places.items()
        for point in points
        for action in ACTIONS
        # These programs have no supervisor.
        if not (action == "power" and who in ("producer", "restore"))
        # Only some failpoints are followed by a request that has a reply.
        and not (action == "lose" and (who, point) not in NEXT)
    ]


def run(cases: Sequence[Case], folder: Path) -> dict[str, list[str]]:
    """Run cases side by side, and return what is wrong in the queue of each.

    At most one of them may be a reaper's: that one works for all queues.
    """
    with override_settings(DELAYQ={**settings.DELAYQ, **HASTY}), ExitStack() as stack:
        assert servers.REDIS_SERVER is not None
        with redis.Redis(port=servers.REDIS_SERVER.port) as client:
            known_scripts.teach(client)
        runs = [_Run(case, folder) for case in cases]
        for one in runs:
            stack.enter_context(one.stack)
            one.start()
        for one in runs:
            one.wait_until_reached()
        healthy = stack.enter_context(
            Worker("--processes", "1", "--threads", "4", *(word for case in cases for word in ("--queue", case.queue)))
        )
        frozen = [one for one in runs if one.case.action == "stop"]
        if frozen:
            wait_for_leases(2)
            eventually(_nothing_to_reap, "all that can be taken over is taken over")
        for one in frozen:
            one.thaw()
        for one in runs:
            one.finish()
        # The worker may have had nothing to do and may still be starting.
        healthy.wait_for_children(1)
        assert healthy.stop() == 0, healthy.log
        connections.close_all()
        return {one.case.queue: one.wrong() for one in runs}


def wait_for_leases(number: int) -> None:
    """Wait until so many leases, one after the other, have run out."""
    until = reads.now("default") + timedelta(seconds=number * LEASE)
    eventually(partial(is_past, until), "the leases run out")


def _nothing_to_reap() -> bool:
    """Tell whether no lease has run out except on rows that a frozen process has locked."""
    with transaction.atomic():
        late = Message.objects.filter(lease_is_over(reads.now("default")))
        return not late.select_for_update(skip_locked=True).exists()


class _Run:
    """One case while it runs."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.lines = folder / case.queue
        self.program: Program | None = None
        self.network: Network | None = None
        self.stack = ExitStack()
        self._reached_by = 0

    def start(self) -> None:
        """Start the program, and return when the fault can happen at any time."""
        queue, lines = self.case.queue, str(self.lines)
        if self.case.action == "lose":
            self.network = self.stack.enter_context(Network())
        match self.case.who:
            case "producer":
                self.program = self._program("tests.faults.producer", queue, lines)
            case "restore":
                schedule_all(queue, lines)
                self.program = self._program("tests.faults.restore", queue)
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
        return self.stack.enter_context(Program(*arguments, failpoints=self.case.failpoints, network=self.network))

    def _worker(self, roles: str) -> Program:
        # Without a reaper: the healthy worker's, or the one of the reaper's own case, does the work. A loader has keys
        # of its own: of several that share them, one would load for all.
        keys = {"PREFIX": self.case.queue} if self.case.who == "loader" else {}
        with override_settings(DELAYQ={**settings.DELAYQ, **keys}):
            return self._program(
                *("django", "run_delayq", "--processes", "1", "--threads", "2"),
                *("--queue", self.case.queue, "--roles", roles, "--graceful-timeout", "10"),
            )

    def _cut_power(self) -> None:
        """Make sure that the supervisor will not see its child's end."""
        assert self.program is not None
        if self.case.action == "power":
            self.program.wait_for_children(1)
            freeze(self.program.pid)

    def _claim_and_vanish(self) -> None:
        messages = schedule_all(self.case.queue, str(self.lines))
        eventually(partial(is_past, max(message.due_at for message in messages)), "all are due")
        leases = {message.topic: LEASE for message in messages}
        claimed = transitions.claim("default", [Ticket(m.pk) for m in messages], leases, "nobody/1/0")
        assert len(claimed) == NUMBER
        wait_for_leases(1)

    def wait_until_reached(self) -> None:
        assert self.program is not None
        if self.case.who == "worker":
            rows = WorkerRow.objects.filter(queues=[self.case.queue])
            eventually(rows.exists, "the worker has shown that it is alive")
            self._cut_power()
            schedule_all(self.case.queue, str(self.lines))
        self._reached_by = self.program.wait_for_failpoint()
        if self.case.action in ("stop", "lose"):
            wait_for_state(self._reached_by, "T")
        if self.network is not None:
            self.network.lose_reply_to(NEXT[self.case.who, self.case.point])
            self.thaw()

    def thaw(self) -> None:
        os.kill(self._reached_by, signal.SIGCONT)

    def finish(self) -> None:
        """Wait until all messages are finished and no process of the case can change them any more."""
        assert self.program is not None
        if self.case.who in ("producer", "restore"):
            code = self.program.wait()
            killed = code == -signal.SIGKILL
            assert killed == (self.case.action == "kill"), f"{self.case}: exit code {code}\n{self.program.log}"
        elif self.case.action == "power":
            self.program.kill()
        if self.case.who == "producer":
            # Schedule the messages that the program did not schedule before its end, or that were refused.
            for number in range(committed(self.case.queue), NUMBER):
                schedule(self.case.queue, str(self.lines), number)
        eventually(self._is_drained, f"{self.case}: all are finished")
        if self.case.who not in ("producer", "restore") and self.case.action != "power":
            # Wait until late outcomes of frozen or slow programs have arrived, too.
            assert self.program.stop() == 0, self.program.log

    def _is_drained(self) -> bool:
        there = Message.objects.filter(queue=self.case.queue)
        return there.exists() and not there.filter(state__in=LIVE).exists()

    def wrong(self) -> list[str]:
        """Return what is wrong in the queue, and why the case proves nothing."""
        found = judge(
            self.case.queue,
            NUMBER,
            self.lines,
            windows=self.case.windows,
            victim=f"/{self._reached_by}/",
            failures=self.case.failures,
        )
        assert self.program is not None
        if self.network is not None:
            said = NEXT[self.case.who, self.case.point].words
            if self.network.lost != [said]:
                found.append(f"lost the replies to {self.network.lost}, not to {said!r}")
        whose = self.case.port or "databases"
        if self.case.action == "reset" and not self.program.count(rf"Cut [1-9]\d* connections to {whose}"):
            found.append("no connection was reset")
        return found
