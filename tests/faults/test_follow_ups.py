"""Exactly one message follows each end, while the processes that record the ends are killed.

``DELAYQ_TEST_DEATHS=1000 python -m pytest tests/faults/test_follow_ups.py -n 0`` ends that many messages.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial

import pytest

from django_delayq import MessageDict, schedule_message, schedule_messages
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message
from tests.support.processes import Configure, Gate, Start
from tests.support.record_of import effects_per_message, once_each, wait_until
from tests.support.steps import ago
from tests.support.workers import eventually

DEATHS = int(os.environ.get("DELAYQ_TEST_DEATHS", "40"))
# How many messages end around one kill: three in four are given up by their handlers, one expires, and one is dead
# because its process was killed.
AROUND_A_KILL = 10
# After so many kills of a process the whole worker is killed.
KILLS_BETWEEN = 4

BOTH = pytest.mark.usefixtures("timed_by")


def ending(number: int) -> list[MessageDict]:
    """Return messages that end soon in each way that needs no kill."""
    rejected: list[MessageDict] = [{"topic": "t.reject", "on_dead": "t.tx"} for _ in range(number - 3)]
    return [
        *rejected,
        {"topic": "t.fail_tx", "retry": False, "on_dead": "t.tx"},
        {"topic": "t.ok", "due_at": ago(30), "expires": 1, "on_expired": "t.tx"},
    ]


@BOTH
@pytest.mark.timeout(300 + DEATHS)
@pytest.mark.usefixtures("quick_take_over")
def test_exactly_one_message_follows_each_end_while_processes_are_killed(
    start: Start, configure: Configure, gate: Gate
) -> None:
    configure(LEASE=2)
    arguments = ("--processes", "2", "--threads", "2")
    worker = start(*arguments)
    ended: list[Message] = []
    for kill in range(1, DEATHS // AROUND_A_KILL + 1):
        held = schedule_message("t.at_most_once", gate.payload, on_dead="t.tx", priority=1)
        eventually(partial(gate.begun, held.pk), "the handler that is killed begins")
        portion = schedule_messages(ending(AROUND_A_KILL))
        ended += [held, *portion]
        dead = Message.objects.filter(pk__in=[message.pk for message in portion], state=State.DEAD)
        eventually(dead.exists, "the first has ended")
        if kill % KILLS_BETWEEN:
            os.kill(int(Message.objects.get(pk=held.pk).worker.split("/")[1]), signal.SIGKILL)
        else:
            worker.kill()
            worker = start(*arguments)
        wait_until(held, State.DEAD)
    ends = Message.objects.filter(pk__in=[message.pk for message in ended])
    eventually(lambda: ends.filter(state__in=FINAL).count() == len(ended), "all have ended")
    states = Counter(ends.values_list("topic", "state"))
    kills = DEATHS // AROUND_A_KILL
    assert states[("t.at_most_once", "dead")] == kills
    assert states[("t.ok", "expired")] == kills
    assert states[("t.reject", "dead")] + states[("t.fail_tx", "dead")] == len(ended) - 2 * kills
    followed = Message.objects.filter(topic="t.tx")
    assert Counter(followed.values_list("payload__id", flat=True)) == once_each(ended)
    eventually(lambda: followed.filter(state=State.CONSUMED).count() == len(ended), "all that followed have run")
    effects = effects_per_message()
    assert {message.pk: effects[message.pk] for message in followed} == once_each(followed)


def end_and_die(start: Start, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a message in a process that dies at a failpoint, and see what follows."""
    monkeypatch.setenv("DELAYQ_FAILPOINTS", f"{point}:kill:1")
    rejected = schedule_message("t.reject", on_dead="t.tx")
    worker = start()
    worker.wait_for("died .killed by signal 9")
    wait_until(rejected, State.DEAD)
    followed = Message.objects.filter(topic="t.tx")
    eventually(lambda: followed.filter(state=State.CONSUMED).exists(), "what follows has run")
    assert list(followed.values_list("payload__id", flat=True)) == [rejected.pk]
    assert effects_per_message() == once_each(followed)


@BOTH
@pytest.mark.parametrize("point", ["before_record", "after_record"])
def test_one_message_follows_when_the_process_dies_beside_the_commit_of_an_end(
    start: Start, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_and_die(start, point, monkeypatch)


@pytest.mark.usefixtures("redis_client")
def test_what_follows_runs_though_its_process_dies_before_redis_is_told_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_and_die(start, "before_put", monkeypatch)


@BOTH
def test_a_worker_that_runs_once_runs_what_follows_too(start: Start) -> None:
    ended = [schedule_message("t.reject", on_dead="t.tx"), *schedule_messages(ending(4))]
    assert start("--once").wait() == 0
    followed = Message.objects.filter(topic="t.tx", state=State.CONSUMED)
    expired = [message for message in ended if message.topic == "t.ok"]
    given_up = [message for message in ended if message not in expired]
    found = set(followed.values_list("payload__id", flat=True))
    # It may end before it expires what nobody can start any more.
    assert {message.pk for message in given_up} <= found <= {message.pk for message in ended}
