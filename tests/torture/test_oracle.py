"""The oracle itself: silent about a good run that was built by hand, loud about each way to spoil it."""

from __future__ import annotations

import copy
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

from tests.torture import oracle
from tests.torture.arena import AUDIT

NOON = 1_750_000_000.0
HOST = "worker:host"
MARKS = {"quiet": 2, "child": 2, "worker": 10, "redis": 10, "database": 15, "push": 3}


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

    def claim(self, pk: int, at: float, pid: int) -> None:
        delivery = self.log[pk][-1]["delivery"] + 1
        due = self.log[pk][-1]["due"]
        self.move(pk, "scheduled", "running", at, due, delivery=delivery, actor=f"{HOST}/{pid}/abc", ready=due)

    def end(self, pk: int, after: str, at: float, due: float | None = None, **more: Any) -> None:
        self.move(pk, "running", after, at, self.log[pk][-1]["due"] if due is None else due, **more)

    def ran(self, pk: int, delivery: int, pid: int, at: float, *whats: str) -> None:
        for number, what in enumerate(("start", *whats)):
            self.lines.append((what, pk, delivery, pid, at + number / 100))

    def fault(self, kind: str, begin: float, end: float, **facts: Any) -> None:
        number = len(self.nemesis)
        self.nemesis.append({"what": "begin", "fault": number, "kind": kind, "at": begin, **facts})
        self.nemesis.append({"what": "end", "fault": number, "kind": kind, "at": end})

    def cancel(self, pk: int, at: float, verdict: str) -> None:
        self.answers.append({"what": "asked", "id": pk, "at": at})
        self.answers.append({"what": "answered", "id": pk, "at": at + 0.01, "verdict": verdict})

    def forget(self, pk: int) -> None:
        del self.states[pk]
        del self.log[pk]

    # --- written out --------------------------------------------------------------------------------------------------

    def write(self, folder: Path, dsn: str) -> None:
        for name in ("lines", "journals"):
            (folder / name).mkdir()
        run = {
            "seed": "by hand",
            "size": "small",
            "seconds": 60,
            "lease": 5,
            "max_crashes": 3,
            "marks": MARKS,
            "steady": 0.25,
            "kinds": self.kinds_of_faults,
        }
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "lines" / "1.log").write_text("".join(f"{' '.join(map(str, line))}\n" for line in self.lines))
        acked = [
            {"what": "acked", "at": NOON, "ids": self.acked},
            {"what": "dies", "at": NOON, "ids": self.orphaned},
        ]
        for name, entries in (("nemesis", self.nemesis), ("canceller-1", self.answers), ("producer-1", acked)):
            text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
            (folder / "journals" / f"{name}.jsonl").write_text(text)
        with psycopg.connect(dsn) as connection:
            self._write_tables(connection)

    def _write_tables(self, connection: psycopg.Connection[Any]) -> None:
        for pk, due in self.scheduled.items():
            connection.execute(
                "INSERT INTO torture.sched (id, due, kind) VALUES (%s, to_timestamp(%s), %s)", [pk, due, self.kinds[pk]]
            )
        for pk, state in self.states.items():
            final = state in oracle.FINAL
            deliveries = sum(row["before"] == "scheduled" and row["after"] == "running" for row in self.log[pk])
            connection.execute(
                """
                INSERT INTO delayq_message (id, topic, queue, priority, state, payload, headers, due_at, created_at,
                    finished_at, leased_until, attempts, deliveries, reported, excused, moves, worker,
                    cancel_requested)
                VALUES (%s, %s, 'default', 0, %s, '{}', '{}', now(), now(), CASE WHEN %s THEN now() END,
                        CASE WHEN %s THEN now() END, 0, %s, 0, 0, 1, '', false)
                """,
                [pk, self.topics.get(pk, "torture.line"), state, final, state == "running", deliveries],
            )
        for pk, log in self.log.items():
            for row in log:
                connection.execute(
                    """
                    INSERT INTO delayq_transition (message_id, number, at, from_state, to_state, attempt, due_at,
                        ready_at, partition, actor, reason, error, traceback)
                    VALUES (%(pk)s, %(number)s, to_timestamp(%(at)s), %(before)s, %(after)s, %(delivery)s,
                            to_timestamp(%(due)s), to_timestamp(%(ready)s), CASE WHEN %(ready)s::float8 > 0 THEN 0 END,
                            %(actor)s, %(reason)s, %(error)s, '')
                    """,
                    {"pk": pk, **row},
                )
        for effect in self.effects:
            connection.execute("INSERT INTO torture.effect (id, delivery, pid) VALUES (%s, %s, 1)", effect)


