"""The oracle accepts a good run that was built by hand, and finds each way in which the run can be spoiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from django_delayq import models, schedule_message
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success, Ticket
from django_delayq.recurring import create_schedule
from tests.support.workers import ROOT
from tests.torture import oracle
from tests.torture.arena import AUDIT
from tests.torture.oracle import Act, Answer, Call, Evidence, Fault, Line, Link, Message, Oracle, Report, Row, Scheduled

NOON = 1_750_000_000.0
HOST = "worker:host"
FIRST_OCCURRENCE = NOON + 140
LAST_OCCURRENCE = FIRST_OCCURRENCE + 2
RUN: dict[str, Any] = {
    "seed": "by hand",
    "size": "small",
    "seconds": 60,
    "until": LAST_OCCURRENCE + 0.5,
    "lease": 5,
    "marks": {"quiet": 2, "child": 2, "poison": 2, "worker": 10, "redis": 10, "database": 15, "push": 3},
    "steady": 0.25,
    "replaced": "short",
    "lifetime": 10,
    "limits": {
        "torture.limited": {"count": 2},
        "torture.single": {"count": 1},
        "torture.rated": {"interval": 0.1, "burst": 2},
    },
    "kinds": ["kill-child", "redis-empty"],
}


class Scene(Evidence):
    """The evidence of a run, written by hand."""

    def message(self, pk: int, topic: str, due: float, kind: str = "plain") -> None:
        self.scheduled[pk] = Scheduled(due, kind)
        self.acked.add(pk)
        self.messages[pk] = Message(topic, "scheduled", 0, [], (topic, ""))
        self.log[pk] = [Row(1, due - 5, None, "scheduled", 0, due, None, "", "", "")]

    def move(self, pk: int, before: str, after: str, at: float, **more: Any) -> None:
        facts = {"delivery": self.log[pk][-1].delivery, "due": self.log[pk][-1].due, "ready": None, "actor": ""}
        row = Row(len(self.log[pk]) + 1, at, before, after, **{**facts, "reason": "", "error": "", **more})
        self.log[pk].append(row)
        self.become(pk, state=after, deliveries=row.delivery)

    def claim(self, pk: int, at: float, pid: int = 11, worker: str = HOST) -> None:
        last = self.log[pk][-1]
        actor = f"{worker}/{pid}/abc"
        self.move(pk, "scheduled", "running", at, delivery=last.delivery + 1, actor=actor, ready=last.due)

    def end(self, pk: int, after: str, at: float, **more: Any) -> None:
        self.move(pk, "running", after, at, **more)

    def ran(self, pk: int, delivery: int, pid: int, at: float, *whats: str) -> None:
        self.lines[pk] += [Line(what, delivery, pid, at + n / 100) for n, what in enumerate(("start", *whats))]

    def deliver(self, pk: int, at: float, pid: int = 11, worker: str = HOST, lasts: float = 0.05) -> None:
        """Claim it, and let it have its effect and be consumed after so many seconds."""
        self.claim(pk, at, pid, worker)
        delivery = self.log[pk][-1].delivery
        transactional = self.messages[pk].is_transactional
        self.ran(pk, delivery, pid, at + 0.01, *([] if transactional else ["end"]))
        if transactional:
            self.effects[pk].append(delivery)
        self.end(pk, "consumed", at + lasts)

    def consumed(self, pk: int, topic: str, at: float) -> None:
        """Add a message that is delivered at its due time."""
        self.message(pk, topic, at)
        self.deliver(pk, at)

    def fault(self, kind: str, begin: float, end: float, pids: tuple[int, ...] = (), **facts: Any) -> None:
        self.faults.append(Fault(kind, begin, end, frozenset(pids), **facts))

    def slow_script(self, began: float, ms: float) -> None:
        self.notes.append({"what": "slow script", "began": began, "ms": ms, "text": f"{ms} ms"})

    def cancel(self, pk: int, at: float, verdict: str) -> None:
        self.answers.append(Answer(pk, at + 0.01, verdict))

    def requeue(self, pk: int, at: float) -> None:
        self.move(pk, "dead", "scheduled", at, due=at)
        self.requeued += 1

    def purge(self, pk: int) -> None:
        self.gone[pk] = self.messages[pk].state
        self.forget(pk)
        self.purged += 1

    def recurring(self, pk: int, at: float) -> None:
        """Add an occurrence with its message."""
        self.message(pk, "torture.row", at, "recurring")
        self.stands_for[pk] = (oracle.ALL, at)
        self.occurrences[oracle.ALL, at] = pk

    def link(self, pk: int, key: str, turn: int, at: float, steps: int = 3, topic: str = oracle.RELAY) -> None:
        """Add a message of a chain that is scheduled at this time, and due a moment later."""
        self.message(pk, topic, at + 0.3)
        self.change(pk, 0, at=at)
        self.links[pk] = Link(topic, key, turn, steps)

    def act(self, verb: str, pk: int | None, at: float, verdict: str) -> None:
        """Have somebody act on a chain, who is answered after a tenth of a second."""
        self.acts.append(Act("chain", verb, at - 0.05, at + 0.05, pk, verdict))

    # --- to spoil it --------------------------------------------------------------------------------------------------

    def forget(self, pk: int) -> None:
        del self.messages[pk]
        del self.log[pk]

    def become(self, pk: int, **facts: Any) -> None:
        """Change a message."""
        self.messages[pk] = self.messages[pk]._replace(**facts)

    def change(self, pk: int, place: int, **facts: Any) -> None:
        """Change a row of the log; the last one takes the state of the message along."""
        self.log[pk][place] = self.log[pk][place]._replace(**facts)
        if place == -1:
            self.become(pk, state=self.log[pk][-1].after)

    def shift(self, pk: int, seconds: float, first: int, last: int | None = None) -> None:
        """Let moves of a message be later: those of its log from the first place up to the last one."""
        self.log[pk][first:last] = [row._replace(at=row.at + seconds) for row in self.log[pk][first:last]]

    def shift_lines(self, pk: int, delivery: int, seconds: float) -> None:
        self.lines[pk] = [line._replace(at=line.at + seconds * (line.delivery == delivery)) for line in self.lines[pk]]

    def change_faults(self, of_kind: str, later: float = 0.0, **facts: Any) -> None:
        self.faults = [
            fault._replace(**{"begin": fault.begin + later, "end": fault.end + later, **facts})
            if fault.kind == of_kind
            else fault
            for fault in self.faults
        ]

    def drop_lines(self, what: str, pk: int) -> None:
        self.lines[pk] = [line for line in self.lines[pk] if line.what != what]

    def drop_occurrence(self, pk: int) -> None:
        del self.occurrences[self.stands_for.pop(pk)]

    def tell(self, what: str) -> None:
        """Have the nemesis say that something happened."""
        self.notes.append({"what": what, "text": "as it was told"})


# --- a good run: one message of each fate -----------------------------------------------------------------------------

ROW = 1
RETRIED = 2
KILLED = 3
FROZEN = 4
CANCELLED = 5
REQUESTED = 6
TOO_LATE = 7
POISON = 8
WHILE_EMPTY = 9
FROZEN_BEFORE_START = 10
CUT_OFF = 12
UNANNOUNCED = 13
REFUSED = 15
REQUEUED = 16
PURGED = 17
WRONG_CLOCK = 18
LOST = 19
RECURRING = range(20, 23)
WITHDRAWN = 23
REPLACED = range(30, 42)
CHAIN = range(50, 53)
KEYED = range(60, 65)
LIMITED = range(80, 83)
LINKS = range(300, 303)
CUT = range(310, 312)
SINGLE = range(320, 322)
EXTENDING = 330
STALE = 331
PULLED = 340

BEGIN = NOON + 300

DIED = "worker process died"
RAN_OUT = "lease ran out"

FATES: list[Callable[[Scene], None]] = []


def good() -> Scene:
    scene = Scene(RUN | {"kinds": [*RUN["kinds"]]})
    for fate in FATES:
        fate(scene)
    return scene


@FATES.append
def a_program_pulls_a_message(scene: Scene) -> None:
    scene.message(PULLED, "torture.pulled", NOON + 40, "pulled")
    scene.claim(PULLED, NOON + 40, 60)
    scene.ran(PULLED, 1, 60, NOON + 40.01, "end", "told")
    scene.end(PULLED, "consumed", NOON + 40.05)


@FATES.append
def a_schedule_has_a_message_each_second(scene: Scene) -> None:
    """The second one was withdrawn once, since the schedule was changed."""
    scene.recurring(WITHDRAWN, FIRST_OCCURRENCE + 1)
    scene.move(WITHDRAWN, "scheduled", "cancelled", NOON + 139, reason="schedule torture.all was changed")
    for place, pk in enumerate(RECURRING):
        scene.recurring(pk, FIRST_OCCURRENCE + place)
        scene.deliver(pk, FIRST_OCCURRENCE + place)


@FATES.append
def a_chain_goes_on_until_the_producers_end(scene: Scene) -> None:
    for turn, pk in enumerate(CHAIN, 1):
        scene.consumed(pk, "torture.chain", LAST_OCCURRENCE + turn / 4)
        scene.turns[pk] = turn


@FATES.append
def keys_go_from_hand_to_hand(scene: Scene) -> None:
    """The second waits while the first runs, and each of the others comes when the one before lets go."""
    terms = ((0, "scheduled"), (6, "scheduled"), (12, "live"), (18, "3s"), (27, "live"))
    for pk, (after, holds) in zip(KEYED, terms, strict=True):
        scene.keys[pk] = ("torture.line", "k", holds)
        scene.message(pk, "torture.line", NOON + 200 + after)
        scene.deliver(pk, NOON + 200 + after, lasts=6 if pk == KEYED[0] else 0.1)


@FATES.append
def a_process_waits_for_its_successor_before_it_goes_on(scene: Scene) -> None:
    for number, pk in enumerate(REPLACED):
        run_by_a_replaced_process(scene, pk, NOON + 160 + number / 100 + (number > 8))


def run_by_a_replaced_process(scene: Scene, pk: int, at: float) -> None:
    scene.message(pk, "torture.row", at)
    scene.deliver(pk, at, 71, "worker:short")


@FATES.append
def messages_wait_for_a_limit(scene: Scene) -> None:
    """Two run, and the third one begins when the first one has ended."""
    for pk, after, lasts in zip(LIMITED, (0.01, 0.01, 0.52), (0.49, 0.59, 0.08), strict=True):
        scene.message(pk, "torture.limited", NOON + 220)
        scene.deliver(pk, NOON + 220 + after, lasts=lasts)


@FATES.append
def a_row_is_written_once(scene: Scene) -> None:
    """Claimed a moment before it was due."""
    scene.message(ROW, "torture.row", NOON)
    scene.deliver(ROW, NOON - 0.009)


@FATES.append
def a_failure_is_reported_and_retried(scene: Scene) -> None:
    scene.message(RETRIED, "torture.line", NOON)
    scene.claim(RETRIED, NOON + 0.01)
    scene.ran(RETRIED, 1, 11, NOON + 0.02, "fail")
    scene.end(RETRIED, "scheduled", NOON + 0.05, due=NOON + 1, error="as ordered", reason="payload changed")
    scene.become(RETRIED, left=[1])
    scene.deliver(RETRIED, NOON + 1.01, 12)


@FATES.append
def effects_come_twice_through_the_windows(scene: Scene) -> None:
    """By the first three of each: when the fault begins and ends, and the delivery that it hits. Its start and end."""
    for pk, pid, at, kind, (begin, healed, ended), reason, (started, effect) in (
        (KILLED, 13, NOON + 10, "kill-child", (0.035, 0.04, 0.1), DIED, (0.02, 0.03)),
        (FROZEN, 14, NOON + 20, "freeze-child", (0.05, 8, 6), RAN_OUT, (0.02, 8.1)),
        # Its deliveries start out of order.
        (FROZEN_BEFORE_START, 17, NOON + 90, "freeze-worker", (0.02, 8, 6), RAN_OUT, (8.01, 8.02)),
        (CUT_OFF, 19, NOON + 130, "database-blackhole", (0.1, 6, 6.1), RAN_OUT, (0.02, 7)),
    ):
        scene.message(pk, "torture.line", at)
        scene.claim(pk, at + 0.01, pid)
        scene.fault(kind, at + begin, at + healed, (pid,))
        scene.lines[pk] += [Line("start", 1, pid, at + started), Line("end", 1, pid, at + effect)]
        scene.end(pk, "scheduled", at + ended, reason=reason)
        scene.deliver(pk, at + ended + 0.05)


@FATES.append
def an_async_handler_loses_its_connection(scene: Scene) -> None:
    at = NOON + 190
    scene.message(LOST, "torture.async", at)
    scene.claim(LOST, at + 0.01)
    scene.fault("database-cut", at + 0.015, at + 0.02)
    scene.ran(LOST, 1, 11, at + 0.02, "lost")
    scene.end(LOST, "scheduled", at + 0.05, due=at + 1, error="OperationalError: the connection is closed")
    scene.deliver(LOST, at + 1.01, 12)


@FATES.append
def messages_are_cancelled_in_time_or_later(scene: Scene) -> None:
    scene.message(CANCELLED, "torture.line", NOON + 30)
    scene.cancel(CANCELLED, NOON + 29, "cancelled")
    scene.move(CANCELLED, "scheduled", "cancelled", NOON + 29.005)
    for pk, verdict in ((REQUESTED, "requested"), (TOO_LATE, "too late")):
        scene.consumed(pk, "torture.line", NOON + 30)
        scene.cancel(pk, NOON + 30.03, verdict)


@FATES.append
def poison_crashes_three_processes(scene: Scene) -> None:
    scene.message(POISON, "torture.line", NOON + 40, "poison")
    for delivery, pid, after in ((1, 15, "scheduled"), (2, 16, "scheduled"), (3, 18, "dead")):
        at = NOON + 40 + delivery / 2
        scene.claim(POISON, at, pid)
        scene.ran(POISON, delivery, pid, at + 0.01, "die")
        scene.end(POISON, after, at + 0.1, reason=f"{DIED}; it ran alone; 3 crashed" if after == "dead" else DIED)


@FATES.append
def a_message_falls_due_while_redis_is_empty(scene: Scene) -> None:
    scene.fault("redis-empty", NOON + 50, NOON + 51)
    scene.message(WHILE_EMPTY, "torture.row", NOON + 50.5)
    scene.deliver(WHILE_EMPTY, NOON + 54)


@FATES.append
def a_producer_is_killed_before_it_tells_redis(scene: Scene) -> None:
    scene.message(UNANNOUNCED, "torture.row", NOON + 150)
    scene.orphaned.add(UNANNOUNCED)
    scene.deliver(UNANNOUNCED, NOON + 152.5)


@FATES.append
def messages_are_refused_requeued_and_purged(scene: Scene) -> None:
    for pk in (REFUSED, REQUEUED, PURGED):
        scene.message(pk, "torture.refuse", NOON + 180, "refused")
        scene.claim(pk, NOON + 180.01, 21)
        scene.ran(pk, 1, 21, NOON + 180.02, "fail")
        scene.end(pk, "dead", NOON + 180.04, error="Reject")
    scene.requeue(REQUEUED, NOON + 185)
    scene.deliver(REQUEUED, NOON + 185.01)
    scene.purge(PURGED)


@FATES.append
def a_message_is_claimed_a_little_early_by_a_wrong_clock(scene: Scene) -> None:
    scene.fault("clock", NOON + 195, NOON + 199, ahead=3600)
    scene.slow_script(NOON + 195 + 3600, 3_600_001.0)
    scene.message(WRONG_CLOCK, "torture.row", NOON + 200)
    scene.deliver(WRONG_CLOCK, NOON + 199.9)
    scene.change(WRONG_CLOCK, 1, ready=NOON + 170)
    scene.shift_lines(WRONG_CLOCK, 1, 0.1)


@FATES.append
def a_chain_goes_on_while_others_act_on_its_key(scene: Scene) -> None:
    """The second message is rescheduled, and waits for a retry while the third is cancelled and requeued."""
    first, second, third = LINKS
    scene.link(first, "chain", 1, BEGIN - 1)
    scene.deliver(first, BEGIN, lasts=0.1)
    scene.link(second, "chain", 2, BEGIN + 0.05)
    scene.act("reschedule", second, BEGIN + 0.2, "rescheduled")
    scene.move(second, "scheduled", "scheduled", BEGIN + 0.2, due=BEGIN + 2)
    scene.claim(second, BEGIN + 2)
    scene.ran(second, 1, 11, BEGIN + 2.01, "fail")
    scene.link(third, "chain", 3, BEGIN + 2.05)
    scene.end(second, "scheduled", BEGIN + 2.1, due=BEGIN + 4, error="as ordered")
    scene.act("cancel", third, BEGIN + 2.2, "cancelled")
    scene.move(third, "scheduled", "cancelled", BEGIN + 2.2)
    scene.act("requeue", third, BEGIN + 3, "requeued")
    scene.move(third, "cancelled", "scheduled", BEGIN + 3, due=BEGIN + 3)
    scene.deliver(third, BEGIN + 3.01, lasts=1)
    scene.act("run", third, BEGIN + 3.5, "too late")
    scene.deliver(second, BEGIN + 4, 12)


@FATES.append
def a_chain_is_cut_by_its_key(scene: Scene) -> None:
    first, second = CUT
    scene.link(first, "cut", 1, BEGIN - 1)
    scene.deliver(first, BEGIN)
    scene.link(second, "cut", 2, BEGIN + 0.02)
    scene.move(second, "scheduled", "cancelled", BEGIN + 0.1)
    scene.acts.append(Act("cut", "cancel", BEGIN + 0.08, BEGIN + 0.11, second, "cancelled"))


@FATES.append
def the_only_place_stays_taken_while_the_second_delivery_runs(scene: Scene) -> None:
    """A frozen process succeeds when the message has been delivered again."""
    first, second = SINGLE
    at = NOON + 320
    for pk in SINGLE:
        scene.message(pk, "torture.single", at)
    scene.claim(first, at, 41)
    scene.fault("freeze-limited", at + 0.5, at + 8, (41,))
    scene.end(first, "scheduled", at + 6, reason=RAN_OUT)
    scene.claim(first, at + 6.1, 42)
    scene.end(first, "consumed", at + 8.06, delivery=1)
    scene.ran(first, 1, 41, at + 0.01)
    scene.ran(first, 2, 42, at + 6.11)
    scene.lines[first] += [Line("end", 1, 41, at + 8.05), Line("end", 2, 42, at + 9)]
    scene.become(first, deliveries=2)
    scene.deliver(second, at + 9.05, lasts=0.5)
    scene.lines[second][-1] = Line("end", 1, 11, at + 9.5)


@FATES.append
def calls_take_long_when_the_database_does(scene: Scene) -> None:
    """A producer waits for the database, and a handler for an answer to its call of extend()."""
    scene.long_calls.append(Call(NOON + 130, NOON + 136))
    scene.message(EXTENDING, "torture.extending", NOON + 340)
    scene.deliver(EXTENDING, NOON + 340, lasts=3)
    scene.lines[EXTENDING] += [Line("asks", 1, 11, NOON + 340.1), Line("told", 1, 11, NOON + 342)]


@FATES.append
def a_session_stays_read_only_after_a_failover(scene: Scene) -> None:
    scene.fault(oracle.FAILED_OVER, NOON + 350, NOON + 351)
    scene.message(STALE, "torture.row", NOON + 380)
    scene.claim(STALE, NOON + 380)
    scene.end(STALE, "scheduled", NOON + 380.1, due=NOON + 381, error=f"cannot write in a {oracle.READ_ONLY}")
    scene.deliver(STALE, NOON + 381)


# --- ways to spoil it -------------------------------------------------------------------------------------------------

Spoil = Callable[[Scene], object]


def with_late_ones(scene: Scene, *, poison: float | None = None) -> None:
    """A thousand messages due a thousand seconds after noon, two of a hundred late; and poison, so long after."""
    for pk in range(1000, 2000):
        scene.message(pk, "torture.row", NOON + 1000)
        scene.claim(pk, NOON + 1000 + 0.3 * (pk % 50 == 0))
        scene.effects[pk].append(1)
        scene.end(pk, "consumed", NOON + 1001)
    if poison is not None:
        scene.lines[POISON].append(Line("die", 4, 19, NOON + poison))


def dead_after_one_death(scene: Scene) -> None:
    for place in (2, 4):
        scene.change(POISON, place, reason="is to run alone")


def purged_after_its_requeue(scene: Scene) -> None:
    scene.become(REQUEUED, state="scheduled")
    scene.purge(REQUEUED)


def no_wait_for_the_successor(scene: Scene) -> None:
    for pk in range(100, 111):
        run_by_a_replaced_process(scene, pk, NOON + 159 + pk / 100)


def a_burst(scene: Scene) -> None:
    for pk in range(100, 110):
        scene.consumed(pk, "torture.rated", NOON + 260)


def late_beside(scene: Scene, kind: str, begin: float, end: float) -> None:
    scene.shift(ROW, 3, 1)
    scene.fault(kind, NOON + begin, NOON + end)


def late_after_a_paused_failover(scene: Scene) -> None:
    scene.change_faults("redis-empty", kind="redis-failover-paused")
    scene.shift(WHILE_EMPTY, 4, 1)


def late_answer() -> Line:
    return Line("told", 1, 11, NOON + 351)


def waited_for_another_connection(scene: Scene) -> None:
    scene.lines[EXTENDING][-1] = late_answer()
    scene.change_faults(oracle.FAILED_OVER, 100)


def waited_behind_a_small_pool(scene: Scene) -> None:
    scene.fault("small-pool", NOON + 335, NOON + 351)
    waited_for_another_connection(scene)


def began_beside_a_second_delivery(scene: Scene) -> None:
    scene.shift(SINGLE[1], -0.5, 1)
    scene.shift_lines(SINGLE[1], 1, -0.5)


def cancelled_while_it_ran(scene: Scene) -> None:
    scene.change(TOO_LATE, -1, after="cancelled")
    scene.shift(TOO_LATE, -0.02, -1)
    scene.shift_lines(TOO_LATE, 1, 0.02)


def more_and_more_files(scene: Scene) -> None:
    for second in range(0, 100, 5):
        sample = {"what": "sample", "at": NOON + second, "process": 11, "memory": 50_000, "files": 30 + second}
        scene.notes.append(sample)


SPOILS: dict[str, dict[str, Spoil]] = {
    "lost": {
        "a committed message is not in the record": lambda run: run.forget(ROW),
        "a commit that was acknowledged is gone": lambda run: run.acked.add(99),
        "a message that programs pull never ended": lambda run: run.become(PULLED, state="running"),
        "a message that programs pull was given up": lambda run: run.change(PULLED, -1, after="dead"),
        "a message never ended": lambda run: run.become(TOO_LATE, state="running"),
        "a healthy message was given up": lambda run: run.change(RETRIED, -1, after="dead", error="ConnectionError"),
        "a message was given up when it ran again": lambda run: run.change(REQUEUED, -1, after="dead", error="no"),
        "poison was given up although it ran beside others": lambda run: run.change(POISON, -1, reason=DIED),
        "poison was given up after one death": dead_after_one_death,
        "a message that nobody refused was purged": lambda run: run.purge(POISON),
        "a message was purged though it was requeued before": purged_after_its_requeue,
    },
    "unexpected": {
        "an effect of nothing": lambda run: run.effects[77].append(1),
        "a message of a transaction that was rolled back": lambda run: run.scheduled.pop(TOO_LATE),
        "poison that was consumed": lambda run: run.change(POISON, -1, after="consumed"),
    },
    "early": {
        "a claim more than a moment before the due time": lambda run: run.shift(RETRIED, -0.022, 3, 4),
        "a claim by query before the due time": lambda run: run.change(ROW, 1, at=NOON - 0.005, ready=None),
        "a claim much too early, while the clock of Redis was wrong": lambda run: run.shift(WRONG_CLOCK, -0.02, 1, 2),
        "a claim a little early, before the clock of Redis was set": lambda run: run.change_faults("clock", 10),
        "ready before the due time": lambda run: run.change(RETRIED, 3, ready=NOON + 0.998),
        "a due time that the record made earlier": lambda run: run.scheduled.update({ROW: Scheduled(NOON + 0.5, "")}),
        "a claim before the time that somebody gave it": lambda run: run.shift(LINKS[1], -0.2, 2, 3),
        "a handler that ran before the due time": lambda run: run.ran(ROW, 1, 11, NOON - 0.002),
    },
    "slow call": {
        "a producer waited for Redis": lambda run: run.long_calls.append(Call(NOON + 5, NOON + 8.1)),
        "a handler waited for another connection": waited_for_another_connection,
        "a handler waited behind a small pool": waited_behind_a_small_pool,
    },
    "duplicate transactional effect": {"a row written twice": lambda run: run.effects[ROW].append(2)},
    "unexplained duplicate": {
        "a message that two programs took": lambda run: run.ran(PULLED, 1, 62, NOON + 40),
        "one delivery that ran twice": lambda run: run.ran(TOO_LATE, 1, 12, NOON + 30.03, "end"),
        "two effects, and another process was killed": lambda run: run.change_faults("kill-child", pids={12}),
        "two effects, and the process was killed before the first": lambda run: run.change_faults("kill-child", -2),
        "two effects, and the process was killed long after the first": lambda run: run.shift_lines(KILLED, 1, -5),
        "two effects, and the freeze came later": lambda run: run.change_faults("freeze-child", 10),
        "two starts, and another worker was frozen": lambda run: run.change_faults("freeze-worker", pids={12}),
        "two effects behind a locked table": lambda run: run.change_faults("database-blackhole", kind="table-lock"),
        "two effects after a short cut": lambda run: run.change_faults("database-blackhole", end=NOON + 131),
        "a failure that had its effect": lambda run: run.lines[RETRIED].append(Line("end", 1, 11, NOON + 0.04)),
    },
    "lost lease": {
        "a process that was not frozen lost it": lambda run: run.change_faults("freeze-child", pids={12}),
        "a caller had locked the row": lambda run: run.change_faults("database-blackhole", kind="long-locks"),
    },
    "start after cancelled": {
        "a handler that ran after the answer": lambda run: run.ran(CANCELLED, 1, 11, NOON + 30.02, "end"),
        "a retry after the answer that it was requested": lambda run: run.cancel(RETRIED, NOON + 0.03, "requested"),
        "a step of a chain after the one that was cancelled": lambda run: run.link(CUT[1] + 1, "cut", 3, BEGIN + 0.2),
        "a step before the cancelled one was requeued": lambda run: run.link(LINKS[2] + 1, "chain", 4, BEGIN + 2.9),
        "an answer that did not come true": lambda run: run.cancel(ROW, NOON - 1, "cancelled"),
    },
    "illegal path": {
        "of a message that programs pull": lambda run: run.change(PULLED, 1, before="dead"),
        "a dead message came back, and nobody may requeue it": lambda run: run.requeue(POISON, NOON + 60),
        "a message waited anew that nobody may move": lambda run: run.change(CANCELLED, -1, after="scheduled"),
        "a move that is not logged": lambda run: run.log[RETRIED].pop(2),
        "a failure of a delivery that is not the current one": lambda run: run.change(KILLED, -3, delivery=2),
        "a delivery number given out twice": lambda run: run.change(RETRIED, 3, delivery=1),
        "a state that the log does not end with": lambda run: run.become(CANCELLED, state="dead"),
        "a log that goes back in time": lambda run: run.shift(ROW, -1, -1),
    },
    "overlong lifetime": {"a process went on without a wait for its successor": no_wait_for_the_successor},
    "limit exceeded": {
        "a message began before another one had ended": lambda run: run.shift(LIMITED[0], 0.1, -1),
        "a message began while a delivery ran whose message had ended": began_beside_a_second_delivery,
    },
    "rate exceeded": {"a burst began that the rate does not allow": a_burst},
    "forgotten in a line": {"a message waited on though there was room": lambda run: run.shift(LIMITED[2], 60, 1)},
    "missing occurrence": {
        "a second without a message": lambda run: run.drop_occurrence(RECURRING[1]),
        "a schedule that stopped too early": lambda run: run.drop_occurrence(RECURRING[2]),
        "a message for another time": lambda run: run.stands_for.update({RECURRING[1]: (oracle.ALL, FIRST_OCCURRENCE)}),
    },
    "doubled occurrence": {
        "two messages for one time": lambda run: run.stands_for.update({ROW: (oracle.ALL, FIRST_OCCURRENCE)}),
        "a message that was cancelled for another reason": lambda run: run.change(WITHDRAWN, -1, reason=""),
    },
    "two holders": {
        "another one with its key waited": lambda run: run.shift(KEYED[1], -5, 0, 1),
        "another one with its key ran": lambda run: run.keys.update({KEYED[0]: ("torture.line", "k", "live")}),
        "the time after the end of another one was not over": lambda run: run.shift(KEYED[4], -2, 0, 1),
    },
    "broken chain": {
        "a message of the chain did not schedule the next one": lambda run: run.shift(CHAIN[-1], -0.45, -1),
        "a message of a counted chain scheduled none": lambda run: run.links.pop(LINKS[2]),
        "a message of a counted chain scheduled two": lambda run: run.links.update({LINKS[2]: run.links[LINKS[1]]}),
        "two messages of the chain scheduled a next one each": lambda run: run.turns.update({CHAIN[1]: 3}),
    },
    "consumed without effect": {
        "of a program that pulled it": lambda run: run.drop_lines("end", PULLED),
        "a row that is missing": lambda run: run.effects[ROW].clear(),
        "a line that is missing": lambda run: run.drop_lines("end", TOO_LATE),
    },
    "effect without consumed": {
        "of a program that pulled it": lambda run: run.change(PULLED, -1, after="dead", error=oracle.REJECTED),
        "a row of a message that was cancelled": lambda run: run.effects[CANCELLED].append(1),
        "a message was cancelled while its handler ran, which returned": cancelled_while_it_ran,
        "a message was cancelled when its handler had returned": lambda run: run.change(
            TOO_LATE, -1, after="cancelled"
        ),
        "a success of another delivery than the one with the row": lambda run: run.change(ROW, -1, delivery=2),
    },
    "failure without a cause": {
        "a delivery failed, and its handler did not": lambda run: run.drop_lines("fail", RETRIED),
        "a session was read-only before any failover": lambda run: run.change_faults(oracle.FAILED_OVER, 100),
        "a connection was lost that nobody had cut": lambda run: run.change_faults("database-cut", -5),
    },
    "wrong payload": {
        "a payload that was left is not there": lambda run: run.become(RETRIED, left=[]),
        "a delivery that had none to change changed it": lambda run: run.change(RETRIED, 2, reason=""),
    },
    "late": {
        "nothing was wrong": lambda run: run.shift(ROW, 3, 1),
        "long after Redis was back": lambda run: run.shift(WHILE_EMPTY, 8, 1),
        "long after a sweep should have found it": lambda run: run.shift(UNANNOUNCED, 1, 1),
        "long after the death of its process": lambda run: run.shift(KILLED, 2.5, 3),
        "long after the producer that stood still through a failover went on": late_after_a_paused_failover,
        "late already when a fault came": lambda run: late_beside(run, "flush", 2.5, 2.6),
        "nobody read a log": lambda run: late_beside(run, "unread-log", -4, 10),
        "somebody held a snapshot": lambda run: late_beside(run, "held-snapshot", -4, 10),
        "one of a hundred, and nothing was near": with_late_ones,
        "one of a hundred, and poison was near no more": lambda run: with_late_ones(run, poison=997),
    },
    "wrong answer": {
        "fewer were requeued than was said": lambda run: setattr(run, "requeued", 2),
        "fewer were purged than was said": lambda run: setattr(run, "purged", 2),
        "too late for what had not ended": lambda run: run.cancel(RETRIED, NOON + 0.5, "too late"),
        "a message that is there was not found": lambda run: run.cancel(ROW, NOON - 1, "not found"),
        "an action by key moved what had handed its key over": lambda run: run.change(LINKS[2], 0, at=BEGIN + 0.1),
        "an action by key missed the holder": lambda run: run.act("cancel", None, BEGIN + 3.4, "not found"),
        "rescheduled, said of what did not move": lambda run: run.act("run", LINKS[1], BEGIN + 1, "rescheduled"),
        "too late, said of what waited": lambda run: run.act("run", LINKS[1], BEGIN + 1, "too late"),
        "cancelled, said of what had its effect": lambda run: run.cancel(REQUESTED, NOON + 31, "cancelled"),
    },
    "restore failed": {"nothing was in its way": lambda run: run.fault("restores", NOON + 5, NOON + 6, code=1)},
    "worker ended by itself": {"it was noted": lambda run: run.tell("worker ended by itself")},
    "client ended by itself": {
        "it was noted": lambda run: run.tell("client ended by itself"),
        "callers failed": lambda run: run.fault("long-locks", NOON + 5, NOON + 6, code=1),
        "rivals failed": lambda run: run.fault("rivals", NOON + 5, NOON + 6, code=1),
    },
    "toothless fault": {"it was noted": lambda run: run.tell("toothless fault")},
    "fault that never came": {"a kind of fault was left out": lambda run: run.run["kinds"].append("redis-evict")},
    "slow script": {
        "a script kept Redis busy": lambda run: run.slow_script(NOON, 300.0),
        "a script kept Redis busy while its clock was wrong": lambda run: run.slow_script(NOON + 198 + 3600, 300.0),
    },
    "growth": {"a process opened more and more files": more_and_more_files},
}


# --- the tests --------------------------------------------------------------------------------------------------------


def judge(scene: Evidence) -> Report:
    return Oracle(scene).judge()


def test_a_good_run_is_good_and_its_duplicates_are_named() -> None:
    report = judge(good())
    assert report.good, report.wrong
    assert report.duplicates == {"W1: effect twice": 1, "W1: start twice": 2, "W2: effect twice": 4}
    assert [*oracle.tell(report, RUN)][-1] == "GOOD"


def test_lateness_beside_poison_is_counted_apart() -> None:
    scene = good()
    with_late_ones(scene, poison=999)
    report = judge(scene)
    assert report.good, report.wrong
    assert "after poison" in report.lateness


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [pytest.param(kind, spoil, id=f"{kind}: {name}") for kind in SPOILS for name, spoil in SPOILS[kind].items()],
)
def test_a_run_that_was_spoiled_is_called_by_its_name(kind: str, spoil: Spoil) -> None:
    scene = good()
    spoil(scene)
    report = judge(scene)
    assert kind in report.wrong
    assert [*oracle.tell(report, RUN)][-1] == "BAD"


def test_a_run_without_a_quiet_moment_has_a_report() -> None:
    run = RUN | {"until": 0, "kinds": []}
    assert "GOOD" in oracle.tell(judge(Evidence(run)), run)


def test_every_kind_of_wrong_has_a_run_that_shows_it() -> None:
    assert set(SPOILS) == set(oracle.KINDS)


def test_the_oracle_knows_neither_the_app_nor_django() -> None:
    imported = re.findall(r"^\s*(?:from|import) (\w+)", Path(oracle.__file__).read_text(), re.MULTILINE)
    assert "psycopg" in imported
    assert not {"django", "django_delayq", "tests", "redis"} & set(imported)


def test_the_command_starts_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    subprocess.run([sys.executable, "-m", "tests.torture", "--help"], check=True, cwd=ROOT)


@pytest.fixture
def dsn(transactional_db: None) -> Iterator[str]:
    """The database of the tests, with the audit tables. The oracle connects by itself."""
    dsn = os.environ["DATABASE_URL"]
    with psycopg.connect(dsn) as connection:
        connection.execute(AUDIT)
    yield dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP SCHEMA torture CASCADE")
        connection.execute("DROP TRIGGER IF EXISTS torture_gone ON delayq_message")


JOURNALS: dict[str, list[dict[str, Any]]] = {
    "nemesis": [
        {"what": "begin", "fault": 0, "kind": "clock", "at": NOON, "ahead": 30, "pids": [7]},
        {"what": "end", "fault": 0, "at": NOON + 1, "code": 3, "pids": [8]},
        {"what": "begin", "fault": 1, "kind": "flush", "at": NOON + 2},
        {"what": "toothless fault", "at": NOON, "text": "flush"},
    ],
    "canceller-1": [{"what": "answered", "id": 5, "at": NOON, "verdict": "too late"}, {"what": "asked", "id": 6}],
    "callers-1": [
        {"what": "answered", "id": 6, "at": NOON, "verdict": "requested"},
        {"what": "acted", "verb": "run", "key": "k", "asked": NOON, "at": NOON + 1, "id": None, "verdict": "not found"},
        {"what": "locks", "id": 6, "at": NOON},
    ],
    "rivals-1": [{"what": "requeued", "number": 2}, {"what": "purged", "number": 3}],
    "producer-1": [
        {"what": "acked", "ids": [1, 2]},
        {"what": "dies", "ids": [3]},
        {"what": "long call", "began": NOON, "at": NOON + 2},
    ],
}


@pytest.mark.postgresql("the audit is made for it")
def test_everything_that_a_run_leaves_behind_is_read(
    tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = {"turn": 3, "left": [1], "steps": 4}
    message = schedule_message("torture.chain", payload, key="k", limit_key="c", delay=0)
    create_schedule("p", "torture.row", every="1h")
    recurring: int = models.Message.objects.get(headers__schedule="p").pk
    [claimed] = transitions.claim("default", [Ticket(message.pk)], {"torture.chain": 60.0}, "host/7/abc", ahead=60)
    transitions.succeed("default", [Success(claimed.id, 1, "worker:host/7/abc/1")])
    with psycopg.connect(dsn) as connection:
        connection.execute("INSERT INTO torture.sched VALUES (%s, now(), 'plain', 'k', '3s')", [message.pk])
        connection.execute("INSERT INTO torture.effect (id, delivery) VALUES (%s, 1)", [message.pk])
        connection.execute("INSERT INTO torture.gone VALUES (4, 'dead')")
    for name in ("lines", "journals"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "lines" / "1.log").write_text(f"end {message.pk} 1 7 {NOON + 1}\nstart {message.pk} 1 7 {NOON}\n")
    for name, entries in JOURNALS.items():
        (tmp_path / "journals" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, entries)))

    found = oracle.read(tmp_path, dsn)
    pk = message.pk
    assert found.messages[pk] == Message("torture.chain", "consumed", 1, [1], ("torture.chain", "c"))
    assert [(row.number, row.before, row.after, row.delivery, row.pid) for row in found.log[pk]] == [
        (1, None, "scheduled", 0, None),
        (2, "scheduled", "running", 1, 7),
        (3, "running", "consumed", 1, 7),
    ]
    assert found.log[pk][0].due == message.due_at.timestamp()
    assert (found.scheduled[pk].kind, found.scheduled[recurring].kind) == ("plain", "recurring")
    assert (found.effects, found.gone, found.turns) == ({pk: [1]}, {4: "dead"}, {pk: 3})
    assert found.keys == {pk: ("torture.chain", "k", "3s")}
    assert found.occurrences == {found.stands_for[recurring]: recurring}
    assert found.lines == {pk: [Line("start", 1, 7, NOON), Line("end", 1, 7, NOON + 1)]}
    assert found.faults[0] == Fault("clock", NOON, NOON + 1, frozenset({7, 8}), 3, 30)
    assert found.faults[1] == Fault("flush", NOON + 2, float("inf"))
    assert [note["what"] for note in found.notes] == ["toothless fault"]
    assert found.answers == [Answer(6, NOON, "requested"), Answer(5, NOON, "too late")]
    assert found.acts == [Act("k", "run", NOON, NOON + 1, None, "not found")]
    assert (found.links, found.long_calls) == ({pk: Link("torture.chain", "k", 3, 4)}, [Call(NOON, NOON + 2)])
    assert (found.acked, found.orphaned, found.requeued, found.purged) == ({1, 2}, {3}, 2, 3)
    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 1
    assert capsys.readouterr().out.endswith("BAD\n")
