"""The metrics of a worker: counts outlive its processes, gauges tell what there is, and labels are bounded."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection
from django.utils import timezone
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.registry import Collector

from django_delayq import pause_queue, schedule_message, schedule_messages
from django_delayq.contrib.prometheus import apps as prometheus_apps
from django_delayq.contrib.prometheus import counts, server
from django_delayq.contrib.prometheus.counts import Counting, SharedCounts
from django_delayq.contrib.prometheus.server import LOOK_INTERVAL, Gauges, MetricsServer, _listen
from django_delayq.core import bounds
from django_delayq.core.states import State
from django_delayq.management.commands import run_delayq
from django_delayq.models import Message, Worker
from django_delayq.project import conf
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Claimed, Moved
from testproject.servers import RedisServer
from tests.support.commands import run, schedule
from tests.support.forks import forked
from tests.support.limits import Declare, admit
from tests.support.metrics import Samples, samples, scrape
from tests.support.processes import Start
from tests.support.redis_cluster import lone_node
from tests.support.rows import unguarded
from tests.support.transactions import lock_table, make_snapshots_old, unfinished
from tests.support.workers import PATIENCE, eventually


def collected(collector: object) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    return samples(generate_latest(registry).decode())


class Large(Collector):
    """A metric of more bytes than the buffers of a connection hold."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("large", "x" * 30_000_000, value=1)


# --- a worker ---------------------------------------------------------------------------------------------------------

OK = "queue=default,topic=t.ok"


def test_a_file_of_metrics_that_a_process_has_just_made_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    file = tmp_path / "counter_1.db"
    file.touch()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            made = MmapedDict(str(file))
            made.write_value(mmap_key("own_total", "own_total", [], [], "An own count."), 7.0, 0.0)
            made.close()

    monkeypatch.setattr("django_delayq.contrib.prometheus.server.time.sleep", wait)
    assert collected(server.OwnMetrics()) == {"own_total": 7.0}
    assert len(waits) == 3
    (tmp_path / "counter_2.db").touch()
    with pytest.raises(struct.error):
        collected(server.OwnMetrics())


def test_the_counts_of_a_worker_outlive_its_processes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    worker = start("--processes", "2", "--metrics-port", "127.0.0.1:0")
    port = int(worker.wait_for(r"Metrics are served on port (\d+)")[1])
    children = worker.wait_for_children(2)
    assert scrape(port)[f"delayq_outcomes_total{{outcome=consumed,{OK}}}"] == 0

    schedule_messages([{"topic": "t.ok"}] * 20)
    schedule_messages([{"topic": "t.measured"}] * 10)
    schedule_message("t.reject")
    eventually(lambda: scrape(port).get("own_messages_total") == 10, "the project's own counts")
    # A process counts what it has committed: a gauge may be ahead of the counts.
    expected = {
        f"delayq_outcomes_total{{outcome=consumed,{OK}}}": 20,
        "delayq_outcomes_total{outcome=dead,queue=default,topic=t.reject}": 1,
        f"delayq_lateness_seconds_count{{{OK}}}": 20,
        f"delayq_runtime_seconds_count{{{OK}}}": 20,
        "delayq_dead_messages": 1,
    }

    def all_are_counted() -> bool:
        there = scrape(port)
        return {name: there.get(name) for name in expected} == expected

    eventually(all_are_counted, "the counts")
    for victim in children:
        os.kill(victim, signal.SIGKILL)
    worker.wait_for_children(2, other_than=children)
    found = scrape(port)
    assert found[f"delayq_outcomes_total{{outcome=consumed,{OK}}}"] == 20
    assert found["delayq_outcomes_total{outcome=dead,queue=default,topic=t.reject}"] == 1
    for histogram in ("lateness", "runtime"):
        assert found[f"delayq_{histogram}_seconds_count{{{OK}}}"] == 20
        assert found[f"delayq_{histogram}_seconds_bucket{{le=+Inf,{OK}}}"] == 20
        assert 0 < found[f"delayq_{histogram}_seconds_sum{{{OK}}}"] < 20 * 60

    schedule_messages([{"topic": "t.ok"}] * 5)
    eventually(lambda: scrape(port)[f"delayq_outcomes_total{{outcome=consumed,{OK}}}"] == 25, "the counts go on")
    assert scrape(port)["delayq_redis_up"] == 1
    # A client that says nothing keeps one process busy, and the other one answers.
    with socket.create_connection(("127.0.0.1", port)):
        assert scrape(port)["delayq_database_up"] == 1
    assert worker.stop() == 0