def good() -> Scene:
    """One message of each fate."""
    scene = Scene()
    # 1: a row, written once; claimed a moment before it was due.
    scene.message(1, "torture.row", NOON)
    scene.claim(1, NOON - 0.009, 11)
    scene.ran(1, 1, 11, NOON + 0.02)
    scene.effects.append((1, 1))
    scene.end(1, "consumed", NOON + 0.05)
    # 2: fails, is told, and comes back.
    scene.message(2, "torture.line", NOON)
    scene.claim(2, NOON + 0.01, 11)
    scene.ran(2, 1, 11, NOON + 0.02, "fail")
    scene.end(2, "scheduled", NOON + 0.05, NOON + 1, error="ConnectionError: as ordered")
    scene.claim(2, NOON + 1.01, 12)
    scene.ran(2, 2, 12, NOON + 1.02, "end")
    scene.end(2, "consumed", NOON + 1.05)
    # 3: its process is killed between the effect and the record (W1).
    scene.message(3, "torture.line", NOON + 10)
    scene.claim(3, NOON + 10.01, 13)
    scene.ran(3, 1, 13, NOON + 10.02, "end")
    scene.fault("kill-child", NOON + 10.035, NOON + 10.04, pids=[13])
    scene.end(3, "scheduled", NOON + 10.1, reason="worker process died")
    scene.claim(3, NOON + 10.2, 11)
    scene.ran(3, 2, 11, NOON + 10.21, "end")
    scene.end(3, "consumed", NOON + 10.3)
    # 4: its process is frozen for longer than the lease (W2).
    scene.message(4, "torture.async", NOON + 20)
    scene.claim(4, NOON + 20.01, 14)
    scene.ran(4, 1, 14, NOON + 20.02)
    scene.fault("freeze-child", NOON + 20.05, NOON + 28, pids=[14])
    scene.end(4, "scheduled", NOON + 26, reason="lease ran out")
    scene.claim(4, NOON + 26.01, 11)
    scene.ran(4, 2, 11, NOON + 26.02, "end")
    scene.end(4, "consumed", NOON + 26.1)
    scene.lines.append(("end", 4, 1, 14, NOON + 28.1))
    # 5: cancelled in time. 6: cancelled while it runs. 7: too late.
    scene.message(5, "torture.line", NOON + 30)
    scene.cancel(5, NOON + 29, "cancelled")
    scene.move(5, "scheduled", "cancelled", NOON + 29.005, NOON + 30)
    for pk, verdict in ((6, "requested"), (7, "too late")):
        scene.message(pk, "torture.line", NOON + 30)
        scene.claim(pk, NOON + 30.01, 11)
        scene.ran(pk, 1, 11, NOON + 30.02, "end")
        scene.end(pk, "consumed", NOON + 30.05)
        scene.cancel(pk, NOON + 30.03, verdict)
    # 8: poison.
    scene.message(8, "torture.line", NOON + 40, kind="poison")
    for delivery, pid in ((1, 15), (2, 16), (3, 18)):
        at = NOON + 40 + delivery / 2
        scene.claim(8, at, pid)
        scene.ran(8, delivery, pid, at + 0.01, "die")
        over = delivery == 3
        scene.end(8, "dead" if over else "scheduled", at + 0.1, reason="worker process died; 3 deliveries crashed")
    # 9: due while Redis was empty.
    scene.fault("redis-empty", NOON + 50, NOON + 51)
    scene.message(9, "torture.row", NOON + 50.5)
    scene.claim(9, NOON + 54, 11)
    scene.effects.append((9, 1))
    scene.end(9, "consumed", NOON + 54.1)
    # 10: its process is frozen between the claim and the first line of the handler (W2, out of order).
    scene.message(10, "torture.line", NOON + 90)
    scene.claim(10, NOON + 90.01, 17)
    scene.fault("freeze-worker", NOON + 90.02, NOON + 98, pids=[17])
    scene.end(10, "scheduled", NOON + 96, reason="lease ran out")
    scene.claim(10, NOON + 96.01, 11)
    scene.ran(10, 2, 11, NOON + 96.02, "end")
    scene.end(10, "consumed", NOON + 96.1)
    scene.ran(10, 1, 17, NOON + 98.01, "end")
    # 11: innocent, and killed too often; in between it is given back, to be run alone, and one claim is not heard of.
    scene.message(11, "torture.line", NOON + 110)
    for delivery, pid in ((1, 31), (2, 32), (3, 33), (4, 34)):
        at = NOON + 110 + delivery / 2
        scene.claim(11, at, pid)
        if delivery == 1:
            scene.fault("database-cut", at + 0.01, at + 0.02)
            scene.end(11, "scheduled", at + 0.2, reason="lease ran out")
            continue
        if delivery == 3:
            scene.end(11, "scheduled", at + 0.1, reason="is to run alone")
            continue
        scene.ran(11, delivery, pid, at + 0.01)
        scene.fault("kill-child", at + 0.02, at + 0.03, pids=[pid])
        final = "; 3 deliveries crashed" if delivery == 4 else ""
        scene.end(11, "dead" if final else "scheduled", at + 0.1, reason=f"worker process died{final}")
    # 12: the database is away for longer than its lease, while it runs (W2).
    scene.message(12, "torture.line", NOON + 130)
    scene.claim(12, NOON + 130.01, 19)
    scene.ran(12, 1, 19, NOON + 130.02)
    scene.fault("database-blackhole", NOON + 130.1, NOON + 136)
    scene.end(12, "scheduled", NOON + 136.1, reason="lease ran out")
    scene.claim(12, NOON + 136.2, 11)
    scene.ran(12, 2, 11, NOON + 136.3, "end")
    scene.end(12, "consumed", NOON + 136.4)
    scene.lines.append(("end", 12, 1, 19, NOON + 137))
    # 13: its producer was killed before it told Redis.
    scene.message(13, "torture.row", NOON + 150)
    scene.orphaned.append(13)
    scene.claim(13, NOON + 152.5, 11)
    scene.effects.append((13, 1))
    scene.end(13, "consumed", NOON + 152.6)
    # 14: cancelled after a death.
    scene.message(14, "torture.line", NOON + 170)
    scene.claim(14, NOON + 170.01, 20)
    scene.ran(14, 1, 20, NOON + 170.02, "end")
    scene.fault("kill-child", NOON + 170.04, NOON + 170.05, pids=[20])
    scene.end(14, "scheduled", NOON + 170.1, reason="worker process died")
    scene.cancel(14, NOON + 170.11, "outcome unknown")
    scene.move(14, "scheduled", "cancelled", NOON + 170.115, NOON + 170)
    return scene


