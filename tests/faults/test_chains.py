"""A handler that schedules the next message under its own key: the chain neither ends nor doubles, whatever dies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_delayq import Verdict, cancel_message, reschedule_message, run_message, schedule_message
from django_delayq.core.actors import handling
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from tests.app.models import Effect
from tests.support.processes import Gate, Start
from tests.support.record_of import wait_until
from tests.support.steps import TOPIC, claimed, later, message, succeed
from tests.support.together import Together
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import eventually

TURNS = 12
# Killed after the next message was scheduled and before the success is recorded, and after the success.
DEATHS = "after_handler:kill:3,before_succeed:kill:7,after_commit:kill:9,before_record:kill:11"


def test_a_chain_survives_killed_workers_and_a_flushed_redis(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {"t.chain": "live", "t.chain_tx": "scheduled", "t.achain": "1h"}
    for topic, unique in topics.items():
        schedule_message(topic, {"turn": 1, "turns": TURNS, "unique": unique}, key="k", unique=unique, delay="50ms")
    monkeypatch.setenv("DELAYQ_FAILPOINTS", DEATHS)
    start("--threads", "2")
    monkeypatch.delenv("DELAYQ_FAILPOINTS")
    start("--threads", "2")
    eventually(
        lambda: Message.objects.filter(state=State.CONSUMED).count() > TURNS, "half of the messages are consumed"
    )
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushall()
    eventually(lambda: not Message.objects.filter(state__in=LIVE).exists(), "the chains come to their ends")
    for topic in topics:
        messages = Message.objects.filter(topic=topic).order_by("pk")
        turns = list(messages.values_list("payload__turn", flat=True))
        # One message a turn: a turn that ran again has found the next one there.
        assert turns == list(range(1, TURNS + 1)), topic
        assert {row.state for row in messages} == {State.CONSUMED}
        effects = Counter(Effect.objects.filter(message_id__in=messages).values_list("note", flat=True))
        assert len(effects) == TURNS
        if topic == "t.chain_tx":
            assert set(effects.values()) == {1}


@pytest.mark.parametrize("rejected", [False, True], ids=["retried", "rejected"])
@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
@pytest.mark.parametrize("topic", ["t.chain", "t.achain"])
def test_a_message_whose_retry_comes_after_the_later_steps_neither_doubles_nor_ends_the_chain(
    start: Start, topic: str, unique: str, rejected: bool
) -> None:
    payload = {"turn": 1, "turns": 4, "unique": unique, "fails": True, "rejected": rejected}
    first = schedule_message(topic, payload, key="k", unique=unique, retry=["1h"])
    start()
    eventually(
        lambda: Message.objects.filter(payload__turn=4, state=State.CONSUMED).exists(), "the chain comes to its end"
    )
    assert Message.objects.get(pk=first.pk).state == State.SCHEDULED
    assert run_message(first)
    wait_until(first, State.DEAD if rejected else State.CONSUMED)
    eventually(lambda: not Message.objects.filter(state__in=LIVE).exists(), "everything is over")
    assert list(Message.objects.order_by("pk").values_list("payload__turn", flat=True)) == [1, 2, 3, 4]
    assert Counter(Effect.objects.values_list("note", flat=True)) == {
        "turn 1": 2,
        "turn 2": 1,
        "turn 3": 1,
        "turn 4": 1,
    }


@pytest.mark.parametrize("unique", ["live", "scheduled", "1h"])
@pytest.mark.parametrize(
    "topic",
    [
        "t.chain",
        pytest.param("t.chain_tx", marks=pytest.mark.postgresql("SQLite lets nobody cancel meanwhile")),
        "t.achain",
    ],
)
def test_a_cancel_by_key_ends_a_chain_whose_handler_is_running(
    start: Start, gate: Gate, topic: str, unique: str
) -> None:
    start()
    gate.payload |= {"turn": 1, "turns": 9, "unique": unique}
    first = gate.running(topic, key="k", unique=unique)
    assert cancel_message(topic=topic, key="k").verdict == Verdict.REQUESTED
    gate.open()
    eventually(lambda: Message.objects.get(pk=first.pk).state not in LIVE, "the handler ends")
    assert Message.objects.count() == 1


@pytest.mark.postgresql("another database lets nobody write meanwhile")
@pytest.mark.parametrize("ends", [True, False], ids=["transactional", "running"])
@pytest.mark.parametrize(
    ("verb", "options", "verdict"),
    [
        (cancel_message, {}, Verdict.CANCELLED),
        (reschedule_message, {"delay": "1h"}, Verdict.RESCHEDULED),
        (run_message, {}, Verdict.RESCHEDULED),
    ],
)
def test_a_key_that_is_handed_over_while_a_call_waits_means_the_next_message(
    together: Together, verb: Callable[..., Any], options: dict[str, Any], verdict: Verdict, ends: bool
) -> None:
    first = claimed(key="k")

    def handle() -> None:
        with handling("default", TOPIC, "k", first.id):
            later(key="k")
        assert not ends or succeed(first.id)

    def let_go() -> None:
        eventually(waits_for_a_lock, "the call waits for the row of the first message")
        go.set()

    with unfinished(handle) as go:
        answer, _gone = together(lambda: verb(topic=TOPIC, key="k", **options), let_go)
    following = message(first.id).next_id
    assert (answer.id, answer.verdict) == (following, verdict)