@pytest.mark.parametrize("sends", ["its request byte by byte", "its request, and reads no answer"])
def test_a_slow_client_is_dropped_at_its_deadline(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    sends: str,
) -> None:
    """A process accepts connections in their order, so that it would keep all others waiting."""
    registry = CollectorRegistry()
    registry.register(Large())
    # The client is gone before the pool waits for the server.
    with (
        ThreadPoolExecutor() as pool,
        _listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()[:2]) as slow,
    ):
        answered = pool.submit(MetricsServer(listener, registry, client_timeout=1.0).tick)

        def is_dropped() -> bool:
            if sends == "its request byte by byte":
                # No byte comes late, and the line has no end.
                slow.send(b"x")
            return answered.done()

        slow.sendall(b"GET /" if sends == "its request byte by byte" else b"GET /metrics HTTP/1.0\r\n\r\n")
        with suppress(ConnectionError):
            eventually(is_dropped, "the client is dropped")
        answered.result(PATIENCE)
    # What anybody may cause fills no log.
    assert capfd.readouterr().err == caplog.text == ""


def test_a_process_sleeps_while_nobody_asks_for_metrics() -> None:
    with _listen("127.0.0.1", 0) as listener:
        idle = MetricsServer(listener, CollectorRegistry())
        began = time.monotonic()
        idle.tick()
        # A busy machine makes it longer, and none shorter.
        assert time.monotonic() - began >= LOOK_INTERVAL / 2


@pytest.mark.django_db(transaction=True)
def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = run("run_delayq", "--processes", "1", "--metrics-port", address)
    assert ran.code == 1
    assert ran.err == f"--metrics-port: cannot listen on {address}: Address already in use"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_additions")
def test_the_option_without_its_app_is_refused_and_the_help_says_why() -> None:
    ran = run("run_delayq", "--metrics-port", "9808")
    assert (ran.code, "unrecognized arguments: --metrics-port 9808" in ran.err) == (1, True)
    text = run_delayq.Command().create_parser("manage.py", "run_delayq").format_help()
    assert "only while the app is in INSTALLED_APPS" in " ".join(text.split())


def test_once_takes_no_metrics_port() -> None:
    ran = run("run_delayq", "--once", "--metrics-port", "0")
    assert ran.code == 2
    assert ran.err == "--metrics-port: only for a worker that stays; leave out --once"


@pytest.mark.parametrize("text", ["", "x", "host", "host:", "65536", "-1", "[::1]"])
def test_a_wrong_address_is_a_usage_error(text: str) -> None:
    ran = run("run_delayq", f"--metrics-port={text}")
    assert f"not a port: {text!r}" in ran.err
    ran = run("run_delayq", f"--metrics-port={'ü' * 70}:9808")
    assert "--metrics-port: invalid address value" in ran.err


def test_addresses_are_read_with_and_without_a_host() -> None:
    assert prometheus_apps.address("9808") == ("", 9808)
    assert prometheus_apps.address("localhost:9808") == ("localhost", 9808)
    assert prometheus_apps.address("[::1]:9808") == ("::1", 9808)


def test_a_port_without_a_host_is_open_on_all_addresses() -> None:
    with _listen("", 0) as listener:
        for host in ("127.0.0.1", "::1") if listener.family == socket.AF_INET6 else ("127.0.0.1",):
            socket.create_connection((host, listener.getsockname()[1])).close()


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_apps, "find_spec", lambda name: None)
    with pytest.raises(ImproperlyConfigured, match=r"pip install 'django-delayq\[prometheus\]'"):
        apps.get_app_config("delayq_prometheus").ready()


# --- counts -----------------------------------------------------------------------------------------------------------


def counting(shared: SharedCounts) -> Counting:
    return Counting("default", "host/1/abc", shared)


ids = count(1)


def moved(topic: str = "t.ok", queue: str = "default", after: State = State.DEAD) -> Moved:
    return Moved(next(ids), topic, queue, 0, after, timezone.now(), 1)


def consume_one(shared: SharedCounts) -> bool:
    counting(shared).consumed([moved()])
    return True


def test_every_move_is_counted_by_its_outcome() -> None:
    shared = SharedCounts(1)
    process = counting(shared)

    def numbers() -> dict[str, float]:
        found = collected(shared)
        assert not any("_bucket" in name for name in found), "a topic that no message had has no histograms"
        return {name: found[f"delayq_outcomes_total{{outcome={name},{OK}}}"] for name in counts.OUTCOMES}

    assert numbers() == dict.fromkeys(counts.OUTCOMES, 0)
    process.consumed([moved(), moved()])
    process.retried([moved()])
    process.ended([moved(after=state) for state in (State.DEAD, State.CANCELLED, State.EXPIRED, State.SCHEDULED)])
    assert numbers() == {**dict.fromkeys(counts.OUTCOMES, 1), "consumed": 2}