# --- ways to spoil it -------------------------------------------------------------------------------------------------

Spoil = Callable[[Scene], object]
SPOILS: list[tuple[str, str, Spoil]] = []


def spoil(kind: str, name: str) -> Callable[[Spoil], Spoil]:
    def add(function: Spoil) -> Spoil:
        SPOILS.append((kind, name, function))
        return function

    return add


@spoil("lost", "a committed message is not in the record")
def _(scene: Scene) -> None:
    scene.forget(1)


@spoil("lost", "a message never ended")
def _(scene: Scene) -> None:
    scene.log[7].pop()
    scene.states[7] = "running"


@spoil("lost", "a healthy message was given up")
def _(scene: Scene) -> None:
    scene.log[2][-1] |= {"after": "dead", "error": "ConnectionError"}
    scene.states[2] = "dead"


@spoil("lost", "a message was given up for deaths that nobody died")
def _(scene: Scene) -> None:
    scene.kinds[8] = "plain"
    scene.lines = [line for line in scene.lines if line[0] != "die"]


@spoil("lost", "a message was given up for a claim whose handler began, with nothing in its way")
def _(scene: Scene) -> None:
    scene.ran(11, 1, 31, NOON + 110.52)


@spoil("lost", "a message was given up for a claim that was lost, and nothing loses one")
def _(scene: Scene) -> None:
    cut = next(entry["fault"] for entry in scene.nemesis if entry.get("kind") == "database-cut")
    scene.nemesis = [entry for entry in scene.nemesis if entry["fault"] != cut]


