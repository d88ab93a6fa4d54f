"""The course of an upgrade and of the way back, with what must be true at each step."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from testproject.servers import PostgresServer
from tests.support.workers import Worker, eventually

from .versions import LONG, Version

LAST = "SELECT coalesce(max(id), 0) FROM delayq_message"
# In a table that is large from the beginning.
SCHEDULED = "SELECT count(*) FROM delayq_message WHERE id > {} AND topic = 'upgrade.order'"
DELIVERED = "SELECT count(*) FROM tests_app_effect"
# Which version delivered what which version had scheduled.
PAIRS = """
SELECT DISTINCT m.payload ->> 'by', e.note FROM delayq_message m JOIN tests_app_effect e ON e.message_id = m.id
 WHERE m.topic = 'upgrade.order'
"""
BY_ANOTHER = "SELECT count(*) FROM tests_app_effect WHERE note = 'again'"
UNDELIVERED = "SELECT count(*) FROM delayq_message WHERE id > {} AND topic = 'upgrade.order' AND state <> 'consumed'"
NEWS = "SELECT state FROM delayq_message WHERE id > {} AND topic = 'upgrade.news'"
BUILD_WAITS = """
SELECT count(*) FROM pg_stat_activity
 WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND wait_event_type = 'Lock'
"""
END_BUILD = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%'"
UNUSABLE = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"
# Effects that must be there before a step counts as survived.
SOME = 40


class Trial:
    """Two versions on one database. ``server`` is its PostgreSQL; None: it is the SQLite file ``path``."""

    # The last migration of the old version.
    back = "0004"

    def __init__(self, old: Version, new: Version, folder: Path, server: PostgresServer | None, path: Path) -> None:
        self.old, self.new = old, new
        self._folder = folder
        self._server = server
        self._path = path
        # What must be running for as long as something is waited for.
        self._running: list[Worker] = []
        self._first = self.count(LAST)
        # When the step began, by the monotonic clock.
        self._since = time.monotonic()

    def ask(self, sql: str) -> list[Any]:
        """Run a statement on the database, and return its rows."""
        if self._server:
            with psycopg.connect(self._server.url, autocommit=True) as connection:
                return connection.execute(sql.encode()).fetchall()
        with closing(sqlite3.connect(self._path, timeout=20)) as file:
            return file.execute(sql).fetchall()

    def _say(self, done: str) -> None:
        """Print what was done, how long it took, and the longest round of calls of a producer meanwhile."""
        calls = [line.split() for path in self._folder.glob("*.calls") for line in path.read_text().splitlines()]
        took = [float(call[1]) for call in calls if len(call) == 2 and float(call[0]) + float(call[1]) > self._since]
        now = time.monotonic()
        print(
            f"{done}: {now - self._since:.1f} s, longest round of a producer {max(took, default=0):.2f} s", flush=True
        )
        self._since = now

    def count(self, sql: str) -> int:
        return int(self.ask(sql)[0][0])

    # --- the course ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Go the whole way, and print a line for each step."""
        with self._started(self.old) as (worker, producer):
            self.goes_on("the old version alone")
            self._say("the old version alone")
            self.migrate()
            self.run_both(worker)
            self._migrate("delayq", self.back)
            self._say("migrated back")
            self.goes_on("the old version after the way back")
            self._end_producer(self.old, producer)
            self._until(lambda: self.count(UNDELIVERED.format(self._first)) == 0, "everything is delivered")
            self._end_worker(worker)
        self._judge()
        self._say("nothing was lost, nothing was done twice")

    def migrate(self) -> None:
        """Migrate while the old version works. On PostgreSQL somebody reads a table at first, and will not end."""
        if self._server:
            self._meet_a_long_reader()
        self._migrate()
        self._say("built the index")
        assert "No changes" in self.new.call("makemigrations", "--check", "--dry-run", "delayq")
        self.goes_on("the old version on the new tables")

    def _migrate(self, *arguments: str) -> None:
        """Migrate, and again where the table was in use for too long, as an operator does. Print the time of each."""
        while True:
            with self.new.command("migrate", "--verbosity", "2", *arguments) as process:
                if process.wait(LONG) == 0:
                    print(
                        *re.findall(r"^ *((?:Una|A)pplying delayq\..*)", process.log, re.MULTILINE),
                        sep="\n",
                        flush=True,
                    )
                    return
                assert "lock timeout" in process.log, process.log

    def _meet_a_long_reader(self) -> None:
        with self._reader(), self.new.command("migrate", "delayq", "0005") as refused:
            assert refused.wait() == 1
            assert "lock timeout" in refused.log, refused.log
            self.goes_on("the column could not be added while somebody reads")
        self._say("gave up adding the column while somebody reads")
        self._migrate("delayq", "0005")
        self._say("added the column")
        with self._reader(), self.new.command("migrate", "delayq") as broken:
            self._until(lambda: self.count(BUILD_WAITS) > 0, "the index waits for the reader")
            self.goes_on("the index is being built")
            self.ask(END_BUILD)
            assert broken.wait() == 1
        assert self.count(UNUSABLE) == 1
        self._say("broke off the build of the index")

    @contextmanager
    def _reader(self) -> Iterator[None]:
        """A transaction that has read the messages and stays open, as an export does."""
        assert self._server
        with psycopg.connect(self._server.url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT id FROM delayq_message LIMIT 1")
            yield

    def run_both(self, old_worker: Worker) -> None:
        """Have both versions schedule and deliver; then the new one goes away, and its topic stays."""
        with self._started(self.new) as (worker, producer):
            everybody = {(by, to) for by in ("old", "new") for to in ("old", "new")}
            self._until(
                lambda: {tuple(row) for row in self.ask(PAIRS)} == everybody, "each delivers what both schedule"
            )
            self._say("each version delivered what both had scheduled")
            self._end_producer(self.new, producer)
            self._end_worker(worker)
        self.new.call("shell", "-c", "from django_delayq import *; schedule_message('upgrade.news', {}, delay=0)")
        old_worker.wait_for("No handler for topic upgrade.news here; its messages are left for another worker")
        with replace(self.old, name="again").worker() as another:
            self._until(lambda: self.count(BY_ANOTHER) > SOME, "an old worker started on the new tables delivers")
            self._end_worker(another)
        self._say("the new version stopped, and old workers went on")
        assert "upgrade.news" in self._check()

    def _check(self) -> str:
        with self.old.command("delayq_check") as process:
            process.wait()
            return process.log

    def goes_on(self, when: str) -> None:
        """Wait until more was scheduled and more was delivered than now."""
        scheduled, delivered = self.count(SCHEDULED.format(self._first)) + SOME, self.count(DELIVERED) + SOME
        self._until(lambda: self.count(SCHEDULED.format(self._first)) > scheduled, f"more is scheduled: {when}")
        self._until(lambda: self.count(DELIVERED) > delivered, f"more is delivered: {when}")

    # --- its processes ------------------------------------------------------------------------------------------------

    @contextmanager
    def _started(self, version: Version) -> Iterator[tuple[Worker, Worker]]:
        """Start a worker and a producer."""
        with version.worker() as worker, version.producer(self._folder) as producer:
            self._running += [worker, producer]
            yield worker, producer

    def _until(self, look: Callable[[], bool], what: str) -> None:
        """Wait until it is true. A process that ends meanwhile ends the waiting."""

        def looked() -> bool:
            ended = [process.log for process in self._running if process.process.poll() is not None]
            assert ended == [], f"ended before {what}:\n" + "\n".join(ended)
            return look()

        eventually(looked, what)

    def _end_producer(self, version: Version, producer: Worker) -> None:
        self._running.remove(producer)
        (self._folder / f"{version.name}.stop").touch()
        assert producer.wait() == 0, producer.log

    def _end_worker(self, worker: Worker) -> None:
        """Stop a worker. Nothing failed in it."""
        self._running = [other for other in self._running if other is not worker]
        assert worker.stop() == 0, worker.log
        assert not re.search("ERROR|CRITICAL|Traceback", worker.log), worker.log

    # --- the end ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Every message that a producer was told of has one effect, and the new topic waits untouched."""
        told = {int(line) for name in ("old", "new") for line in (self._folder / f"{name}.ids").read_text().split()}
        effects = [row[0] for row in self.ask("SELECT message_id FROM tests_app_effect")]
        assert len(effects) == len(set(effects)), "something was done twice"
        assert told == set(effects), "something was lost, or was done that nobody scheduled"
        assert self.ask(NEWS.format(self._first)) == [("scheduled",)]


class ReleaseTrial(Trial):
    """The same with a version that was released, from its first migration to those of this checkout."""

    back = "0001"

    def migrate(self) -> None:
        self._migrate()
        self._say("migrated")
        self.goes_on("the old version on the new tables")
