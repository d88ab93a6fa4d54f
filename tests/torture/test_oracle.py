"""The oracle accepts a good run that was built by hand, and finds each way in which the run can be spoiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.torture import oracle
from tests.torture.arena import AUDIT

NOON = 1_750_000_000.0
HOST = "worker:host"
MARKS = {"quiet": 2, "child": 2, "poison": 2, "worker": 10, "redis": 10, "database": 15, "push": 3}


class Scene:
    """A run as it is left behind: rows, lines and journals, to be written out."""

    def __init__(self) -> None:
        self.scheduled: dict[int, float] = {}
        self.kinds: dict[int, str] = {}
        self.topics: dict[int, str] = {}
        self.states: dict[int, str] = {}
        self.log: dict[int, list[dict[str, Any]]] = {}
        self.effects: list[tuple[int, int]] = []
        self.lines: list[tuple[str, int, int, int, float]] = []
        self.nemesis: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.acked: list[int] = []
        self.orphaned: list[int] = []
        self.gone: list[tuple[int, str]] = []
        self.payloads: dict[int, dict[str, Any]] = {}
        self.rivals: list[dict[str, Any]] = []
        self.keys: dict[int, tuple[str, str]] = {}
        self.occurrences: dict[int, tuple[str, float]] = {}
        self.headers: dict[int, tuple[str, float]] = {}
        self.kinds_of_faults = ["kill-child", "redis-empty"]

    def message(self, pk: int, topic: str, due: float, kind: str = "plain") -> None:
        self.scheduled[pk] = due
        self.acked.append(pk)
        self.kinds[pk] = kind
        self.topics[pk] = topic
        self.log[pk] = []
        self.move(pk, None, "scheduled", due - 5, due)

    def move(self, pk: int, before: str | None, after: str, at: float, due: float, **more: Any) -> None:
        self.states[pk] = after
        delivery = sum(row["before"] == "scheduled" and row["after"] == "running" for row in self.log[pk])
        row = {"before": before, "after": after, "at": at, "due": due, "delivery": delivery, "actor": "", "reason": ""}
        self.log[pk].append({**row, "number": len(self.log[pk]) + 1, "error": "", "ready": None, **more})

    def claim(self, pk: int, at: float, pid: int = 11, worker: str = HOST) -> None:
        delivery = self.log[pk][-1]["delivery"] + 1
        due = self.log[pk][-1]["due"]
        self.move(pk, "scheduled", "running", at, due, delivery=delivery, actor=f"{worker}/{pid}/abc", ready=due)

    def end(self, pk: int, after: str, at: float, due: float | None = None, **more: Any) -> None:
        self.move(pk, "running", after, at, self.log[pk][-1]["due"] if due is None else due, **more)

    def ran(self, pk: int, delivery: int, pid: int, at: float, *whats: str) -> None:
        for number, what in enumerate(("start", *whats)):
            self.lines.append((what, pk, delivery, pid, at + number / 100))

    def deliver(self, pk: int, at: float, pid: int = 11, worker: str = HOST, lasts: float = 0.05) -> None:
        """Claim it, and let it have its effect and be consumed after so many seconds."""
        self.claim(pk, at, pid, worker)
        delivery = self.log[pk][-1]["delivery"]
        transactional = self.topics[pk] == "torture.row"
        self.ran(pk, delivery, pid, at + 0.01, *([] if transactional else ["end"]))
        if transactional:
            self.effects.append((pk, delivery))
        self.end(pk, "consumed", at + lasts)

    def consumed(self, pk: int, topic: str, at: float) -> None:
        """Add a message that is delivered at its due time."""
        self.message(pk, topic, at)
        self.deliver(pk, at)

    def fault(self, kind: str, begin: float, end: float, **facts: Any) -> None:
        number = len(self.nemesis)
        self.nemesis.append({"what": "begin", "fault": number, "kind": kind, "at": begin, **facts})
        self.nemesis.append({"what": "end", "fault": number, "kind": kind, "at": end})

    def slow_script(self, began: float, ms: float) -> None:
        self.nemesis.append({"what": "slow script", "at": NOON, "began": began, "ms": ms, "text": f"{ms} ms"})

    def cancel(self, pk: int, at: float, verdict: str) -> None:
        self.answers.append({"what": "asked", "id": pk, "at": at})
        self.answers.append({"what": "answered", "id": pk, "at": at + 0.01, "verdict": verdict})

    def requeue(self, pk: int, at: float) -> None:
        self.move(pk, "dead", "scheduled", at, at)
        self.rivals.append({"what": "requeued", "number": 1})

    def purge(self, pk: int) -> None:
        self.gone.append((pk, self.states[pk]))
        self.forget(pk)
        self.rivals.append({"what": "purged", "number": 1})

    def recurring(self, pk: int, at: float) -> None:
        """Add an occurrence with its message."""
        self.message(pk, "torture.row", at)
        self.headers[pk] = self.occurrences[pk] = (oracle.ALL, at)

    def forget(self, pk: int) -> None:
        del self.states[pk]
        del self.log[pk]

    # --- to spoil it --------------------------------------------------------------------------------------------------

    def shift(self, pk: int, seconds: float, first: int, last: int | None = None) -> None:
        """Let moves of a message be later: those of its log from the first number up to the last one."""
        for row in self.log[pk][first:last]:
            row["at"] += seconds

    def shift_lines(self, pk: int, delivery: int, seconds: float) -> None:
        self.lines = [(*line[:4], line[4] + seconds * (line[1:3] == (pk, delivery))) for line in self.lines]

    def shift_faults(self, kind: str, seconds: float, what: str = "") -> None:
        """Let the faults of this kind come later, or only their ``begin`` or ``end``."""
        for entry in self._of(kind):
            entry["at"] += seconds * (what in ("", entry["what"]))

    def become(self, pk: int, after: str, **more: Any) -> None:
        """Let the last move of a message lead to another state."""
        self.log[pk][-1] |= {"after": after, **more}
        self.states[pk] = after

    def change_faults(self, kind: str, /, **facts: Any) -> None:
        for entry in self._of(kind):
            entry.update(facts)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.nemesis if entry.get("kind") == kind]

    def drop_lines(self, what: str, pk: int) -> None:
        self.lines = [line for line in self.lines if line[:2] != (what, pk)]

    def drop_occurrence(self, pk: int) -> None:
        del self.occurrences[pk]
        del self.headers[pk]

    def tell(self, what: str) -> None:
        """Have the nemesis say that something happened."""
        self.nemesis.append({"what": what, "at": NOON, "text": "as it was told"})

    # --- written out --------------------------------------------------------------------------------------------------

    def write(self, folder: Path, dsn: str) -> None:
        for name in ("lines", "journals"):
            (folder / name).mkdir()
        run = {
            "seed": "by hand",
            "size": "small",
            "seconds": 60,
            "until": LAST_OCCURRENCE + 0.5,
            "lease": 5,
            "max_crashes": 3,
            "marks": MARKS,
            "steady": 0.25,
            "replaced": "short",
            "lifetime": 10,
            "limits": {
                "torture.limited": {"count": 2},
                "torture.rated": {"interval": 0.1, "burst": 2},
            },
            "kinds": self.kinds_of_faults,
        }
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "lines" / "1.log").write_text("".join(f"{' '.join(map(str, line))}\n" for line in self.lines))
        acked = [
            {"what": "acked", "at": NOON, "ids": self.acked},
            {"what": "dies", "at": NOON, "ids": self.orphaned},
        ]
        journals = {
            "nemesis": self.nemesis,
            "canceller-1": self.answers,
            "rivals-1": self.rivals,
            "producer-1": acked,
        }
        for name, entries in journals.items():
            text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
            (folder / "journals" / f"{name}.jsonl").write_text(text)
        with psycopg.connect(dsn) as connection:
            self._write_tables(connection)

    def _write_tables(self, connection: psycopg.Connection[Any]) -> None:
        for pk, due in self.scheduled.items():
            connection.execute(
                "INSERT INTO torture.sched (id, due, kind, key, holds) VALUES (%s, to_timestamp(%s), %s, %s, %s)",
                [pk, due, self.kinds[pk], *self.keys.get(pk, (None, None))],
            )
        for pk, state in self.states.items():
            final = state in oracle.FINAL
            deliveries = sum(row["before"] == "scheduled" and row["after"] == "running" for row in self.log[pk])
            connection.execute(
                """
                INSERT INTO delayq_message (id, topic, queue, priority, state, payload, headers, due_at, created_at,
                    finished_at, leased_until, attempts, deliveries, reported, excused, moves, worker,
                    cancel_requested)
                VALUES (%s, %s, 'default', 0, %s, %s, %s, now(), now(), CASE WHEN %s THEN now() END,
                        CASE WHEN %s THEN now() END, 0, %s, 0, 0, 1, '', false)
                """,
                [
                    pk,
                    self.topics.get(pk, "torture.line"),
                    state,
                    json.dumps(self.payloads.get(pk, {})),
                    self._headers(pk),
                    final,
                    state == "running",
                    deliveries,
                ],
            )
        for pk, log in self.log.items():
            for row in log:
                connection.execute(
                    """
                    INSERT INTO delayq_log (message_id, number, at, from_state, to_state, delivery, due_at,
                        ready_at, actor, reason, error, traceback)
                    VALUES (%(pk)s, %(number)s, to_timestamp(%(at)s), %(before)s, %(after)s, %(delivery)s,
                            to_timestamp(%(due)s), CASE WHEN %(ready)s::float8 > 0 THEN to_timestamp(%(ready)s) END,
                            %(actor)s, %(reason)s, %(error)s, '')
                    """,
                    {"pk": pk, **row},
                )
        for pk, (name, at) in self.occurrences.items():
            connection.execute("INSERT INTO delayq_occurrence VALUES (%s, to_timestamp(%s), %s)", [name, at, pk])
        for gone in self.gone:
            connection.execute("INSERT INTO torture.gone VALUES (%s, %s)", gone)
        for effect in self.effects:
            connection.execute("INSERT INTO torture.effect (id, delivery, pid) VALUES (%s, %s, 1)", effect)

    def _headers(self, pk: int) -> str:
        if pk not in self.headers:
            return "{}"
        name, at = self.headers[pk]
        return json.dumps({"schedule": name, "occurrence": datetime.fromtimestamp(at, UTC).isoformat()})


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

FIRST_OCCURRENCE = NOON + 140
LAST_OCCURRENCE = FIRST_OCCURRENCE + 2

DIED = "worker process died"
GIVEN_UP = f"{DIED}; it ran alone; 3 deliveries crashed"
RAN_OUT = "lease ran out"


def good() -> Scene:
    scene = Scene()
    for fate in FATES:
        fate(scene)
    return scene


def a_schedule_has_a_message_each_second(scene: Scene) -> None:
    """The second one was withdrawn once, since the schedule was changed."""
    for pk, at in zip(RECURRING, (FIRST_OCCURRENCE, FIRST_OCCURRENCE + 1, LAST_OCCURRENCE), strict=True):
        scene.recurring(pk, at)
        scene.deliver(pk, at)
    scene.recurring(WITHDRAWN, FIRST_OCCURRENCE + 1)
    scene.move(
        WITHDRAWN, "scheduled", "cancelled", NOON + 139, FIRST_OCCURRENCE + 1, reason="schedule torture.all was changed"
    )
    del scene.occurrences[WITHDRAWN]


def a_chain_goes_on_until_the_producers_end(scene: Scene) -> None:
    for turn, pk in enumerate(CHAIN, 1):
        scene.consumed(pk, "torture.chain", LAST_OCCURRENCE + turn / 4)
        scene.payloads[pk] = {"turn": turn}


def keys_go_from_hand_to_hand(scene: Scene) -> None:
    """The second waits while the first runs, and each of the others comes when the one before lets go."""
    for pk, after, holds in zip(
        KEYED, (0, 6, 12, 18, 27), ("scheduled", "scheduled", "live", "3s", "live"), strict=True
    ):
        scene.keys[pk] = ("k", holds)
        scene.message(pk, "torture.line", NOON + 200 + after)
        scene.deliver(pk, NOON + 200 + after, lasts=6 if pk == KEYED[0] else 0.1)


def a_process_waits_for_its_successor_before_it_goes_on(scene: Scene) -> None:
    for number, pk in enumerate(REPLACED):
        run_by_a_replaced_process(scene, pk, NOON + 160 + number / 100 + (number > 8))


def run_by_a_replaced_process(scene: Scene, pk: int, at: float) -> None:
    scene.message(pk, "torture.row", at)
    scene.deliver(pk, at, 71, "worker:short")


def messages_wait_for_a_limit(scene: Scene) -> None:
    """Two run, and the third one begins when the first one has ended."""
    at = NOON + 220
    for pk, after, lasts in zip(LIMITED, (0.01, 0.01, 0.52), (0.49, 0.59, 0.08), strict=True):
        scene.message(pk, "torture.limited", at)
        scene.deliver(pk, at + after, lasts=lasts)


def a_row_is_written_once(scene: Scene) -> None:
    """Claimed a moment before it was due."""
    scene.message(ROW, "torture.row", NOON)
    scene.deliver(ROW, NOON - 0.009)


def a_failure_is_reported_and_retried(scene: Scene) -> None:
    scene.message(RETRIED, "torture.line", NOON)
    scene.claim(RETRIED, NOON + 0.01)
    scene.ran(RETRIED, 1, 11, NOON + 0.02, "fail")
    scene.end(RETRIED, "scheduled", NOON + 0.05, NOON + 1, error="RetryLater: as ordered", reason="payload changed")
    scene.payloads[RETRIED] = {"left": [1]}
    scene.deliver(RETRIED, NOON + 1.01, 12)


def a_process_is_killed_between_the_effect_and_the_record(scene: Scene) -> None:
    """An effect twice, by window W1."""
    at = NOON + 10
    scene.message(KILLED, "torture.line", at)
    scene.claim(KILLED, at + 0.01, 13)
    scene.ran(KILLED, 1, 13, at + 0.02, "end")
    scene.fault("kill-child", at + 0.035, at + 0.04, pids=[13])
    scene.end(KILLED, "scheduled", at + 0.1, reason=DIED)
    scene.deliver(KILLED, at + 0.2)


def a_process_is_frozen_for_longer_than_the_lease(scene: Scene) -> None:
    """An effect twice, by window W2."""
    at = NOON + 20
    scene.message(FROZEN, "torture.async", at)
    scene.claim(FROZEN, at + 0.01, 14)
    scene.ran(FROZEN, 1, 14, at + 0.02)
    scene.fault("freeze-child", at + 0.05, at + 8, pids=[14])
    scene.end(FROZEN, "scheduled", at + 6, reason=RAN_OUT)
    scene.deliver(FROZEN, at + 6.01)
    scene.lines.append(("end", FROZEN, 1, 14, at + 8.1))


def an_async_handler_loses_its_connection(scene: Scene) -> None:
    at = NOON + 190
    scene.message(LOST, "torture.async", at)
    scene.claim(LOST, at + 0.01)
    scene.fault("database-cut", at + 0.015, at + 0.02)
    scene.ran(LOST, 1, 11, at + 0.02, "lost")
    scene.end(LOST, "scheduled", at + 0.05, at + 1, error="OperationalError: the connection is closed")
    scene.deliver(LOST, at + 1.01, 12)


def a_message_is_cancelled_in_time(scene: Scene) -> None:
    scene.message(CANCELLED, "torture.line", NOON + 30)
    scene.cancel(CANCELLED, NOON + 29, "cancelled")
    scene.move(CANCELLED, "scheduled", "cancelled", NOON + 29.005, NOON + 30)


def two_are_cancelled_while_or_after_they_run(scene: Scene) -> None:
    for pk, verdict in ((REQUESTED, "requested"), (TOO_LATE, "too late")):
        scene.consumed(pk, "torture.line", NOON + 30)
        scene.cancel(pk, NOON + 30.03, verdict)


def poison_crashes_three_processes(scene: Scene) -> None:
    scene.message(POISON, "torture.line", NOON + 40, kind="poison")
    for delivery, pid, after, reason in (
        (1, 15, "scheduled", DIED),
        (2, 16, "scheduled", DIED),
        (3, 18, "dead", GIVEN_UP),
    ):
        at = NOON + 40 + delivery / 2
        scene.claim(POISON, at, pid)
        scene.ran(POISON, delivery, pid, at + 0.01, "die")
        scene.end(POISON, after, at + 0.1, reason=reason)


def a_message_falls_due_while_redis_is_empty(scene: Scene) -> None:
    at = NOON + 50
    scene.fault("redis-empty", at, at + 1)
    scene.message(WHILE_EMPTY, "torture.row", at + 0.5)
    scene.deliver(WHILE_EMPTY, at + 4)


def a_process_is_frozen_between_the_claim_and_the_handler(scene: Scene) -> None:
    """An effect twice, by window W2, and out of order."""
    at = NOON + 90
    scene.message(FROZEN_BEFORE_START, "torture.line", at)
    scene.claim(FROZEN_BEFORE_START, at + 0.01, 17)
    scene.fault("freeze-worker", at + 0.02, at + 8, pids=[17])
    scene.end(FROZEN_BEFORE_START, "scheduled", at + 6, reason=RAN_OUT)
    scene.deliver(FROZEN_BEFORE_START, at + 6.01)
    scene.ran(FROZEN_BEFORE_START, 1, 17, at + 8.01, "end")


def the_database_is_away_for_longer_than_a_lease(scene: Scene) -> None:
    """An effect twice, by window W2."""
    at = NOON + 130
    scene.message(CUT_OFF, "torture.line", at)
    scene.claim(CUT_OFF, at + 0.01, 19)
    scene.ran(CUT_OFF, 1, 19, at + 0.02)
    scene.fault("database-blackhole", at + 0.1, at + 6)
    scene.end(CUT_OFF, "scheduled", at + 6.1, reason=RAN_OUT)
    scene.deliver(CUT_OFF, at + 6.2)
    scene.lines.append(("end", CUT_OFF, 1, 19, at + 7))


def a_producer_is_killed_before_it_tells_redis(scene: Scene) -> None:
    scene.message(UNANNOUNCED, "torture.row", NOON + 150)
    scene.orphaned.append(UNANNOUNCED)
    scene.deliver(UNANNOUNCED, NOON + 152.5)


def messages_are_refused_requeued_and_purged(scene: Scene) -> None:
    for pk in (REFUSED, REQUEUED, PURGED):
        scene.message(pk, "torture.refuse", NOON + 180, "refused")
        scene.claim(pk, NOON + 180.01, 21)
        scene.ran(pk, 1, 21, NOON + 180.02, "fail")
        scene.end(pk, "dead", NOON + 180.04, error="Reject")
    scene.requeue(REQUEUED, NOON + 185)
    scene.deliver(REQUEUED, NOON + 185.01)
    scene.purge(PURGED)


def a_message_is_claimed_a_little_early_by_a_wrong_clock(scene: Scene) -> None:
    scene.fault("clock", NOON + 195, NOON + 199, ahead=3600)
    scene.slow_script(NOON + 195 + 3600, 3_600_001.0)
    scene.message(WRONG_CLOCK, "torture.row", NOON + 200)
    scene.deliver(WRONG_CLOCK, NOON + 199.9)
    scene.log[WRONG_CLOCK][1]["ready"] = NOON + 170
    scene.shift_lines(WRONG_CLOCK, 1, 0.1)


FATES: list[Callable[[Scene], None]] = [
    a_schedule_has_a_message_each_second,
    a_chain_goes_on_until_the_producers_end,
    keys_go_from_hand_to_hand,
    a_process_waits_for_its_successor_before_it_goes_on,
    messages_wait_for_a_limit,
    a_row_is_written_once,
    a_failure_is_reported_and_retried,
    a_process_is_killed_between_the_effect_and_the_record,
    a_process_is_frozen_for_longer_than_the_lease,
    an_async_handler_loses_its_connection,
    a_message_is_cancelled_in_time,
    two_are_cancelled_while_or_after_they_run,
    poison_crashes_three_processes,
    a_message_falls_due_while_redis_is_empty,
    a_process_is_frozen_between_the_claim_and_the_handler,
    the_database_is_away_for_longer_than_a_lease,
    a_producer_is_killed_before_it_tells_redis,
    messages_are_refused_requeued_and_purged,
    a_message_is_claimed_a_little_early_by_a_wrong_clock,
]


# --- ways to spoil it -------------------------------------------------------------------------------------------------

Spoil = Callable[[Scene], object]


def with_late_ones(scene: Scene, *, poison: float | None = None) -> None:
    """A thousand messages due a thousand seconds after noon, two of a hundred late; and poison, so long after."""
    for pk in range(1000, 2000):
        scene.message(pk, "torture.row", NOON + 1000)
        scene.claim(pk, NOON + 1000 + 0.3 * (pk % 50 == 0))
        scene.effects.append((pk, 1))
        scene.end(pk, "consumed", NOON + 1001)
    if poison is not None:
        scene.lines.append(("die", POISON, 4, 19, NOON + poison))


def dead_after_one_death(scene: Scene) -> None:
    for row in scene.log[POISON][2], scene.log[POISON][4]:
        row["reason"] = "is to run alone"


def purged_after_its_requeue(scene: Scene) -> None:
    scene.states[REQUEUED] = "scheduled"
    scene.purge(REQUEUED)


def rolled_back(scene: Scene) -> None:
    del scene.scheduled[TOO_LATE]
    scene.acked.remove(TOO_LATE)


def no_wait_for_the_successor(scene: Scene) -> None:
    for pk in range(100, 111):
        run_by_a_replaced_process(scene, pk, NOON + 159 + pk / 100)


def a_burst(scene: Scene) -> None:
    for pk in range(100, 110):
        scene.consumed(pk, "torture.rated", NOON + 260)


def late_before_a_fault(scene: Scene) -> None:
    scene.shift(ROW, 3, 1)
    scene.fault("flush", NOON + 2.5, NOON + 2.6)


def late_beside_a_held_snapshot(scene: Scene) -> None:
    scene.shift(ROW, 3, 1)
    scene.fault("held-snapshot", NOON - 4, NOON + 10)


def late_after_a_paused_failover(scene: Scene) -> None:
    scene.change_faults("redis-empty", kind="redis-failover-paused")
    scene.shift(WHILE_EMPTY, 4, 1)


def a_restore_failed(scene: Scene) -> None:
    scene.fault("restores", NOON + 5, NOON + 6)
    scene.nemesis[-1]["code"] = 1


def more_and_more_files(scene: Scene) -> None:
    for second in range(0, 100, 5):
        sample = {"what": "sample", "at": NOON + second, "process": 11, "memory": 50_000, "files": 30 + second}
        scene.nemesis.append(sample)


SPOILS: dict[str, dict[str, Spoil]] = {
    "lost": {
        "a committed message is not in the record": lambda run: run.forget(ROW),
        "a commit that was acknowledged is gone": lambda run: run.acked.append(99),
        "a message never ended": lambda run: run.states.update({TOO_LATE: "running"}),
        "a healthy message was given up": lambda run: run.become(RETRIED, "dead", error="ConnectionError"),
        "a message was given up at its second delivery": lambda run: run.become(REQUEUED, "dead", error="Reject"),
        "poison was given up although it ran beside others": lambda run: run.become(POISON, "dead", reason=DIED),
        "poison was given up after one death": dead_after_one_death,
        "a message that nobody refused was purged": lambda run: run.purge(POISON),
        "a message was purged though it was requeued before": purged_after_its_requeue,
    },
    "unexpected": {
        "an effect of nothing": lambda run: run.effects.append((77, 1)),
        "a message of a transaction that was rolled back": rolled_back,
        "poison that was consumed": lambda run: run.become(POISON, "consumed", reason=""),
    },
    "early": {
        "a claim more than a moment before the due time": lambda run: run.shift(RETRIED, -0.022, 3, 4),
        "a claim by query before the due time": lambda run: run.log[ROW][1].update(at=NOON - 0.005, ready=None),
        "a claim much too early, while the clock of Redis was wrong": lambda run: run.shift(WRONG_CLOCK, -0.02, 1, 2),
        "a claim a little early, before the clock of Redis was set": lambda run: run.shift_faults("clock", 10),
        "ready before the due time": lambda run: run.log[RETRIED][3].update(ready=NOON + 0.998),
        "a due time that the record made earlier": lambda run: run.scheduled.update({ROW: NOON + 0.5}),
        "a handler that ran before the due time": lambda run: run.lines.append(("start", ROW, 1, 11, NOON - 0.002)),
    },
    "duplicate transactional effect": {"a row written twice": lambda run: run.effects.append((ROW, 2))},
    "unexplained duplicate": {
        "one delivery that ran twice": lambda run: run.ran(TOO_LATE, 1, 12, NOON + 30.03, "end"),
        "two effects, and another process was killed": lambda run: run.change_faults("kill-child", pids=[12]),
        "two effects, and the process was killed before the first": lambda run: run.shift_faults("kill-child", -2),
        "two effects, and the process was killed long after the first": lambda run: run.shift_lines(KILLED, 1, -5),
        "two effects, and the freeze came later": lambda run: run.shift_faults("freeze-child", 10),
        "two starts, and another worker was frozen": lambda run: run.change_faults("freeze-worker", pids=[12]),
        "two effects, and the table was locked for longer than the lease": lambda run: run.change_faults(
            "database-blackhole", kind="table-lock"
        ),
        "two effects, and the database was away for a moment only": lambda run: run.shift_faults(
            "database-blackhole", -5, "end"
        ),
        "a failure that was told and had its effect all the same": lambda run: run.lines.append(
            ("end", RETRIED, 1, 11, NOON + 0.04)
        ),
    },
    "start after cancelled": {
        "a handler that ran after the answer": lambda run: run.ran(CANCELLED, 1, 11, NOON + 30.02, "end"),
        "a retry after the answer that it was requested": lambda run: run.cancel(RETRIED, NOON + 0.03, "requested"),
        "an answer that did not come true": lambda run: run.cancel(ROW, NOON - 1, "cancelled"),
    },
    "illegal path": {
        "a dead message came back, and nobody may requeue it": lambda run: run.requeue(POISON, NOON + 60),
        "a move that is not logged": lambda run: run.log[RETRIED].pop(2),
        "a failure of a delivery that is not the current one": lambda run: run.log[KILLED][-3].update(delivery=2),
        "a delivery number given out twice": lambda run: run.log[RETRIED][3].update(delivery=1),
        "a state that the log does not end with": lambda run: run.states.update({CANCELLED: "dead"}),
        "a log that goes back in time": lambda run: run.shift(ROW, -1, -1),
    },
    "overlong lifetime": {"a process went on without a wait for its successor": no_wait_for_the_successor},
    "limit exceeded": {"a message began before another one had ended": lambda run: run.shift(LIMITED[0], 0.1, -1)},
    "rate exceeded": {"a burst began that the rate does not allow": a_burst},
    "forgotten in a line": {
        "a message waited on although its limit had room": lambda run: run.shift(LIMITED[2], 60, 1),
    },
    "missing occurrence": {
        "a second without a message": lambda run: run.drop_occurrence(RECURRING[1]),
        "a schedule that stopped too early": lambda run: run.drop_occurrence(RECURRING[2]),
        "an occurrence whose message stands for another time": lambda run: run.headers.update(
            {RECURRING[1]: (oracle.ALL, FIRST_OCCURRENCE)}
        ),
    },
    "doubled occurrence": {
        "two messages for one time": lambda run: run.headers.update({ROW: (oracle.ALL, FIRST_OCCURRENCE)}),
        "a message that was cancelled for another reason": lambda run: run.log[WITHDRAWN][-1].update(reason=""),
    },
    "two holders": {
        "another one with its key waited": lambda run: run.shift(KEYED[1], -5, 0, 1),
        "another one with its key ran, and held it": lambda run: run.keys.update({KEYED[0]: ("k", "live")}),
        "the time after the end of another one was not over": lambda run: run.shift(KEYED[4], -2, 0, 1),
    },
    "broken chain": {
        "a message of the chain did not schedule the next one": lambda run: run.shift(CHAIN[-1], -0.45, -1),
        "two messages of the chain scheduled a next one each": lambda run: run.payloads.update({CHAIN[1]: {"turn": 3}}),
    },
    "consumed without effect": {
        "a row that is missing": lambda run: run.effects.remove((ROW, 1)),
        "a line that is missing": lambda run: run.drop_lines("end", TOO_LATE),
    },
    "effect without consumed": {
        "a row of a message that was cancelled": lambda run: run.effects.append((CANCELLED, 1)),
        "a success of another delivery than the one with the row": lambda run: run.log[ROW][-1].update(delivery=2),
    },
    "failure without a cause": {
        "a delivery failed, and its handler did not": lambda run: run.drop_lines("fail", RETRIED),
        "an async handler lost its connection, and nobody had cut it": lambda run: run.shift_faults("database-cut", -5),
    },
    "wrong payload": {
        "a payload that was left is not there": lambda run: run.payloads.update({RETRIED: {"left": []}}),
        "a delivery that had none to change changed it": lambda run: run.log[RETRIED][2].update(reason=""),
    },
    "late": {
        "nothing was wrong": lambda run: run.shift(ROW, 3, 1),
        "long after Redis was back": lambda run: run.shift(WHILE_EMPTY, 8, 1),
        "long after a sweep should have found it": lambda run: run.shift(UNANNOUNCED, 1, 1),
        "long after the death of its process": lambda run: run.shift(KILLED, 2.5, 3),
        "long after the producer that stood still through a failover went on": late_after_a_paused_failover,
        "late already when a fault came": late_before_a_fault,
        "somebody held a snapshot": late_beside_a_held_snapshot,
        "one of a hundred, and nothing was near": with_late_ones,
        "one of a hundred, and poison was near no more": lambda run: with_late_ones(run, poison=997),
    },
    "wrong answer": {
        "fewer were requeued than was said": lambda run: run.rivals.append({"what": "requeued", "number": 1}),
        "fewer were purged than was said": lambda run: run.rivals.append({"what": "purged", "number": 1}),
        "too late for what had not ended": lambda run: run.cancel(RETRIED, NOON + 0.5, "too late"),
        "a message that is there was not found": lambda run: run.cancel(ROW, NOON - 1, "not found"),
        "cancelled, said of what had its effect": lambda run: run.cancel(REQUESTED, NOON + 31, "cancelled"),
    },
    "restore failed": {"a restore failed with nothing in its way": a_restore_failed},
    **{
        kind: {"it was noted": partial(Scene.tell, what=kind)}
        for kind in ("worker ended by itself", "client ended by itself", "toothless fault")
    },
    "fault that never came": {"a kind of fault was left out": lambda run: run.kinds_of_faults.append("redis-evict")},
    "slow script": {
        "a script kept Redis busy": lambda run: run.slow_script(NOON, 300.0),
        "a script kept Redis busy while its clock was wrong": lambda run: run.slow_script(NOON + 198 + 3600, 300.0),
    },
    "growth": {"a process opened more and more files": more_and_more_files},
}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def dsn(db: None) -> Iterator[str]:
    """The database of the tests, with the audit tables. The oracle connects by itself."""
    if not os.environ.get("DATABASE_URL"):
        pytest.skip("needs PostgreSQL")
    dsn = os.environ["DATABASE_URL"]
    with psycopg.connect(dsn) as connection:
        connection.execute(AUDIT)
    yield dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP SCHEMA torture CASCADE")
        connection.execute("DELETE FROM delayq_log")
        connection.execute("DELETE FROM delayq_message")
        connection.execute("DELETE FROM delayq_occurrence")


def test_a_good_run_is_good_and_its_duplicates_are_named(
    tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good().write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith("GOOD")
    assert {"W1: effect twice 1", "W2: effect twice 3"} <= {" ".join(line.split()) for line in said.splitlines()}


def test_lateness_beside_poison_is_counted_apart(tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    scene = good()
    with_late_ones(scene, poison=999)
    scene.write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 0
    assert "after poison" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [pytest.param(kind, spoil, id=f"{kind}: {name}") for kind in SPOILS for name, spoil in SPOILS[kind].items()],
)
def test_a_run_that_was_spoiled_is_called_by_its_name(
    kind: str, spoil: Spoil, tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = good()
    spoil(scene)
    scene.write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 1
    said = capsys.readouterr().out
    number = re.search(rf"^  {kind} +(\d+)$", said, re.MULTILINE)
    assert number is not None, said
    assert int(number[1]) > 0, said


def test_a_run_without_a_quiet_moment_has_a_report() -> None:
    run = {"lease": 5, "kinds": [], "steady": 1, "marks": {}, "seed": "1", "size": "smoke", "seconds": 1.0, "until": 0}
    run |= {"replaced": "", "lifetime": 1, "limits": {}}
    assert "GOOD" in oracle.tell(oracle.Oracle(oracle.Evidence(run)).judge(), run)


def test_every_kind_of_wrong_has_a_run_that_shows_it() -> None:
    assert set(SPOILS) == set(oracle.KINDS)


def test_the_oracle_knows_neither_the_app_nor_django() -> None:
    program = (
        f"import runpy, sys; sys.argv = ['oracle', '--help']\n"
        f"try: runpy.run_path({oracle.__file__!r}, run_name='__main__')\n"
        f"except SystemExit: pass\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "psycopg" in loaded
    assert not {"django", "django_delayq", "tests", "redis"} & set(loaded.rsplit("[", 1)[1].split("'"))
