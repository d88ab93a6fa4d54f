"""Breaks the code on purpose, once at a time, and tells which tests notice: ``python -m tests.mutation [NAME …]``.

It works on copies in a temporary folder. A mutant that survives is a hole in the tests. Exit code 1 when one does, 2
when a test fails without any.
"""

# ruff: noqa: E501, ISC004
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

HARNESSES = {
    "model": ["tests/model"],
    "directed": [
        "tests/record",
        "tests/broker",
        "tests/scripts",
        "tests/races",
        "tests/commands/test_restore.py",
        "tests/integration/test_early.py",
        "tests/integration/test_pause.py",
        "tests/integration/test_review.py",
    ],
    "processes": ["tests/acceptance/test_handlers.py", "tests/acceptance/test_redis_faults.py"],
}


class Mutant(NamedTuple):
    """One seeded bug: in each file, a text that stands there once and what to put in its place."""

    name: str
    edits: list[tuple[str, str, str]]


SQL = "django_delayq/sql/postgresql.py"
MOVES = "django_delayq/transitions.py"
LUA = "django_delayq/broker/scripts"
WORKER = "django_delayq/worker"

MUTANTS = [
    Mutant(
        "claim without a look at the state",
        [
            (
                SQL,
                "WHERE {IS_SCHEDULED}\n       AND m.due_at <=",
                "WHERE m.state IN ('scheduled', 'running')\n       AND m.due_at <=",
            )
        ],
    ),
    Mutant("reaper that ignores the lease", [(MOVES, "leased_until__lt=now(using)", "leased_until__isnull=False")]),
    Mutant(
        "failure without a fence",
        [
            (
                SQL,
                "WHERE {IS_RUNNING} AND m.deliveries = o.delivery\n     ORDER BY m.id\n       FOR NO KEY UPDATE OF m\n), u",
                "WHERE {IS_RUNNING}\n     ORDER BY m.id\n       FOR NO KEY UPDATE OF m\n), u",
            )
        ],
    ),
    Mutant("success without a guard", [(SQL, "WHERE m.state IN ('running', 'scheduled')\n     ORDER", "ORDER")]),
    Mutant(
        "sweeper that starts at a cursor",
        [(f"{WORKER}/sweeper.py", "            state.low = None\n", "            state.low = overdue_since\n")],
    ),
    Mutant(
        "horizon advanced after the query",
        [
            (f"{LUA}/load.lua", '"replid", replid, "horizon", string.format("%.0f", horizon),', '"replid", replid,'),
            (
                f"{LUA}/loaded.lua",
                'redis.call("HSET", meta, "loaded", upto)',
                'redis.call("HSET", meta, "loaded", upto, "horizon", upto)',
            ),
        ],
    ),
    Mutant(
        "restore that clears first",
        [
            (
                "django_delayq/restore/engine.py",
                "        horizon, loading = self._horizons[queue], False\n",
                "        horizon, loading = self._horizons[queue], False\n"
                "        k = self.broker.keys(queue)\n"
                "        self.broker.client.delete(k.delayed, k.ready)\n",
            )
        ],
    ),
    Mutant(
        "cancel without a condition",
        [
            (
                MOVES,
                "    if message.state == State.SCHEDULED:\n",
                "    if message.state in LIVE:\n",
            )
        ],
    ),
    Mutant(
        "record before the effect",
        [
            (
                f"{WORKER}/executor.py",
                "    if not delivery.handler.transactional:\n        _call(delivery)\n        return Ack()\n",
                "    if not delivery.handler.transactional:\n"
                "        transitions.succeed(delivery.using, [Success(delivery.id, delivery.deliveries, actor)])\n"
                "        _call(delivery)\n"
                "        return Ack()\n",
            )
        ],
    ),
    Mutant(
        "reschedule that keeps the old score",
        [
            (
                f"{LUA}/put.lua",
                'redis.call("ZADD", delayed, score, id)\n      put = put + 1',
                'redis.call("ZADD", delayed, "NX", score, id)\n      put = put + 1',
            )
        ],
    ),
    Mutant(
        "fill that replaces an earlier place",
        [(f"{LUA}/put.lua", '"LT", "CH", score, id', '"CH", score, id')],
    ),
    Mutant(
        "loader that ignores another run of the server",
        [
            (
                f"{WORKER}/loader.py",
                "ours = (meta.run_id, meta.replid) == (server.run_id, server.replid)",
                "ours = True",
            )
        ],
    ),
    Mutant(
        "claim in spite of a pause",
        [(SQL, "       AND m.queue NOT IN ({PAUSED})\n     ORDER BY m.id", "     ORDER BY m.id")],
    ),
    Mutant(
        "handler begun after its lease",
        [(f"{WORKER}/delivery.py", "if self.started_mono - self.leased_mono > self.handler.lease:", "if False:")],
    ),
    Mutant(
        "put before the commit",
        [("django_delayq/publisher.py", "    if not connection.in_atomic_block:\n", "    if True:\n")],
    ),
    Mutant(
        "shutdown that costs an attempt",
        [(f"{WORKER}/recorder.py", "outcome.delay, counts=False, reason", "outcome.delay, reason")],
    ),
    Mutant(
        "due times rounded down",
        [("django_delayq/clock.py", "return -(-us // 100)", "return us // 100 - 1")],
    ),
    Mutant(
        "handler that begins with its claim",
        [(f"{WORKER}/claim_ahead.py", "or delivery.due_mono <= delivery.queued_mono:", "or True:")],
    ),
    Mutant("mover that is a second early", [(f"{LUA}/take.lua", '"%.0f", now + 1)', '"%.0f", now + 10001)')]),
    Mutant(
        "crashes without a limit",
        [(MOVES, "        if crashes >= max_crashes:\n", "        if crashes < 0:\n")],
    ),
    Mutant(
        "late success refused",
        [(SQL, "WHERE m.state IN ('running', 'scheduled')\n     ORDER", "WHERE m.state = 'running'\n     ORDER")],
    ),
]