@spoil("lost", "a commit that was acknowledged is gone")
def _(scene: Scene) -> None:
    scene.acked.append(99)


@spoil("unexpected", "a message of a transaction that was rolled back")
def _(scene: Scene) -> None:
    del scene.scheduled[7]
    scene.acked.remove(7)


@spoil("unexpected", "an effect of nothing")
def _(scene: Scene) -> None:
    scene.effects.append((77, 1))


@spoil("early", "a claim more than a moment before the due time")
def _(scene: Scene) -> None:
    scene.log[2][3]["at"] -= 0.022


@spoil("early", "a claim by query before the due time")
def _(scene: Scene) -> None:
    scene.log[1][1].update(at=NOON - 0.005, ready=None)


@spoil("early", "ready before the due time")
def _(scene: Scene) -> None:
    scene.log[2][3]["ready"] -= 0.002


@spoil("early", "a due time that the record made earlier than was asked for")
def _(scene: Scene) -> None:
    scene.scheduled[1] += 0.5


@spoil("early", "a handler that ran before the due time")
def _(scene: Scene) -> None:
    scene.lines.append(("start", 1, 1, 11, NOON - 0.002))


@spoil("duplicate transactional effect", "a row written twice")
def _(scene: Scene) -> None:
    scene.effects.append((1, 2))


@spoil("unexplained duplicate", "two effects, and nobody was killed")
def _(scene: Scene) -> None:
    scene.nemesis = [entry for entry in scene.nemesis if entry.get("kind") != "kill-child"]


@spoil("unexplained duplicate", "two effects, and another process was killed")
def _(scene: Scene) -> None:
    for entry in scene.nemesis:
        if entry.get("pids") == [13]:
            entry["pids"] = [12]


@spoil("unexplained duplicate", "two effects, and the process was killed before the first")
def _(scene: Scene) -> None:
    for entry in scene.nemesis:
        if entry["kind"] == "kill-child":
            entry["at"] -= 2


@spoil("unexplained duplicate", "two effects, and the freeze came later")
def _(scene: Scene) -> None:
    for entry in scene.nemesis:
        if entry["kind"] == "freeze-child":
            entry["at"] += 10


@spoil("unexplained duplicate", "a start after another delivery had its effect, and nobody was frozen")
def _(scene: Scene) -> None:
    scene.nemesis = [entry for entry in scene.nemesis if entry.get("kind") != "freeze-worker"]


@spoil("unexplained duplicate", "a failure that was told and had its effect all the same")
def _(scene: Scene) -> None:
    scene.lines.append(("end", 2, 1, 11, NOON + 0.04))


@spoil("unexplained duplicate", "two effects, and the process was killed long after the first")
def _(scene: Scene) -> None:
    for entry in scene.nemesis:
        if entry.get("pids") == [13] or (entry["what"] == "end" and entry["at"] == NOON + 10.04):
            entry["at"] += 5
    for row in scene.log[3][2:]:
        row["at"] += 5
    scene.lines = [
        (what, pk, delivery, pid, at + 5 if (pk, delivery) == (3, 2) else at)
        for what, pk, delivery, pid, at in scene.lines
    ]


@spoil("unexplained duplicate", "two effects, and the database was away for a moment only")
def _(scene: Scene) -> None:
    for entry in scene.nemesis:
        if entry["at"] == NOON + 136:
            entry["at"] = NOON + 131


