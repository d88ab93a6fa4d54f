"""Limits hold over several workers, whatever happens to them and to Redis."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import redis
from django.db import connection

from django_delayq import schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core import limits
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support import failpoints
from tests.support import limits_oracle as oracle
from tests.support.in_redis import texts
from tests.support.processes import Start
from tests.support.record_of import begun_per_message, states, wait_until_all
from tests.support.workers import eventually

DECLARED = {"t.limited": limits.declare(limit=3), "t.rated": limits.declare(rate="100/s", burst=5)}
QUEUE = {"limit": 4}


def limits_of(topic: str, queue: str, key: str | None) -> dict[str, limits.Limit]:
    """Return the limits that the workers of these tests know."""
    found = {}
    if own := DECLARED.get(topic):
        found[limits.topic_name(topic, key)] = own
    if queue == "narrow":
        found[limits.queue_name(queue)] = limits.Limit(count=QUEUE["limit"])
    return found


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch, configure: Any) -> None:
    monkeypatch.setenv("DELAYQ_TEST_LIMITS", "1")
    configure(LIMITS={"narrow": QUEUE})


@pytest.mark.usefixtures("timed_by", "quick_take_over")
def test_limits_hold_while_workers_are_killed_and_frozen_and_redis_is_flushed(
    start: Start, redis_client: redis.Redis
) -> None:
    one, two = (start("--threads", "8") for _ in range(2))
    (frozen,) = one.wait_for_children(1)
    two.wait_for_children(1)
    work: list[Any] = []
    for number in range(20):
        work.append({"topic": "t.limited", "payload": {"seconds": 0.06, "fails": number % 3}})
        work += [
            {"topic": "t.limited", "payload": {"seconds": 0.01}, "limit_key": f"c-{key}", "queue": "narrow"}
            for key in range(6)
        ]
        work.append({"topic": "t.sleep", "payload": {"seconds": 0.01}, "queue": "narrow"})
    schedule_messages(work)
    eventually(lambda: states()[State.CONSUMED] >= 15, "work is done")
    # A process that freezes while it writes to SQLite keeps all others from writing.
    freezes = connection.vendor == "postgresql"
    if freezes:
        os.kill(frozen, signal.SIGSTOP)
    redis_client.flushall()
    eventually(lambda: states()[State.CONSUMED] >= 40, "the other one goes on")
    if freezes:
        os.kill(frozen, signal.SIGCONT)
    for victim in two.children:
        os.kill(victim, signal.SIGKILL)
    redis_client.flushall()
    wait_until_all(State.CONSUMED, len(work))
    assert oracle.faults(limits_of) == []
    by_name = {name: oracle.most_at_once(these) for name, these in oracle.runs(limits_of).items()}
    assert by_name["topic t.limited"] == 3


@pytest.mark.postgresql("one process writes at a time")
@pytest.mark.parametrize(
    "faults",
    ["before_limited_claim:raise:2,before_limited_claim:kill:5", "before_limited_claim:stop:3"],
    ids=["killed", "frozen"],
)
def test_limits_hold_when_a_process_ends_or_freezes_on_the_way(
    start: Start, monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    """A process that freezes while it holds the locks of limits loses them."""
    monkeypatch.setenv(failpoints.ENVIRONMENT, faults)
    faulty = start("--threads", "4")
    faulty.wait_for_children(1)
    schedule_messages(
        [{"topic": "t.limited", "payload": {"seconds": 0.02}, "limit_key": f"c-{number % 5}"} for number in range(60)]
    )
    faulty.wait_for(r"Failpoint before_limited_claim:\w+:")
    monkeypatch.delenv(failpoints.ENVIRONMENT)
    start("--threads", "4")
    wait_until_all(State.CONSUMED, 60)
    assert oracle.faults(limits_of) == []


@pytest.mark.usefixtures("timed_by")
def test_a_rate_is_kept_over_several_workers(start: Start) -> None:
    start("--processes", "2", "--threads", "4")
    schedule_messages([{"topic": "t.rated"} for _ in range(150)])
    wait_until_all(State.CONSUMED, 150)
    assert oracle.faults(limits_of) == []
    assert not Message.objects.exclude(attempts=0).exists()
    # A busy machine may come too late for the slots of a rate. The claims are given back before anything begins.
    assert set(begun_per_message().values()) == {1}


def test_redis_learns_no_topic_and_no_limit_key(start: Start, redis_client: redis.Redis) -> None:
    """Ids are blocked for each reason: a handler that is missing, a limit of a topic, of a key and of a queue."""
    worker = start("--threads", "8", unknown=("t.new",))
    worker.wait_for("Loaded Redis")
    busy: Any = {"topic": "t.limited", "payload": {"seconds": 0.5}}
    work = [
        *[busy] * 6,
        *[{**busy, "limit_key": "cust0mer"}] * 6,
        *[{**busy, "topic": "t.sleep", "queue": "narrow"}] * 6,
    ]
    schedule_messages([*work, {"topic": "t.new"}])
    counts, seen = keys("delayq", "default").blocked_counts, []

    def names() -> int:
        seen.append(texts(redis_client))
        return int(redis_client.hlen(counts))

    eventually(lambda: names() == 4, "some of each kind are blocked")
    eventually(lambda: names() == 1 and states()[State.CONSUMED] == len(work), "all are delivered but one")
    for secret in (b"t.limited", b"cust0mer", b"t.sleep", b"t.new"):
        assert not any(secret in text for text in seen), secret


@pytest.mark.parametrize("threads", ["1", "4"])
def test_once_delivers_what_waits_for_a_place_and_what_is_behind_it(start: Start, threads: str) -> None:
    schedule_messages([{"topic": "t.limited", "payload": {"seconds": 0}, "limit_key": "c"}] * 70)
    schedule_messages([{"topic": "t.sleep", "payload": {"seconds": 0}}] * 5)
    assert start("--once", "--threads", threads).wait() == 0
    assert states() == {State.CONSUMED: 75}
    assert oracle.faults(limits_of) == []
