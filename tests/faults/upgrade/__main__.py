"""``python -m tests.faults.upgrade [MESSAGES]``: the trial on PostgreSQL with so many messages, or two million."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from testproject.servers import PostgresServer, RedisServer

from . import versions
from .trial import Trial

# All but one of twenty are finished: a table with its history.
FILL = "from benchmarks.growth_rows import fill; fill({finished}, {waiting}, names=2)"
SIZE = "SELECT count(*), pg_size_pretty(pg_total_relation_size('delayq_message')) FROM delayq_message"


def main(number: int) -> None:
    # As an operator has it: what is committed is on disk.
    with (
        PostgresServer(fsync=True, shared_buffers="256MB", max_wal_size="4GB") as postgres,
        RedisServer() as redis,
        tempfile.TemporaryDirectory() as name,
    ):
        environment = {"REDIS_URL": redis.url, "DATABASE_URL": postgres.url}
        folder = Path(name)
        old, new = versions.old(environment), versions.new(environment, folder / "new")
        old.call("migrate")
        waiting = number // 20
        old.call("shell", "-c", FILL.format(finished=number - waiting, waiting=waiting))
        trial = Trial(old, new, folder, postgres, folder / "none")
        rows, size = trial.ask(SIZE)[0]
        print(f"{rows:,} messages, {size} with indexes", flush=True)
        trial.run()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000)