@spoil("unexplained duplicate", "one delivery that ran twice")
def _(scene: Scene) -> None:
    scene.ran(7, 1, 12, NOON + 30.03, "end")


@spoil("start after cancelled", "a claim after the answer")
def _(scene: Scene) -> None:
    scene.move(5, "cancelled", "scheduled", NOON + 29.5, NOON + 30)
    scene.claim(5, NOON + 30.01, 11)
    scene.ran(5, 1, 11, NOON + 30.02, "end")
    scene.end(5, "consumed", NOON + 30.05)


@spoil("start after cancelled", "a handler that ran after the answer")
def _(scene: Scene) -> None:
    scene.ran(5, 1, 11, NOON + 30.02, "end")


@spoil("start after cancelled", "a retry after the answer that it was requested")
def _(scene: Scene) -> None:
    scene.cancel(2, NOON + 0.03, "requested")


@spoil("start after cancelled", "an answer that did not come true")
def _(scene: Scene) -> None:
    scene.cancel(1, NOON - 1, "cancelled")


@spoil("illegal path", "a move that is not logged")
def _(scene: Scene) -> None:
    del scene.log[2][2]


@spoil("illegal path", "a move that no table has")
def _(scene: Scene) -> None:
    scene.log[1][-1]["before"] = "scheduled"
    scene.log[1][-2]["after"] = "dead"


@spoil("illegal path", "a failure of a delivery that is not the current one")
def _(scene: Scene) -> None:
    scene.log[3][-3]["delivery"] = 2


@spoil("illegal path", "a delivery number given out twice")
def _(scene: Scene) -> None:
    scene.log[2][3]["delivery"] = 1


@spoil("illegal path", "a state that the log does not end with")
def _(scene: Scene) -> None:
    scene.states[5] = "dead"


@spoil("illegal path", "a log that goes back in time")
def _(scene: Scene) -> None:
    scene.log[1][-1]["at"] -= 1


@spoil("consumed without effect", "a row that is missing")
def _(scene: Scene) -> None:
    scene.effects.remove((1, 1))


@spoil("consumed without effect", "a line that is missing")
def _(scene: Scene) -> None:
    scene.lines = [line for line in scene.lines if line[:2] != ("end", 7)]


@spoil("effect without consumed", "a row of a message that was cancelled")
def _(scene: Scene) -> None:
    scene.topics[5] = "torture.row"
    scene.effects.append((5, 1))


@spoil("effect without consumed", "a row of another delivery than the one that succeeded")
def _(scene: Scene) -> None:
    scene.effects[0] = (1, 2)


@spoil("late", "nothing was wrong, and it came late")
def _(scene: Scene) -> None:
    for row in scene.log[1][1:]:
        row["at"] += 3


@spoil("late", "it came long after Redis was back")
def _(scene: Scene) -> None:
    for row in scene.log[9][1:]:
        row["at"] += 8


@spoil("late", "what was late already is not excused by a fault that came then")
def _(scene: Scene) -> None:
    for row in scene.log[1][1:]:
        row["at"] += 3
    scene.fault("flush", NOON + 2.5, NOON + 2.6)


@spoil("late", "it came long after a sweep should have found it")
def _(scene: Scene) -> None:
    for row in scene.log[13][1:]:
        row["at"] += 1


def with_late_ones(scene: Scene, *, poison: float | None = None) -> None:
    """A thousand messages due a thousand seconds after noon, two of a hundred late; and poison, so long after."""
    for pk in range(1000, 2000):
        scene.message(pk, "torture.row", NOON + 1000)
        scene.claim(pk, NOON + 1000 + 0.3 * (pk % 50 == 0), 11)
        scene.effects.append((pk, 1))
        scene.end(pk, "consumed", NOON + 1001)
    if poison is not None:
        scene.lines.append(("die", 8, 4, 19, NOON + poison))


@spoil("late", "one of a hundred was late, and nothing was near")
def _(scene: Scene) -> None:
    with_late_ones(scene)


