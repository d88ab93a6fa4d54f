"""What a handler returns, raises, or leaves for the next attempt is kept with the message."""

from __future__ import annotations

import asyncio
import decimal
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from django.db import IntegrityError, connection

from django_delayq import Reject, RetryLater, RetryPolicy, cancel_message, handler, schedule_message
from django_delayq.core.exceptions import HandlerTimeout
from django_delayq.core.outcomes import GiveUp, Retry
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Failure, Success
from django_delayq.worker.run import executor
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.recorder import Recorder
from tests.app.handlers import leave
from tests.app.models import Effect
from tests.support.assembled import drain
from tests.support.claims import DB, claimed
from tests.support.record_of import log_of
from tests.support.rows import unguarded
from tests.worker.bench import TOPIC, raises, recorded, returns, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["plain", "transactional", "async"])
@pytest.mark.parametrize("value", [{"a": [1, None, "ü'\"\\"]}, [], 0, False, "", "text", -1.5])
def test_a_result_is_kept_with_the_message(recorder: Recorder, value: object, kind: str) -> None:
    async def answer(message: Delivery) -> object:
        await asyncio.sleep(0)
        return value

    function = answer if kind == "async" else returns(value)
    message = recorded(recorder, function, keep_result=True, transactional=kind == "transactional")
    assert (message.state, message.result) == (State.CONSUMED, value)
    assert type(message.result) is type(value)


def test_a_result_becomes_json_as_a_payload_does(recorder: Recorder) -> None:
    message = recorded(recorder, returns({"total": decimal.Decimal("49.90"), "of": (1, 2)}), keep_result=True)
    assert message.result == {"total": "49.90", "of": [1, 2]}


def test_a_handler_that_returns_none_or_keeps_nothing_has_no_result(recorder: Recorder) -> None:
    for message in (recorded(recorder, returns(None), keep_result=True), recorded(recorder, returns(7))):
        assert message.state == State.CONSUMED
    assert Message.objects.filter(result__isnull=True).count() == 2
    assert set(Transition.objects.values_list("exception", flat=True)) == {""}


def test_successes_with_and_without_results_are_written_together() -> None:
    handler(TOPIC, keep_result=True)(returns(None))
    held = claimed(*[TOPIC] * 3)
    results = [None, '{"n": 1}', '"two"']
    successes = [Success(d.id, d.deliveries, "worker:w", r) for d, r in zip(held, results, strict=True)]
    assert transitions.succeed(DB, successes) == {delivery.id for delivery in held}
    assert [Message.objects.get(pk=delivery.id).result for delivery in held] == [None, {"n": 1}, "two"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "the result is of type object, which is not JSON"),
        ({"a": [{1}]}, "result['a'][0] is of type set, which is not JSON; pass a list"),
        ("x" * 2_000_000, "the result has 2000002 bytes of JSON, more than DELAYQ['PAYLOAD_MAX_BYTES']"),
    ],
    ids=["object", "set", "large"],
)
def test_a_result_that_cannot_be_kept_is_a_failure(value: object, reason: str) -> None:
    def affect(message: Delivery) -> object:
        leave(message)
        return value

    outcome = run(affect, keep_result=True, transactional=True)
    assert isinstance(outcome, Retry)
    assert outcome.error.startswith(f"TypeError: what the handler returned cannot be kept: {reason}")
    assert not Effect.objects.exists()


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (Odd("no"), f"{__name__}.Odd"),
        (KeyError("no"), "builtins.KeyError"),
        (SystemExit(1), "builtins.SystemExit"),
        (HandlerTimeout(), "django_delayq.core.exceptions.HandlerTimeout"),
        (RetryLater(0), "django_delayq.project.answers.RetryLater"),
        (Reject("no"), "django_delayq.project.answers.Reject"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("retry", [[0], []], ids=["retried", "dead"])
def test_the_log_names_the_class_of_what_a_handler_raised(
    recorder: Recorder, error: BaseException, path: str, retry: list[int]
) -> None:
    message = recorded(recorder, raises(error), retry=retry, timeout="1m")
    # RetryLater asks for another delivery whatever the policy says, and Reject for none.
    fate = State.SCHEDULED if (retry or isinstance(error, RetryLater)) and not isinstance(error, Reject) else State.DEAD
    last = log_of(message)[-1]
    assert (last.to_state, last.exception) == (fate, path)


@pytest.mark.postgresql("an error of SQLite is one line")
def test_like_errors_of_the_database_are_of_one_kind_which_names_their_class(recorder: Recorder) -> None:
    """PostgreSQL's errors have more lines: the values of a row, and a mark below the statement."""

    def twice(message: Delivery) -> None:
        for _ in range(2):
            Effect.objects.create(pk=message.id, message_id=message.id, delivery=message.deliveries)

    def of(table: str) -> Callable[[Delivery], None]:
        return lambda _message: connection.cursor().execute(f"SELECT nothing FROM {table}")

    ways = (twice, twice, of("absent_1"), of("tests_app_effect"))
    kinds = [recorded(recorder, way, retry=False).error for way in ways]
    assert kinds[0] == kinds[1] == "IntegrityError: duplicate key value violates unique constraint …"
    assert kinds[2:] == ["ProgrammingError: relation … does not exist", "ProgrammingError: column … does not exist"]


class Gone(Reject):
    """One whose ``__init__`` does not call that of ``Reject``, as a dataclass does not either."""

    def __init__(self, order: int) -> None:
        pass


class Later(RetryLater):
    def __init__(self, order: int) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Gone(5), "Reject: 5"),
        (Later(5), "Later: 5"),
        # Python cannot format this one.
        (SyntaxError("odd", ("page.html", 1, cast("Any", "z"), "text")), "SyntaxError: odd (page.html, line 1)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_lacks_what_it_should_have_is_answered_all_the_same(
    recorder: Recorder, error: Exception, told: str
) -> None:
    message = recorded(recorder, raises(error), retry=False)
    assert (message.state, message.attempts, log_of(message)[-1].error) == (State.DEAD, 1, told)
    assert isinstance(error, Reject) or "raise error" in log_of(message)[-1].traceback


def test_a_message_is_delivered_as_much_later_as_its_handler_asks(recorder: Recorder) -> None:
    message = recorded(recorder, raises(RetryLater("1000d")))
    assert message.due_at - message.created_at >= timedelta(days=1000)


# --- payloads that are left for the next attempt ----------------------------------------------------------------------


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
        ("x" * 2_000_000, "PayloadTooLarge: the payload has 2000002 bytes of JSON"),
    ],
    ids=["object", "large"],
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


def test_failures_with_and_without_a_payload_are_written_together() -> None:
    handler(TOPIC)(leave)
    held = claimed(*[TOPIC] * 3)
    unguarded(Message).update(payload={"old": "ü"})
    failures = [
        Failure(one.id, one.deliveries, "worker:w", delay=timedelta(0), payload=payload)
        for one, payload in zip(held, [None, '{"n": 1}', "null"], strict=True)
    ]
    assert len(transitions.fail(DB, failures)) == 3
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
