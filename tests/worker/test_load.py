"""Tests under load: 20,000 messages that are due at once, and thousands of deliveries by one worker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from django.db import connection

from django_delayq import schedule_messages
from django_delayq.broker.base import Entry
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import to_tenths
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.clocks import stopped_at
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.record_of import states
from tests.support.redis_servers import of
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

KEYS = keys("delayq", "default")
MANY = 20_000


@pytest.mark.skipif("DELAYQ_TIMED" not in os.environ, reason="asserts a time: with DELAYQ_TIMED, on a quiet machine")
def test_no_script_keeps_redis_for_10_ms_while_20000_are_due_at_once(configure: Configure) -> None:
    """Redis measures by its clock, which runs on while other processes run: the best of three rounds counts."""
    with RedisServer("--slowlog-log-slower-than", "10000", "--slowlog-max-len", "1000") as server, of(server) as client:
        configure(REDIS=server.url)
        for start in range(0, MANY, 10_000):
            schedule_messages({"topic": "t.ok", "delay": 100, "priority": n % 3} for n in range(start, start + 10_000))
        broker = RedisBroker(conf.get(), "default", timeout=5)
        entries = [Entry.at(m.pk, m.due_at, m.priority) for m in Message.objects.only("due_at", "priority")]
        last = max(to_tenths(entry.due_at) for entry in entries)
        slow: list[str] = []
        for _round in range(3):
            client.flushall()
            client.slowlog_reset()
            assert run("delayq_restore").code == 0
            assert client.zcard(KEYS.delayed) == MANY
            assert run("delayq_restore").code == 0
            assert take_all(broker, at=last) == MANY
            # The same for a backlog, whose ids become ready with the put.
            broker.now = stopped_at(last)
            broker.fill({"default": entries})
            assert take_all(broker, at=last) == MANY
            slow = [f"{entry['duration']} µs: {entry['command'][:60]!r}" for entry in client.slowlog_get(1000)]
            if not slow:
                break
        broker.close()
        assert not slow


def take_all(broker: RedisBroker, *, at: int) -> int:
    broker.now = stopped_at(at)
    taken: Counter[int] = Counter()
    while tickets := broker.take("default", 1000).tickets:
        taken.update(ticket.id for ticket in tickets)
    assert not taken or max(taken.values()) == 1
    return len(taken)


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