def test_a_topic_without_a_handler_is_counted_as_other() -> None:
    shared = SharedCounts(1)
    counting(shared).ended([moved("from.elsewhere"), moved("from.nowhere")])
    found = collected(shared)
    assert found["delayq_outcomes_total{outcome=dead,queue=default,topic=other}"] == 2
    assert not any("topic=from." in name for name in found)


def test_queues_beyond_the_limit_are_counted_as_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedCounts(1)
    process = counting(shared)
    monkeypatch.setattr(counts, "MOST_QUEUES", len(process._queues) + 1)
    for queue in ("one", "two", "three", "one"):
        process.consumed([moved(queue=queue)])
    found = collected(shared)
    numbers = {
        name: found[f"delayq_outcomes_total{{outcome=consumed,queue={name},topic=t.ok}}"] for name in ("one", "other")
    }
    assert numbers == {"one": 2, "other": 2}


def test_a_full_slot_counts_the_rest_as_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedCounts(1)
    process = counting(shared)
    monkeypatch.setattr(counts, "MOST_ROWS", len(process._rows) + 2)
    for queue in ("one", "two", "three"):
        process.consumed([moved(queue=queue)])
    found = collected(shared)
    assert found["delayq_outcomes_total{outcome=consumed,queue=one,topic=t.ok}"] == 1
    assert found["delayq_outcomes_total{outcome=consumed,queue=other,topic=other}"] == 2


def test_lateness_is_that_of_first_deliveries_and_never_below_zero() -> None:
    shared = SharedCounts(1)
    now = timezone.now()

    def claimed(late: float, deliveries: int = 1) -> Claimed:
        due = now - timedelta(seconds=late)
        return Claimed(1, "t.ok", "default", None, 0, None, {}, due, None, None, None, 0, deliveries, 0, 0, now)

    counting(shared).claimed([claimed(-0.002), claimed(0.03), claimed(9000), claimed(7, deliveries=2)])
    found = collected(shared)
    buckets = {
        bound: found[f"delayq_lateness_seconds_bucket{{le={bound},{OK}}}"]
        for bound in ("0.005", "0.05", "1800.0", "+Inf")
    }
    assert buckets == {"0.005": 1, "0.05": 2, "1800.0": 2, "+Inf": 3}
    assert found[f"delayq_lateness_seconds_sum{{{OK}}}"] == pytest.approx(9000.03)


def test_a_process_goes_on_with_the_counts_of_one_that_was_killed() -> None:
    shared = SharedCounts(1)
    with forked(partial(consume_one, shared)):
        pass
    counting(shared).consumed([moved()])
    assert collected(shared)[f"delayq_outcomes_total{{outcome=consumed,{OK}}}"] == 2
    assert len([row for row in shared._slots[0].rows() if row.topic == "t.ok"]) == 1


def test_two_living_processes_count_in_different_slots() -> None:
    shared = SharedCounts(2)
    with forked(partial(consume_one, shared)):
        counting(shared).consumed([moved()])
    assert collected(shared)[f"delayq_outcomes_total{{outcome=consumed,{OK}}}"] == 2
    assert [bool([*slot.rows()]) for slot in shared._slots] == [True, True]


# --- gauges -----------------------------------------------------------------------------------------------------------

RECORD = pytest.mark.django_db(transaction=True)