@spoil("late", "one of a hundred was late, and poison was near no more")
def _(scene: Scene) -> None:
    with_late_ones(scene, poison=997)


@spoil("late", "it came long after the death of its process")
def _(scene: Scene) -> None:
    for row in scene.log[3][3:]:
        row["at"] += 2.5


@spoil("lost", "a message was given up after one death")
def _(scene: Scene) -> None:
    scene.log[8][2]["reason"] = scene.log[8][4]["reason"] = "is to run alone"


@spoil("unexpected", "poison that was consumed")
def _(scene: Scene) -> None:
    scene.ran(8, 3, 18, NOON + 41.6, "end")
    scene.log[8][-1] |= {"after": "consumed", "reason": ""}
    scene.states[8] = "consumed"


@spoil("wrong answer", "too late for what had not ended")
def _(scene: Scene) -> None:
    scene.cancel(2, NOON + 0.5, "too late")


@spoil("wrong answer", "a message that is there was not found")
def _(scene: Scene) -> None:
    scene.cancel(1, NOON - 1, "not found")


@spoil("wrong answer", "cancelled, said of what may have had its effect")
def _(scene: Scene) -> None:
    for answer in scene.answers:
        if answer["id"] == 14 and "verdict" in answer:
            answer["verdict"] = "cancelled"


@spoil("fault that never came", "a kind of fault was left out")
def _(scene: Scene) -> None:
    scene.kinds_of_faults.append("redis-evict")


@spoil("restore failed", "a restore failed with nothing in its way")
def _(scene: Scene) -> None:
    scene.fault("restores", NOON + 5, NOON + 6)
    scene.nemesis[-1]["code"] = 1


@spoil("worker ended by itself", "a worker ended unasked")
def _(scene: Scene) -> None:
    scene.nemesis.append({"what": "worker ended by itself", "at": NOON, "text": "worker-1, exit code 1"})


@spoil("client ended by itself", "a producer could not schedule")
def _(scene: Scene) -> None:
    scene.nemesis.append({"what": "client ended by itself", "at": NOON, "text": "producer-1, exit code 1"})


@spoil("toothless fault", "no reply was lost")
def _(scene: Scene) -> None:
    scene.nemesis.append({"what": "toothless fault", "at": NOON, "text": "lost-reply"})


@spoil("slow script", "a script kept Redis busy")
def _(scene: Scene) -> None:
    scene.nemesis.append({"what": "slow script", "at": NOON, "began": NOON, "ms": 60.0, "text": "60 ms"})


@spoil("growth", "a process opened more and more files")
def _(scene: Scene) -> None:
    for second in range(0, 100, 5):
        sample = {"what": "sample", "at": NOON + second, "process": 11, "memory": 50_000, "files": 30 + second}
        scene.nemesis.append(sample)


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
        connection.execute("DELETE FROM delayq_transition")
        connection.execute("DELETE FROM delayq_message")


def test_a_good_run_is_good_and_its_duplicates_are_named(
    tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good().write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith("GOOD")
    assert {"W1: effect twice 1", "W2: effect twice 3"} <= {" ".join(line.split()) for line in said.splitlines()}


def test_what_was_late_beside_poison_is_told_apart(
    tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = good()
    with_late_ones(scene, poison=999)
    scene.write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 0
    assert "after poison" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "spoil"), [pytest.param(k, s, id=f"{k}: {name}") for k, name, s in SPOILS])
def test_a_run_that_was_spoiled_is_called_by_its_name(
    kind: str, spoil: Spoil, tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = copy.deepcopy(good())
    spoil(scene)
    scene.write(tmp_path, dsn)

    assert oracle.main([str(tmp_path), "--dsn", dsn]) == 1
    said = capsys.readouterr().out
    number = re.search(rf"^  {kind} +(\d+)$", said, re.MULTILINE)
    assert number is not None, said
    assert int(number[1]) > 0, said


def test_every_kind_of_wrong_has_a_run_that_shows_it() -> None:
    assert {kind for kind, _name, _spoil in SPOILS} == set(oracle.KINDS)


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
