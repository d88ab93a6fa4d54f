"""The costs of a message: ``python -m benchmarks.profile [--rate 1000] [--seconds 10]``, or ``[--drain 100000]``.

Runs one worker process, and a sender that schedules one message at a time, each due 1 to 3 s later; or has the worker
drain messages that are due already. Prints the lateness; the CPU time of each process for each message; the statements
of PostgreSQL, where it has pg_stat_statements; the scripts of Redis by its own clock; and the functions in which the
worker spent its time, where py-spy is installed.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis as redis_client
from psycopg import Connection

from testproject.servers import PostgresServer, RedisServer, ServerFailed

from . import driver, recovery
from .measures import quantile
from .own_servers import own_servers
from .peers.adapter_process import MARK, AdapterCalls, Mark

EXTENSION = "pg_stat_statements"
MAX_DELAY_SECONDS = 3.0
# Functions in the table, and samples of the interpreter in a second.
FUNCTIONS, SAMPLES_PER_SECOND = 20, 500

STATEMENTS = """
SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 64), calls / %(messages)s::float, mean_exec_time * 1000,
       total_exec_time * 1000 / %(messages)s, rows::float / calls, wal_bytes::float / %(messages)s
  FROM pg_stat_statements WHERE total_exec_time > 0 ORDER BY total_exec_time DESC LIMIT 6
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1000, help="messages a second")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--drain", type=int, metavar="N", help="drain N messages that are due, instead of a steady flow"
    )
    arguments = parser.parse_args()
    with (
        own_servers(**driver.POSTGRES_SETTINGS, **_extension()) as (redis, postgres),
        tempfile.TemporaryDirectory(prefix="delayq-profile-") as directory,
    ):
        _profile(redis, postgres, Path(directory), arguments.rate, arguments.seconds, arguments.drain)


def _extension() -> dict[str, str]:
    """Return the setting for pg_stat_statements if a server starts with it: some builds lack it."""
    try:
        with PostgresServer(shared_preload_libraries=EXTENSION):
            return {"shared_preload_libraries": EXTENSION}
    except ServerFailed:
        return {}


def _profile(
    redis: RedisServer, postgres: PostgresServer, directory: Path, rate: float, seconds: float, drain: int | None
) -> None:
    from django_delayq import pause_queue, resume_queue

    from . import ours

    marks, client = directory / "marks", redis_client.Redis.from_url(redis.url)
    os.environ["BENCH_MARKS"] = str(marks)
    ours.ready()
    with Connection.connect(postgres.url, autocommit=True) as connection, recovery.worker("--processes", "1") as worker:
        ours.send({"n": 0, "due": 0.0}, None)
        driver.wait(marks.exists, driver.START_SECONDS)
        extended = connection.execute("SHOW shared_preload_libraries").fetchone() == (EXTENSION,)
        if extended:
            connection.execute("CREATE EXTENSION pg_stat_statements")
            connection.execute("SELECT pg_stat_statements_reset()")
        if drain:
            pause_queue("default")
            AdapterCalls(ours).schedule_bulk(drain, 0)
            connection.execute("ANALYZE delayq_message, delayq_log")
            if extended:
                connection.execute("SELECT pg_stat_statements_reset()")
        client.config_resetstat()
        client.config_set("slowlog-log-slower-than", 1000)
        client.slowlog_reset()
        before = _cpu(worker, redis, postgres)
        with _sampled(worker, directory / "samples", seconds + MAX_DELAY_SECONDS) as samples:
            if drain:
                sent = drain
                resume_queue("default")
            else:
                sent = int(AdapterCalls(ours).late(rate, seconds, MAX_DELAY_SECONDS)["sent"])
            driver.wait(lambda: marks.stat().st_size // MARK.size > sent, driver.START_SECONDS)
            driver.wait(ours.all_recorded, driver.START_SECONDS)
        after = _cpu(worker, redis, postgres)
        late = sorted((m.at - m.due) * 1000 for m in map(Mark._make, MARK.iter_unpack(marks.read_bytes())) if m.number)
        print(f"{sent} messages, drained") if drain else print(
            f"{sent} messages at {rate:g}/s, late by {quantile(late, 0.5):.2f} ms (median), {quantile(late, 0.99):.2f}"
        )
        _table(["CPU", "µs a message"], [[name, (after[name] - before[name]) * 1e6 / sent] for name in after])
        if extended:
            head = ["statement", "a message", "µs each", "µs a message", "rows", "B of WAL a message"]
            _table(head, connection.execute(STATEMENTS, {"messages": sent}).fetchall())
        stats = client.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): found for name, found in stats.items()}
        rows = [[name, calls[name]["calls"] / sent, calls[name]["usec_per_call"]] for name in calls if name != "info"]
        _table(["Redis", "a message", "µs each"], sorted(rows, key=lambda row: -row[1] * row[2])[:6])
        print(f"scripts of more than 1 ms (SLOWLOG): {len(client.slowlog_get(100))}\n")
        if samples.exists():
            _functions(samples.read_text().splitlines(), sent, after["worker"] - before["worker"])


def _cpu(worker: subprocess.Popen[bytes], *servers: RedisServer | PostgresServer) -> dict[str, float]:
    """Return the CPU seconds so far by process."""
    return {
        "sender": time.process_time(),
        "worker": driver.cpu_seconds(worker.pid),
        **{type(server).__name__.removesuffix("Server"): driver.server_cpu_seconds(server) for server in servers},
    }


@contextmanager
def _sampled(worker: subprocess.Popen[bytes], file: Path, seconds: float) -> Iterator[Path]:
    """Sample the worker's interpreter some hundred times a second, into a file."""
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not Path(program).exists():
        yield file
        return
    options = [
        "--gil",
        "--subprocesses",
        "--format",
        "raw",
        "--rate",
        str(SAMPLES_PER_SECOND),
        "--duration",
        str(int(seconds)),
    ]
    command = [program, "record", *options, "--output", str(file), "--pid", str(worker.pid)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        yield file


def _functions(lines: Iterable[str], messages: int, cpu: float) -> None:
    """Print the shares of the innermost functions; the samples cover all of the worker's time."""
    inner: collections.Counter[str] = collections.Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        inner[stack.split(";")[-1].rpartition(":")[0] + ")"] += int(count)
    total = sum(inner.values())
    rows = [[name, 100 * count / total, cpu * 1e6 / messages * count / total] for name, count in inner.most_common()]
    _table(["the worker's interpreter was in", "%", "µs a message"], rows[:FUNCTIONS])


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"{head[0]:<66}" + "".join(f"{name:>20}" for name in head[1:]))
    for name, *figures in rows:
        print(f"{name!s:<66}" + "".join(f"{figure:>20.2f}" for figure in figures))
    print()


if __name__ == "__main__":
    main()