@RECORD
@pytest.mark.usefixtures("puts_are_flushed", "redis_client")
def test_the_gauges_tell_what_is_in_the_record(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=60))
    declare("l.one", limit=1)
    limited = [schedule_message("l.one", queue="full") for _number in range(2)]
    unguarded(Message).filter(queue="full").update(due_at=timezone.now() - timedelta(seconds=3600))
    assert len(admit(*limited)) == 1
    schedule(3, due=600)
    schedule(2, due=-1, queue="mail")
    schedule(1, due=-100, queue="mail")
    transitions.give_up("default", schedule(2, due=600), reason="")
    pause_queue("slow")
    now = timezone.now()
    Worker.objects.create(name="w", host="h", pid=1, started_at=now, seen_at=now)
    found = collected(Gauges("default"))
    assert 95 < found.pop("delayq_oldest_overdue_age_seconds{queue=mail}") < 900
    assert 3595 < found.pop("delayq_oldest_limited_age_seconds{queue=full}") < 4500
    expected = {
        "delayq_database_up": 1,
        "delayq_scheduled_messages{queue=default}": 3,
        "delayq_scheduled_messages{queue=mail}": 3,
        "delayq_scheduled_messages{queue=full}": 1,
        "delayq_limited_messages{queue=full}": 1,
        "delayq_limited_messages{queue=mail}": 0,
        "delayq_oldest_limited_age_seconds{queue=mail}": 0,
        "delayq_ready_messages{queue=full}": 0,
        "delayq_ready_messages{queue=mail}": 2,
        "delayq_overdue_messages{queue=mail}": 1,
        "delayq_overdue_messages{queue=default}": 0,
        "delayq_overdue_messages{queue=full}": 0,
        "delayq_oldest_overdue_age_seconds{queue=default}": 0,
        "delayq_queue_paused{queue=slow}": 1,
        "delayq_queue_paused{queue=mail}": 0,
        "delayq_due_messages{queue=default,within=5m}": 0,
        "delayq_due_messages{queue=default,within=1h}": 3,
        "delayq_due_messages{queue=mail,within=1h}": 0,
        "delayq_due_seconds{queue=default,within=1h}": 0,
        "delayq_topic_due_messages{topic=t.ok}": 3,
        "delayq_topic_ready_messages{topic=t.ok}": 2,
        "delayq_topic_overdue_messages{topic=t.ok}": 1,
        "delayq_topic_due_messages{topic=l.one}": 1,
        "delayq_topic_ready_messages{topic=l.one}": 0,
        "delayq_scheduled_messages_estimate": 7,
        "delayq_running_messages": 1,
        "delayq_dead_messages": 2,
        "delayq_workers_alive": 1,
        "delayq_redis_up": 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    # No worker has loaded this Redis.
    assert "delayq_redis_horizon_ahead_seconds" not in found


@RECORD
@pytest.mark.postgresql("SQLite keeps no rows for others")
def test_a_gauge_names_the_holder_of_an_old_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET LOCAL application_name = 'report'")
            cursor.execute("SELECT 1")

    def named() -> list[str]:
        return [name for name in collected(Gauges("default")) if "delayq_old_snapshot_transactions" in name]

    with unfinished(hold):
        assert not any("report" in name for name in named())
        make_snapshots_old(monkeypatch)
        (name,) = named()
        assert "kind=transaction" in name
        assert "owner=report" in name


@RECORD
def test_the_gauges_of_redis_tell_how_far_it_is_filled(redis_client: redis.Redis) -> None:
    schedule(1)
    before = time.time()
    assert run("delayq_restore").code == 0
    found = collected(Gauges("default"))
    # The clock of PostgreSQL is that of this machine.
    assert before - 5 < found["delayq_redis_last_load_timestamp_seconds"] < time.time() + 5
    assert 0 < found["delayq_redis_horizon_ahead_seconds"] <= conf.get().HORIZON + 5


@RECORD
def test_the_owner_of_the_slot_in_a_cluster_is_named(settings: Any) -> None:
    with lone_node() as lone:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis+cluster://{lone.address}"}
        schedule(1)
        assert run("delayq_restore").code == 0
        found = collected(Gauges("default"))
    assert found[f"delayq_redis_cluster_replicas{{owner={lone.address},slot=1534}}"] == 0


@RECORD
def test_a_redis_that_is_full_foreign_or_away_is_down(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory", 1)
    assert collected(Gauges("default"))["delayq_redis_up"] == 0
    redis_client.config_set("maxmemory", 0)
    redis_client.hset("{delayq}:meta", "identity", "somebody else")
    assert collected(Gauges("default"))["delayq_redis_up"] == 0
    redis_server.kill()
    found = collected(Gauges("default"))
    assert (found["delayq_redis_up"], found["delayq_database_up"]) == (0, 1)


@RECORD
def test_redis_is_up_while_nobody_can_tell_whose_it_is(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: object) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr(server, "refuse_foreign", ask)
    assert collected(Gauges("default"))["delayq_redis_up"] == 1


@RECORD
@pytest.mark.postgresql("needs a statement timeout")
def test_a_database_that_answers_too_late_is_down() -> None:
    with unfinished(lambda: lock_table("delayq_message")):
        found = collected(Gauges("default", timeout=0.1))
    assert found["delayq_database_up"] == 0
    assert "delayq_dead_messages" not in found


@RECORD
def test_the_gauges_of_queues_beyond_the_limit_are_added_up() -> None:
    schedule(2, queue="one")
    schedule(1, queue="two", due=-100)
    schedule(1, queue="three")
    found = collected(Gauges("default", most_queues=0))
    assert found["delayq_scheduled_messages{queue=other}"] == 4
    assert found["delayq_oldest_overdue_age_seconds{queue=other}"] > 95
    assert {name for name in found if "queue=" in name and "queue=other" not in name} == set()
