"""A handler that asks for a later delivery may leave another payload for it."""

from __future__ import annotations

import asyncio
import decimal
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError
from django.test import override_settings

from django_delayq import RetryLater, RetryPolicy, cancel_message, handler, schedule_message
from django_delayq.core.outcomes import GiveUp, Retry
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Failure
from django_delayq.worker.parts.delivery import Delivery
from django_delayq.worker.run import executor
from django_delayq.worker.run.recorder import Recorder
from tests.app.handlers import leave
from tests.support.assembled import drain
from tests.support.claims import DB, claimed
from tests.support.record_of import log_of
from tests.worker.bench import TOPIC, recorded

pytestmark = pytest.mark.django_db(transaction=True)


def asks_with(payload: object, *, counts: bool = True) -> Callable[[Any], None]:
    def ask(message: Delivery) -> None:
        raise RetryLater(0, payload=payload, counts=counts)

    return ask


seen: list[Any] = []


def walk(message: Any) -> None:
    """Do one of three steps, and leave the next one for the next attempt."""
    seen.append(message.payload)
    step = message.payload["step"]
    if step < 3:
        message.payload["step"] = step + 1
        raise RetryLater(0, payload=message.payload, counts=False)


async def walk_async(message: Any) -> None:
    await asyncio.sleep(0)
    walk(message)


@pytest.mark.parametrize(
    ("function", "terms"),
    [(walk, {}), (walk, {"transactional": True}), (walk_async, {})],
    ids=["sync", "transactional", "async"],
)
def test_each_attempt_sees_the_payload_that_the_one_before_left(
    function: Callable[[Any], Any], terms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen.clear()
    handler(TOPIC, **terms)(function)
    message = schedule_message(TOPIC, {"step": 1, "secret": "xyzzy"})
    drain(Options(DB, threads=1))
    assert [payload["secret"] for payload in seen] == ["xyzzy"] * 3
    message.refresh_from_db()
    left: Any = message.payload
    assert (message.state, left["step"], message.attempts) == (State.CONSUMED, 3, 0)
    moves = list(Transition.objects.filter(message=message, from_state=State.RUNNING).order_by("number"))
    assert [move.reason for move in moves] == ["payload changed", "payload changed", ""]
    assert [move.delivery for move in moves] == [1, 2, 3]
    assert all(move.actor.startswith("worker:") for move in moves)
    # The log of the process tells of the change, and never of the payload.
    assert "payload changed" in caplog.text
    assert "xyzzy" not in caplog.text


@pytest.mark.parametrize("payload", [None, 0, "", [], {}, {"a": [1, None, "ü'\"\\"]}])
def test_any_json_can_be_left_and_none_is_one(recorder: Recorder, payload: object) -> None:
    message = recorded(recorder, asks_with(payload))
    assert (message.state, message.payload) == (State.SCHEDULED, payload)
    assert log_of(message)[-1].reason == "payload changed"


def test_a_left_payload_becomes_json_at_the_raise() -> None:
    payload = {"total": decimal.Decimal("49.90")}
    raised = RetryLater("5m", payload=payload)
    payload.clear()
    assert raised.payload == '{"total":"49.90"}'
    assert RetryLater("5m").payload is None


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (object(), "InvalidMessage: the payload is of type object, which is not JSON"),
        ({"a": "\x00"}, "InvalidMessage: payload['a'] holds a NUL character"),
        (float("nan"), "InvalidMessage: the payload is not JSON"),
        ("x" * 2_000_000, "PayloadTooLarge: the payload has 2000002 bytes of JSON"),
    ],
    ids=["object", "nul", "nan", "large"],
)
def test_a_payload_that_cannot_be_left_is_a_counted_failure(recorder: Recorder, payload: object, reason: str) -> None:
    message = recorded(recorder, asks_with(payload, counts=False), retry=[0])
    assert (message.state, message.attempts, message.payload) == (State.SCHEDULED, 1, None)
    assert log_of(message)[-1].error.startswith(reason)
    # The exception is raised in the line of the handler.
    assert "raise RetryLater(0, payload=payload, counts=counts)" in log_of(message)[-1].traceback
    drain(Options(DB, threads=1))
    message.refresh_from_db()
    assert (message.state, message.attempts) == (State.DEAD, 2)


def test_the_limit_of_a_left_payload_is_the_one_of_the_call() -> None:
    with override_settings(DELAYQ={"REDIS": None, "PAYLOAD_MAX_BYTES": 2000}):
        assert RetryLater(1, payload="x" * 1998).payload is not None
        with pytest.raises(ValueError, match="more than DELAYQ"):
            RetryLater(1, payload="x" * 1999)


def test_a_message_that_dies_or_is_cancelled_keeps_the_payload_that_was_left_for_a_requeue(recorder: Recorder) -> None:
    handler(TOPIC, retry=RetryPolicy.exponential(max_attempts=2))(asks_with({"step": 2}))
    for cancelled, state, reason in (
        (False, State.DEAD, "payload changed"),
        (True, State.CANCELLED, "cancel requested; payload changed"),
    ):
        (delivery,) = claimed(TOPIC)
        if cancelled:
            assert cancel_message(delivery.id)
        else:
            delivery.attempt = 2
        recorder.submit(delivery, executor.execute(delivery, "worker:w"), "worker:w")
        assert recorder.flush(60)
        message = Message.objects.get(pk=delivery.id)
        assert (message.state, message.payload, log_of(message)[-1].reason) == (state, {"step": 2}, reason)


def failure(delivery: Delivery, payload: str | None) -> Failure:
    return Failure(delivery.id, delivery.deliveries, "worker:w", delay=timedelta(0), payload=payload)


def test_failures_with_and_without_a_payload_are_written_together() -> None:
    handler(TOPIC)(leave)
    held = claimed(*[TOPIC] * 3)
    Message._base_manager.update(payload={"old": "ü"})
    payloads = [None, '{"n": 1}', "null"]
    moved = transitions.fail(DB, [failure(d, payload) for d, payload in zip(held, payloads, strict=True)])
    assert len(moved) == 3
    found = [Message.objects.get(pk=delivery.id).payload for delivery in held]
    assert found == [{"old": "ü"}, {"n": 1}, None]


def test_a_payload_that_the_database_refuses_ends_the_message(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the payload another attempt would do again what the handler has done."""
    write = transitions.fail

    def refuse(using: str, failures: list[Failure], *, wait: bool = True) -> Any:
        if any(failure.payload is not None for failure in failures):
            raise IntegrityError("a constraint of the project's own")
        return write(using, failures, wait=wait)

    monkeypatch.setattr(transitions, "fail", refuse)
    message = recorded(recorder, asks_with({"step": 2}, counts=False))
    assert (message.state, message.payload) == (State.DEAD, None)
    assert log_of(message)[-1].error == "InvalidMessage: the database refused the payload that the handler left"


def test_outcomes_do_not_show_the_payload() -> None:
    assert "xyzzy" not in repr(Retry(timedelta(0), payload="xyzzy"))
    assert "xyzzy" not in repr(GiveUp("", payload="xyzzy"))
