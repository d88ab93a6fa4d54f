"""A handler that schedules the next message under its own key: the chain neither ends nor doubles, whatever dies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection

from django_delayq import (
    OnConflict,
    Verdict,
    acancel_message,
    cancel_message,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from django_delayq.project.message_options import MessageDict
from tests.app.models import Effect
from tests.support.chains import ENDS, going_on, hand_over, while_it_waits
from tests.support.processes import Gate, Start
from tests.support.statements import count_statements
from tests.support.steps import TOPIC, bring, claim, claimed, due, fail, later, log, message, succeed
from tests.support.together import Together
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
    # A failure may be recorded after the successes of all later steps.
    firsts = Message.objects.filter(payload__turn=1)
    eventually(lambda: not firsts.exclude(state=State.SCHEDULED).exists(), "the first steps wait for their retries")
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


VERBS: dict[str, tuple[Callable[..., Any], Verdict]] = {
    "cancel": (cancel_message, Verdict.CANCELLED),
    "acancel": (async_to_sync(acancel_message), Verdict.CANCELLED),
    "reschedule": (partial(reschedule_message, delay="1h"), Verdict.RESCHEDULED),
    "run": (run_message, Verdict.RESCHEDULED),
}
# SQLite has no lock that a test could hold between the look and the move.
needs_locks = pytest.mark.postgresql("another database locks no rows")


@needs_locks
@pytest.mark.parametrize("unique", UNIQUES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_key_that_is_handed_over_while_a_call_waits_means_the_next_message(
    together: Together, verb: str, end: str, unique: str
) -> None:
    act, verdict = VERBS[verb]
    first = claimed(key="k", unique=unique).id

    def then() -> None:
        hand_over(first, unique=unique)
        ENDS[end](first)
        before.extend(log(first))

    before: list[Any] = []
    answer = while_it_waits(together, first, lambda: act(topic=TOPIC, key="k"), then)
    assert (answer.id, answer.verdict) == (message(first).next_id, verdict)
    assert log(first) == before


@needs_locks
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("unique", UNIQUES)
@pytest.mark.parametrize("policy", ["keep", "replace", "debounce"])
def test_a_call_that_waits_while_a_key_is_handed_over_finds_the_next_message(
    together: Together, policy: OnConflict, unique: str, many: bool
) -> None:
    first = due(1, key="k", unique=unique).pk
    new: MessageDict = {"payload": 3, "topic": TOPIC, "key": "k", "unique": "scheduled", "on_conflict": policy}

    def then() -> None:
        assert claim(first)
        hand_over(first, payload=2, unique=unique)
        assert fail(first)

    act = (lambda: schedule_messages([new])[0]) if many else lambda: schedule_message(**new)
    found = while_it_waits(together, first, act, then)
    assert (found.pk, found.existed) == (message(first).next_id, True)
    assert (found.payload, message(first).payload) == (3 if policy == "replace" else 2, 1)


@needs_locks
@pytest.mark.parametrize("policy", ["keep", "replace", "debounce"])
@pytest.mark.parametrize("end", ["runs on", "succeeds", "has crashed"])
def test_a_call_makes_a_message_when_the_one_that_it_waits_for_frees_its_key(
    together: Together, policy: OnConflict, end: str
) -> None:
    first = due(key="k", unique="scheduled").pk

    def then() -> None:
        assert claim(first)
        ENDS[end](first)

    new = while_it_waits(together, first, lambda: later(key="k", unique="scheduled", on_conflict=policy), then)
    assert (new.existed, message(new.pk).holds_key) == (False, True)
    assert new.pk > first


@pytest.mark.parametrize("verb", ["cancel", "reschedule", "run"])
def test_a_call_follows_a_chain_that_goes_on_as_fast_and_says_so_when_it_cannot(
    verb: str, transactional_db: None
) -> None:
    act, verdict = VERBS[verb]
    with going_on(due(key="k").pk, steps=5) as chain:
        answer = act(topic=TOPIC, key="k")
    assert (answer.id, answer.verdict, len(chain)) == (chain[-1], verdict, 6)
    cancel_message(chain[-1])
    with going_on(due(key="k").pk, steps=1000) as chain:
        answer = act(topic=TOPIC, key="k")
    assert (answer.id in chain, bool(answer), str(answer)) == (True, False, "too late: scheduled")
    assert 10 < len(chain) < 100
    # A message that went on was scheduled, claimed and released; the last one was only scheduled.
    assert list(Message.objects.filter(pk__in=chain).order_by("pk").values_list("moves", flat=True)) == [
        *[3] * (len(chain) - 1),
        1,
    ]


def test_a_key_means_the_message_that_has_not_handed_it_over(transactional_db: None) -> None:
    """Not the younger one, which waits only for the repetition of a step that was made."""
    older = bring(State.DEAD, key="k", unique="scheduled")
    younger = claimed(key="k", unique="scheduled").id
    assert requeue_message(older)
    assert hand_over(younger, unique="scheduled").pk == older
    assert fail(younger)
    assert run_message(older)
    assert claim(older)
    answer = cancel_message(topic=TOPIC, key="k")
    assert (answer.id, answer.verdict) == (older, Verdict.REQUESTED)
    assert succeed(older)
    # When the chain has ended, there is only that one.
    assert cancel_message(topic=TOPIC, key="k").id == younger


@pytest.mark.parametrize("runs", [False, True], ids=["scheduled", "running"])
def test_a_call_by_key_costs_one_statement_more_than_one_by_id(runs: bool, transactional_db: None) -> None:
    make = claimed if runs else due
    for key in "ab":
        make(key=key)
    first = Message.objects.get(key="a").pk
    by_id = count_statements(lambda: cancel_message(first))
    assert count_statements(lambda: cancel_message(topic=TOPIC, key="b")) == by_id + 1
    assert count_statements(lambda: cancel_message(topic=TOPIC, key="c")) == 1