# The code as it is. What notices it would notice anything.
CONTROL = Mutant("nothing", [])


def main() -> int:
    wanted = sys.argv[1:]
    survivors = 0
    print(f"{'mutant':<48}" + "".join(f"{name:>16}" for name in HARNESSES), flush=True)
    for mutant in [CONTROL, *(mutant for mutant in MUTANTS if not wanted or mutant.name in wanted)]:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "*.sqlite3*", "__pycache__"))
            apply(mutant, tree)
            verdicts = [run(tree, paths) for paths in HARNESSES.values()]
        print(f"{mutant.name:<48}" + "".join(f"{verdict.brief:>16}" for verdict in verdicts), flush=True)
        noticed = [test for verdict in verdicts for test in verdict.noticed]
        for test in noticed:
            print(f"    {test}", flush=True)
        if mutant is CONTROL and noticed:
            return 2
        survivors += not noticed and mutant is not CONTROL
    return int(survivors > 0)


def apply(mutant: Mutant, tree: Path) -> None:
    for name, old, new in mutant.edits:
        file = tree / name
        text = file.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: the text to replace stands {text.count(old)} times in {name}")
        file.write_text(text.replace(old, new))


class Verdict(NamedTuple):
    """What one harness said: the test that noticed, if one did, and after how many seconds."""

    noticed: list[str]
    seconds: float

    @property
    def brief(self) -> str:
        return f"{'caught' if self.noticed else '–'} {self.seconds:.0f} s"


def run(tree: Path, paths: list[str]) -> Verdict:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *paths]
    environment = {
        "DELAYQ_MODEL_EXAMPLES": "300",
        "DELAYQ_MODEL_QUICK": "1",
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(tree),
    }
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    noticed = [line.split(" - ")[0][:150] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not noticed:
        raise SystemExit(f"pytest ended with {done.returncode} and named no test:\n{done.stdout}{done.stderr}")
    return Verdict(noticed, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
