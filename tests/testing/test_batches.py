"""Batch handlers in the tests of a project."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_delayq import Delivered, Reject, RetryLater, handler, schedule_message, schedule_messages
from django_delayq.models import Message
from django_delayq.testing import Delayq
from tests.app.models import Effect

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "transactional"])
def calls(request: pytest.FixtureRequest) -> list[list[Any]]:
    """Register a handler that answers by the payload; return the payloads of each of its calls."""
    made: list[list[Any]] = []

    @handler("b.words", batch=4, retry=["1m"], transactional=request.param)
    def work(messages: list[Delivered]) -> None:
        made.append([message.payload for message in messages])
        for message in messages:
            match message.payload:
                case "later":
                    message.retry_later("5m", counts=False)
                case "reject":
                    message.reject("no")
                case "bad":
                    raise RuntimeError("bad")
                case _:
                    Effect.objects.create(message_id=message.id, delivery=message.deliveries)

    return made


def put(*payloads: object) -> list[Message]:
    return schedule_messages({"topic": "b.words", "payload": payload} for payload in payloads)


def test_drain_makes_batches(delayq: Delayq, calls: list[list[Any]]) -> None:
    put(*"abcdef")
    schedule_message("t.ok")
    ran = delayq.drain()
    assert sorted(map(len, calls)) == [2, 4]
    assert [one.outcome for one in ran] == ["consumed"] * 7


def test_drain_runs_no_more_than_its_limit(delayq: Delayq, calls: list[list[Any]]) -> None:
    put(*"abcdef")
    with pytest.raises(RuntimeError, match=r"drain.. made 5 deliveries"):
        delayq.drain(limit=5)
    assert list(map(len, calls)) == [4, 1]


def test_drain_tells_the_answer_to_each_message(delayq: Delayq, calls: list[list[Any]]) -> None:
    put("a", "later", "reject", "b")
    ran = {one.message.payload: one.outcome for one in delayq.drain()}
    assert ran == {"a": "consumed", "later": "released", "reject": "dead", "b": "consumed"}
    assert Effect.objects.count() == 2


def test_drain_has_a_message_that_failed_come_alone(delayq: Delayq, calls: list[list[Any]]) -> None:
    put("a", "bad", "b")
    ran = delayq.drain("5m", raise_errors=False)
    assert [sorted(call) for call in calls] == [["a", "b", "bad"], ["a"], ["bad"], ["b"]]
    assert sorted(one.outcome for one in ran) == ["consumed", "consumed", "dead", "retried", "retried", "retried"]


def test_drain_raises_the_error_of_a_batch(delayq: Delayq) -> None:
    put("a", "bad")
    with pytest.raises(RuntimeError, match="bad"):
        delayq.drain()


def test_drain_leaves_what_is_to_come_alone_for_the_next_one(delayq: Delayq, calls: list[list[Any]]) -> None:
    put("a", "bad")
    delayq.drain(raise_errors=False)
    delayq.travel("1m")
    schedule_message("b.words", "bad", priority=10)
    with pytest.raises(RuntimeError, match="bad"):
        delayq.drain()
    assert calls[1:] == [["bad"]]
    assert not Message.objects.filter(state="running").exists()
    assert {one.message.payload for one in delayq.drain(raise_errors=False)} == {"a", "bad"}


def test_what_a_transactional_batch_does_on_commit_changes_no_answer(delayq: Delayq) -> None:
    def fail() -> None:
        raise RuntimeError("after the commit")

    @handler("b.commits", batch=4, transactional=True)
    def work(messages: list[Delivered]) -> None:
        messages[0].reject("no")
        transaction.on_commit(fail)

    schedule_messages({"topic": "b.commits"} for _ in range(2))
    ran = delayq.drain(raise_errors=False)
    assert [one.outcome for one in ran] == ["dead", "consumed"]
    assert [str(one.error) for one in ran] == ["after the commit"] * 2


def test_immediate_deliveries_are_batches_of_one(settings: Any, calls: list[list[Any]]) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "TESTING": "immediate"}
    put("a", "b")
    assert calls == [["a"], ["b"]]


def test_perform_takes_a_list_and_returns_the_answers(delayq: Delayq) -> None:
    answers = delayq.perform("b.words", ["a", "later", "reject"])
    assert answers is not None
    assert [type(answer) for answer in answers] == [type(None), RetryLater, Reject]
    with pytest.raises(ValueError, match=r"give perform.. a list of payloads"):
        delayq.perform("b.words", "a")
    with pytest.raises(RuntimeError, match="bad"):
        delayq.perform("b.words", ["bad"])
