"""``python -m tests.torture [smoke|nightly|soak|apart] [--seed N] [--minutes M] [--only FAULT] [--cluster]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.workers import eventually
from tests.torture import oracle
from tests.torture.arena import Arena
from tests.torture.nemesis import Nemesis
from tests.torture.sizes import DELAYQ, LIFETIME, LIMITS, REPLACED, SIZES, Size

# Seconds that a message may be late after the fault is healed, by the kind of fault.
MARKS = {
    "quiet": 2.0,
    "child": 2.0,
    # A message that crashed twice runs alone in its process, which takes nothing until all that runs there has ended.
    # Several such messages may keep all processes from taking, some times in a row.
    "poison": DELAYQ["LEASE"] + 5.0,
    "worker": DELAYQ["LEASE"] + 5.0,
    "redis": 10.0,
    "database": 15.0,
    "push": 2 * DELAYQ["GRACE"] + 1.0,
}
# With no fault near, 99 of a hundred messages are at most so many seconds late.
STEADY = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES, nargs="?", default="smoke")
    parser.add_argument("--seed", default=None, help="which faults, when, and to whom (default: another each time)")
    parser.add_argument("--minutes", type=float, help="how long faults go on")
    parser.add_argument("--only", metavar="FAULT", action="append", default=[], help="only this fault (repeatable)")
    parser.add_argument("--keep", type=Path, help="leave journals, logs and a dump of the tables in this new folder")
    parser.add_argument("--cluster", action="store_true", help="with a Redis Cluster of 3 + 3 nodes, and its faults")
    given = parser.parse_args()
    seed = given.seed or str(random.randrange(10**6))
    size = SIZES[given.size]
    if given.minutes:
        size = dataclasses.replace(size, seconds=given.minutes * 60)
    if given.keep:
        given.keep.mkdir(parents=True)
        return torture(given.keep, given.size, size, seed, given.only, is_cluster=given.cluster)
    with tempfile.TemporaryDirectory(prefix="delayq-torture-") as folder:
        return torture(Path(folder), given.size, size, seed, given.only, is_cluster=given.cluster)


def torture(
    folder: Path, name: str, size: Size, seed: str, only: Sequence[str] = (), *, is_cluster: bool = False
) -> int:
    """Run the torture: break, heal, wait, and ask the oracle, whose exit code is returned."""
    began = time.time()
    print(f"torture {name}, seed {seed}", flush=True)
    with Arena(folder, seed, size, is_cluster=is_cluster) as arena:
        until = time.time() + size.seconds
        arena.begin(until)
        arena.rest(6)
        nemesis = Nemesis(arena, seed, only)
        nemesis.run(until)
        drained = drain(arena)
        run = {
            "seed": seed,
            "size": name,
            "seconds": time.time() - began,
            "until": until,
            "lease": DELAYQ["LEASE"],
            "marks": MARKS,
            "steady": STEADY,
            "replaced": REPLACED,
            "lifetime": LIFETIME,
            "limits": LIMITS,
            # On a slow machine a smoke has no time for all kinds.
            "kinds": [] if name == "smoke" else [*nemesis.faults],
        }
        (folder / "run.json").write_text(json.dumps(run))
        arena.dump()
        print(f"finished {drained:.1f} s after the last fault", flush=True)
        program = [sys.executable, oracle.__file__, str(folder), "--dsn", arena.postgres.url]
        code = subprocess.run(program, check=False).returncode
        print(f"{time.time() - began:.0f} s in all", flush=True)
        return code


def drain(arena: Arena) -> float:
    """Wait until everything is finished, and return the seconds. The oracle reports what never finished."""
    began = time.monotonic()
    for number in range(arena.size.producers):
        arena.others[f"producer {number}"].popen.wait(60)

    def done() -> bool:
        arena.tend()
        time.sleep(0.2)
        return arena.left() == 0

    try:
        eventually(done, "all is finished", timeout=arena.size.drain)
    except AssertionError as error:
        print(error, flush=True)
    arena.note_slow_scripts()
    # No process writes any more: the oracle's evidence is complete.
    arena.stop()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
