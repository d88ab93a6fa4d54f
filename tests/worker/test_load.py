"""A worker under load: thousands of deliveries leave nothing behind in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from django.db import connection

from django_delayq import schedule_messages
from django_delayq.core.states import State
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import states
from tests.support.redis_servers import of
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


def _open_files(pid: int) -> Iterator[str]:
    for place in Path(f"/proc/{pid}/fd").iterdir():
        # The file may be closed meanwhile.
        with suppress(OSError):
            yield os.readlink(place)


class Footprint:
    """The resources of a worker, as /proc and the servers report them."""

    def __init__(self, worker: Worker, server: RedisServer) -> None:
        pids = [worker.pid, *worker.children]
        files = [name for pid in pids for name in _open_files(pid)]
        self.descriptors = sum(not name.startswith(str(connection.settings_dict["NAME"])) for name in files)
        self.threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
        self.memory = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        self.children = sorted(worker.children)
        with of(server) as client:
            self.redis = len(client.client_list())
        self.database = files.count(str(connection.settings_dict["NAME"]))
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND backend_type = 'client backend'"
                )
                self.database = cursor.fetchone()[0]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_thousands_of_deliveries_leave_nothing_behind_in_the_worker(start: Start, configure: Configure) -> None:
    with RedisServer() as server:
        configure(REDIS=server.url)
        worker = start("--threads", "4")
        worker.wait_for("Loaded Redis")
        done = deliver(1500, 0)
        before = Footprint(worker, server)
        for _round in range(3):
            done = deliver(1000, done)
        after = Footprint(worker, server)
        worker.stop()
    assert after.children == before.children
    assert after.threads == before.threads
    # Two services that ask Redis at the same moment for the first time open another connection; deliveries open none.
    assert after.descriptors <= before.descriptors + 2
    assert after.redis <= before.redis + 2
    # The thread of the operations connects for a moment every few seconds. A thread that uses SQLite for the first time
    # opens two files.
    assert after.database <= before.database + 1
    # SQLite fills its page caches, 2 MB for each connection, as the file grows.
    growth = 1.05 if connection.vendor == "postgresql" else 1.15
    assert after.memory <= before.memory * growth, (before.memory, after.memory)


def deliver(number: int, done: int) -> int:
    """Schedule messages of several topics, and wait until all are delivered."""
    topics = ["t.ok"] * 6 + ["t.tx"] * 2 + ["t.second_time", "t.async"]
    schedule_messages({"topic": topics[n % 10], "delay": n / number} for n in range(number))
    eventually(lambda: states()[State.CONSUMED] == done + number, "all are delivered")
    return done + number
