"""A Redis in cluster mode is refused in words, and messages are delivered by query."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from django_delayq import cancel_message, schedule_message
from django_delayq.core.states import State
from testproject.servers import RedisServer, ServerFailed
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.record_of import log_of, wait_until
from tests.support.redis_servers import of
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

WORDS = "Redis Cluster is not supported"


@pytest.fixture(params=[16_384, 100], ids=["all slots", "few slots"])
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A cluster of one node that serves so many slots: with few, it refuses the keys of most queues."""
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    with _on_free_ports(*options) as server, of(server) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(request.param))
        eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"), "the cluster is up")
        yield server


@contextmanager
def _on_free_ports(*options: str) -> Iterator[RedisServer]:
    """Run a node. Its second port is 10,000 above the first one, and may be in use."""
    while True:
        server = RedisServer(*options)
        try:
            server.start()
            break
        except ServerFailed as error:
            server.close()
            if "in use" not in str(error):
                raise
    try:
        yield server
    finally:
        server.close()


def test_a_cluster_is_refused_in_words_and_delivery_goes_on_by_query(
    start: Start, configure: Configure, cluster: RedisServer
) -> None:
    configure(REDIS=cluster.url)
    worker = start()
    worker.wait_for(f"CRITICAL.*{WORDS}.*delivered from the database")
    message = wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert log_of(message)[1].ready_at is None
    for _ in range(5):
        cancel_message(schedule_message("t.tx", delay=60).pk)
    ran = run("delayq_check")
    assert ran.code == 78
    assert f"CRITICAL Redis mode: {WORDS}" in ran.out
    ran = run("delayq_restore", "--yes")
    assert ran.code == 78
    assert WORDS in ran.err
    assert worker.count(WORDS) == 1, worker.log
    assert worker.count("Redis is away") == 0, worker.log
    assert worker.stop() == 0
