"""A handler that schedules the next message under its own key: the chain neither ends nor doubles, whatever dies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import redis
from django.db import connection

from django_delayq import Verdict, cancel_message, reschedule_message, run_message, schedule_message
from django_delayq.core.actors import handling
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from tests.app.models import Effect
from tests.support.processes import Gate, Start
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


UNIQUES = ("live", "scheduled", "1h")


def test_messages_whose_retry_comes_after_the_later_steps_neither_double_nor_end_their_chains(start: Start) -> None:
    chains = {
        f"{topic} {unique} {rejected}": schedule_message(
            topic,
            {"turn": 1, "turns": 4, "unique": unique, "fails": True, "rejected": rejected},
            key=f"{topic} {unique} {rejected}",
            unique=unique,
            retry=["1h"],
        )
        for topic, unique, rejected in product(("t.chain", "t.achain"), UNIQUES, (False, True))
    }
    start("--threads", "4")
    last = Message.objects.filter(payload__turn=4, state=State.CONSUMED)
    eventually(lambda: last.count() == len(chains), "the chains come to their ends")
    assert set(Message.objects.filter(payload__turn=1).values_list("state", flat=True)) == {State.SCHEDULED}
    for first in chains.values():
        assert run_message(first)
    eventually(lambda: not Message.objects.filter(state__in=LIVE).exists(), "everything is over")
    for key, first in chains.items():
        first.refresh_from_db()
        assert first.state == (State.DEAD if key.endswith("True") else State.CONSUMED)
        messages = Message.objects.filter(key=key).order_by("pk")
        assert list(messages.values_list("payload__turn", flat=True)) == [1, 2, 3, 4], key
        effects = Counter(Effect.objects.filter(message_id__in=messages).values_list("note", flat=True))
        assert effects == {"turn 1": 2, "turn 2": 1, "turn 3": 1, "turn 4": 1}, key


def test_a_cancel_by_key_ends_a_chain_whose_handler_is_running(start: Start, gate: Gate) -> None:
    # SQLite lets nobody cancel while a transactional handler runs.
    topics = ["t.chain", "t.achain", *(["t.chain_tx"] if connection.vendor == "postgresql" else [])]
    start("--threads", str(len(topics) * len(UNIQUES)))
    running = []
    for topic, unique in product(topics, UNIQUES):
        gate.payload |= {"turn": 1, "turns": 9, "unique": unique}
        running.append(gate.running(topic, key=unique, unique=unique))
    for first in running:
        assert cancel_message(topic=first.topic, key=str(first.key)).verdict == Verdict.REQUESTED
    gate.open()
    eventually(lambda: not Message.objects.filter(state__in=LIVE).exists(), "the handlers end")
    assert Message.objects.count() == len(running)


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
