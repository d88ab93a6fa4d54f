"""Limits that are changed while workers run hold in all of them, whatever happens to them and to Redis."""

from __future__ import annotations

import os
import signal
from datetime import datetime

import pytest
import redis

from django_delayq import override_limit, reset_limit, schedule_messages
from django_delayq.core import limits
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads
from tests.support import limits_oracle as oracle
from tests.support.processes import Start
from tests.support.record_of import states, wait_until_all
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("timed_by", "quick_take_over")

TOPIC = "topic t.sleep"


def sleeping(number: int, seconds: float = 0.02) -> None:
    schedule_messages([{"topic": "t.sleep", "payload": {"seconds": seconds}} for _ in range(number)])


def runs(since: datetime) -> list[oracle.Run]:
    """Return the deliveries of the topic that begin from this time on, and those that then still run."""
    found = oracle.runs(lambda topic, _queue, _key: {f"topic {topic}": limits.Limit()})
    return [run for run in found[TOPIC] if run.end is None or run.end > since]


def test_an_override_holds_while_workers_are_killed_and_redis_is_flushed(
    start: Start, redis_client: redis.Redis
) -> None:
    """The topic declares no limit: workers claim by the plain statement until they learn of one."""
    one, two = (start("--threads", "8") for _ in range(2))
    one.wait_for_children(1)
    two.wait_for_children(1)
    sleeping(60, 0.05)
    eventually(lambda: states()[State.CONSUMED] >= 10, "work is done")
    override_limit(topic="t.sleep", limit=2, reason="the provider asks for it")
    since = reads.now("default")
    sleeping(40)
    one.wait_for(r"The limit topic t\.sleep is overridden: limit 2 until it is reset.*the provider asks for it")
    eventually(lambda: states()[State.CONSUMED] >= 40, "work goes on")
    for victim in two.children:
        os.kill(victim, signal.SIGKILL)
    redis_client.flushall()
    wait_until_all(State.CONSUMED, 100)
    # What ran at the call goes on; from its end on two run.
    running = sum(run.begin < since for run in runs(since))
    later = [run for run in runs(since) if run.begin >= since]
    assert later
    assert oracle.most_at_once(later) <= 2
    assert oracle.most_at_once(runs(since)) <= max(2, running)


def test_a_topic_is_paused_at_once_and_goes_on_within_a_second(start: Start) -> None:
    worker = start("--threads", "4")
    sleeping(1)
    wait_until_all(State.CONSUMED, 1)
    override_limit(topic="t.sleep", limit=0)
    sleeping(20)
    schedule_messages([{"topic": "t.ok"} for _ in range(20)])
    eventually(lambda: states() == {State.CONSUMED: 21, State.SCHEDULED: 20}, "other topics go on")
    worker.wait_for(r"The limit topic t\.sleep is overridden: paused")
    assert not Message.objects.filter(topic="t.sleep", state=State.SCHEDULED).exclude(deliveries=0).exists()
    reset_limit(topic="t.sleep")
    worker.wait_for(r"The limit topic t\.sleep is overridden no more")
    wait_until_all(State.CONSUMED, 41)


def test_a_limit_that_is_raised_holds_while_all_wait_for_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim would tell of the change: all that waits is blocked, and no delivery ends."""
    monkeypatch.setenv("DELAYQ_TEST_LIMITS", "1")
    start("--threads", "8").wait_for_children(1)
    schedule_messages([{"topic": "t.limited", "payload": {"seconds": 60}} for _ in range(6)])
    eventually(lambda: states()[State.RUNNING] == 3, "the limit is full")
    override_limit(topic="t.limited", limit=5)
    eventually(lambda: states()[State.RUNNING] == 5, "two more run")


def test_a_rate_that_is_raised_does_not_wait_for_the_former_one(start: Start) -> None:
    start("--threads", "4").wait_for_children(1)
    override_limit(topic="t.sleep", rate="1/h")
    sleeping(4, 0)
    eventually(lambda: states()[State.CONSUMED] == 1, "one begins in this hour")
    override_limit(topic="t.sleep", rate="100/s")
    wait_until_all(State.CONSUMED, 4)
