"""``python -m tests.faults.upgrade [MESSAGES] [--from FOLDER]``: the trial on PostgreSQL, with two million messages by
default; with the checkout of a release in FOLDER the upgrade from there to this checkout."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from testproject.servers import PostgresServer, RedisServer

from . import versions
from .trial import ReleaseTrial, Trial

# All but one of twenty are finished: a table with its history.
FILL = "from benchmarks.growth_rows import fill; fill({finished}, {waiting}, names=2)"
SIZE = "SELECT count(*), pg_size_pretty(pg_total_relation_size('delayq_message')) FROM delayq_message"


def main(number: int, release: Path | None) -> None:
    # As an operator has it: what is committed is on disk.
    with (
        PostgresServer(fsync=True, shared_buffers="256MB", max_wal_size="4GB") as postgres,
        RedisServer() as redis,
        tempfile.TemporaryDirectory() as name,
    ):
        environment = {"REDIS_URL": redis.url, "DATABASE_URL": postgres.url}
        folder = Path(name)
        if release is None:
            old, new, course = versions.old(environment), versions.new(environment, folder / "new"), Trial
        else:
            (old, new), course = versions.released(environment, release), ReleaseTrial
        old.call("migrate")
        waiting = number // 20
        old.call("shell", "-c", FILL.format(finished=number - waiting, waiting=waiting))
        trial = course(old, new, folder, postgres, folder / "none")
        rows, size = trial.ask(SIZE)[0]
        print(f"{rows:,} messages, {size} with indexes", flush=True)
        trial.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("messages", type=int, nargs="?", default=2_000_000)
    parser.add_argument("--from", type=Path, metavar="FOLDER", dest="release")
    arguments = parser.parse_args()
    main(arguments.messages, arguments.release)
