"""Tests of the counts of worker processes: how they are made, written to the rollups and compacted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.db.models import Sum
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.console.console_tuning import tuning
from django_delayq.console.models import Rollup
from django_delayq.console.operations.lifecycle import OperationRunner
from django_delayq.console.statistics import rollups, throughput
from django_delayq.console.statistics.rollups import (
    HOUR_SECONDS,
    MINUTE_SECONDS,
    RollupCompactor,
    RollupWriter,
    UnwrittenCounts,
)
from django_delayq.console.statistics.throughput import RollupSum
from django_delayq.core.outcomes import Ack, GiveUp, Release, Retry
from django_delayq.core.states import State
from django_delayq.extensions import WorkerExtensions
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.record import reads
from django_delayq.record.sql.rows import Claimed, Moved
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.recorder import Recorder
from tests.support import steps
from tests.support.workers import Worker, eventually

DB = "default"
AT = datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)

pytestmark = pytest.mark.django_db


class Counted(NamedTuple):
    """What the counts read of a message."""

    queue: str
    topic: str
    id: int = 1
    runtime: float = 0.0


def claimed(late_ms: float, *, deliveries: int = 1, topic: str = "t.a", queue: str = "default") -> Claimed:
    due = AT - timedelta(milliseconds=late_ms)
    return Claimed(1, topic, queue, None, 0, None, {}, due, None, None, None, 0, deliveries, 0, 0, AT)


def totals(**where: Any) -> dict[str, int]:
    """Return the sums of all columns that are not 0."""
    found = Rollup.objects.filter(**where).aggregate(**{name: Sum(name) for name in Rollup.COUNTS})
    return {name: number for name, number in found.items() if number}


def store(at: datetime, topic: str = "t.a", seconds: int = MINUTE_SECONDS, **counts: int) -> None:
    Rollup.objects.create(at=at, seconds=seconds, queue="default", topic=topic, **counts)


# --- counting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late_ms", "column"),
    [
        (-3, "late_1"),
        (0, "late_1"),
        (1, "late_1"),
        (1.5, "late_2"),
        (50, "late_50"),
        (51, "late_100"),
        (60_000, "late_60000"),
        (600_000, "late_600000"),
        (600_001, "late_more"),
    ],
)
def test_lateness_falls_into_the_smallest_class_that_holds_it(late_ms: float, column: str) -> None:
    counts = UnwrittenCounts()
    counts.claimed([claimed(late_ms)])
    rollups.write(DB, counts.drain())
    assert totals() == {column: 1}
    assert Rollup.objects.get().at == AT.replace(second=0)


@pytest.mark.parametrize(
    ("ms", "column"),
    [(0, "run_1"), (1, "run_1"), (1.5, "run_2"), (199, "run_200"), (600_000, "run_600000"), (600_001, "run_more")],
)
def test_a_run_time_falls_into_the_smallest_class_that_holds_it(ms: float, column: str) -> None:
    counts = UnwrittenCounts()
    counts.handled([Counted("default", "t.a", runtime=ms / 1000)] * 2)
    rollups.write(DB, counts.drain())
    expected = {column: 2, "run_us": round(2000 * ms)} if ms else {column: 2}
    assert totals() == pytest.approx(expected)


def test_run_times_are_told_by_their_classes_and_by_their_mean() -> None:
    seen = RollupSum(consumed=4, run_5=3, run_1000=1, run_us=812_000)
    assert (seen.runtime(50), seen.runtime(95), seen.mean_runtime) == (0.005, 1.0, 0.203)


def test_run_times_that_nobody_counted_are_not_known() -> None:
    """An older worker inserts and adds beside a newer one: it names no column of run times."""
    store(AT, consumed=3, late_5=3)
    older = [str(field.column) for field in Rollup._meta.concrete_fields if not field.name.startswith("run_")]
    values = ", ".join("'t.b'" if name == "topic" else name for name in older)
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO delayq_rollup ({', '.join(older)}) SELECT {values} FROM delayq_rollup")
    (old,) = [counts for topic, counts in throughput._sums(DB, ("topic",), AT) if topic == "t.b"]
    assert (old["consumed"], old.runtime(95), old.mean_runtime) == (3, None, None)
    counts = UnwrittenCounts()
    counts.handled([Counted("default", "t.b", runtime=0.002)])
    rollups.write(DB, {key._replace(at=AT): number for key, number in counts.drain().items()})
    RollupCompactor(DB).compact(10)
    assert totals(topic="t.b", seconds=HOUR_SECONDS) == {"consumed": 3, "late_5": 3, "run_2": 1, "run_us": 2000}


def test_only_first_deliveries_have_a_lateness_and_ends_without_a_report_are_counted() -> None:
    counts = UnwrittenCounts()
    counts.claimed([claimed(5, deliveries=2)])
    assert not counts.drain()
    counts.moved([Moved(1, "t.a", "default", 0, state, AT, 1) for state in State if state != State.RUNNING])
    rollups.write(DB, counts.drain())
    assert totals() == {"dead": 1, "expired": 1}


@pytest.mark.django_db(transaction=True)
def test_the_recorder_counts_each_outcome_once() -> None:
    extensions = WorkerExtensions(DB, "w")
    recorder = Recorder(DB, extensions)
    for outcome in (Ack(), Retry(timedelta(0), "no"), Retry(timedelta(0), "", counts=False), GiveUp("no")):
        recorder.submit(_delivery(), outcome, "worker:a")
    recorder.submit(_delivery(), Release("shutdown"), "worker:a")
    recorder.submit(_delivery(lost=True), Ack(), "worker:a")
    recorder.start()
    recorder.stop()
    recorder.join(60)
    extensions.stop()
    assert totals() == {"consumed": 1, "retried": 1, "dead": 1}


def _delivery(*, lost: bool = False) -> Delivery:
    row = steps.claimed()
    if lost:
        steps.succeed(row.id)
    return Delivery(row, next(iter(registry.handlers().values())), DB)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_written_counts_are_added_to_the_rollups_in_one_statement_or_several() -> None:
    topics = tuning.rollup_batch + 7
    for number in (1, 2):
        counts = UnwrittenCounts()
        counts.ended("consumed", [Counted("default", "t.a")] * number)
        counts.ended("dead", [Counted("other", f"t.{place}") for place in range(topics)])
        rollups.write(DB, counts.drain())
    assert totals(queue="default") == {"consumed": 3}
    assert totals(queue="other") == {"dead": 2 * topics}


def test_an_idle_process_issues_no_statement(django_assert_num_queries: Any) -> None:
    writer = RollupWriter(DB, UnwrittenCounts())
    with django_assert_num_queries(0):
        assert writer.tick() == tuning.rollup_interval


def test_counts_that_the_database_refuses_are_kept_and_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = UnwrittenCounts()
    writer = RollupWriter(DB, counts)
    counts.ended("consumed", [Counted("default", "t.a")])
    real = rollups.write

    def refuse(using: str, rows: Any) -> None:
        # The process goes on counting meanwhile.
        counts.ended("consumed", [Counted("default", "t.a"), Counted("default", "t.b")])
        raise OperationalError("away")

    monkeypatch.setattr(rollups, "write", refuse)
    with pytest.raises(DatabaseError):
        writer.tick()
    monkeypatch.setattr(rollups, "write", real)
    writer.tick()
    assert totals(topic="t.a") == {"consumed": 2}
    assert totals(topic="t.b") == {"consumed": 1}
    assert not counts.drain()


def test_unwritten_counts_do_not_grow_without_end() -> None:
    counts = UnwrittenCounts(most=2)
    counts.ended("consumed", [Counted("default", f"t.{number}") for number in (1, 2, 3, 1)])
    assert sorted(key.topic for key in counts.drain()) == ["t.1", "t.2"]


# --- compacting -------------------------------------------------------------------------------------------------------


def hours_ago(hours: float) -> datetime:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=hours)


def test_old_minutes_become_hours_with_the_same_sums_and_old_hours_are_deleted() -> None:
    old, older, young = hours_ago(60), hours_ago(61), hours_ago(40)
    for minute in range(3):
        store(old + timedelta(minutes=minute), consumed=minute + 1, late_5=2)
        store(old + timedelta(minutes=minute), topic="t.b", dead=1)
    store(older + timedelta(minutes=59), retried=4)
    store(old, seconds=HOUR_SECONDS, consumed=10)
    store(young, consumed=5)
    store(hours_ago(89 * 24), seconds=HOUR_SECONDS, consumed=2)
    before = totals()
    store(hours_ago(91 * 24), seconds=HOUR_SECONDS, consumed=7)

    RollupCompactor(DB).tick()

    assert totals() == before
    assert totals(seconds=MINUTE_SECONDS) == {"consumed": 5}
    assert totals(seconds=HOUR_SECONDS, at=old, topic="t.a") == {"consumed": 16, "late_5": 6}
    assert totals(seconds=HOUR_SECONDS, at=old, topic="t.b") == {"dead": 3}
    assert totals(seconds=HOUR_SECONDS, at=older) == {"retried": 4}


def test_compaction_goes_on_in_batches_and_looks_cheaply(django_assert_max_num_queries: Any) -> None:
    for hour in range(3):
        store(hours_ago(60 + hour), consumed=1)
    assert RollupCompactor(DB).compact(2) is True
    assert Rollup.objects.filter(seconds=MINUTE_SECONDS).count() == 1
    assert RollupCompactor(DB).compact(2) is False
    assert totals(seconds=HOUR_SECONDS) == {"consumed": 3}
    store(hours_ago(1), consumed=1)
    with django_assert_max_num_queries(4):
        RollupCompactor(DB).compact(10)


def test_an_hour_is_compacted_when_all_of_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    store(AT.replace(minute=1, second=0), consumed=1)
    for minutes, kept in ((-1, True), (0, False)):
        now = AT.replace(minute=0, second=0) + timedelta(days=2, hours=1, minutes=minutes)
        monkeypatch.setattr(reads, "now", lambda using, now=now: now)
        assert RollupCompactor(DB).compact(10) is False
        assert Rollup.objects.filter(seconds=MINUTE_SECONDS).exists() is kept
    assert totals(seconds=HOUR_SECONDS) == {"consumed": 1}


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_stops_in_order_has_written_all_counts() -> None:
    ids = [schedule_message("t.ok", delay=0).pk for _ in range(5)]
    with Worker("--processes", "1") as worker:
        eventually(lambda: Message.objects.filter(pk__in=ids, state=State.CONSUMED).count() == 5)
        assert worker.stop() == 0
    found = totals(topic="t.ok")
    assert found.pop("consumed") == 5
    assert found.pop("run_us") > 0
    assert sum(number for name, number in found.items() if name in Rollup.LATENESS) == 5
    assert sum(number for name, number in found.items() if name in Rollup.RUNTIME) == 5


def test_ending_without_a_database_is_quiet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any) -> None:
        raise OperationalError("gone")

    extensions = WorkerExtensions(DB, "host/1")
    extensions.services(frozenset({"operator"}))
    monkeypatch.setattr(RollupWriter, "tick", refuse)
    monkeypatch.setattr(OperationRunner, "release", refuse)
    with caplog.at_level("DEBUG", "django_delayq"):
        extensions.stop()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
