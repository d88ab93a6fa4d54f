"""What a handler returns is kept with the message if the handler keeps its results, and what it raises by its class."""

from __future__ import annotations

import asyncio
import decimal

import pytest

from django_delayq import Reject, RetryLater, handler
from django_delayq.core.exceptions import HandlerTimeout
from django_delayq.core.outcomes import Retry
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success
from django_delayq.worker.parts.delivery import Delivery
from django_delayq.worker.run.recorder import Recorder
from tests.app.handlers import leave
from tests.app.models import Effect
from tests.support.claims import DB, claimed
from tests.support.record_of import log_of
from tests.worker.bench import TOPIC, raises, recorded, returns, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("value", [{"a": [1, None, "ü'\"\\"]}, [], 0, False, "", "text", -1.5])
def test_a_result_is_kept_with_the_message(recorder: Recorder, value: object, transactional: bool) -> None:
    message = recorded(recorder, returns(value), keep_result=True, transactional=transactional)
    assert message.state == State.CONSUMED
    assert message.result == value
    assert type(message.result) is type(value)


def test_the_result_of_an_async_handler_is_kept(recorder: Recorder) -> None:
    async def answer(message: Delivery) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"id": message.id}

    message = recorded(recorder, answer, keep_result=True)
    assert message.result == {"id": message.pk}


def test_a_result_becomes_json_as_a_payload_does(recorder: Recorder) -> None:
    message = recorded(recorder, returns({"total": decimal.Decimal("49.90"), "of": (1, 2)}), keep_result=True)
    assert message.result == {"total": "49.90", "of": [1, 2]}


def test_a_handler_that_returns_none_or_keeps_nothing_has_no_result(recorder: Recorder) -> None:
    for message in (recorded(recorder, returns(None), keep_result=True), recorded(recorder, returns(7))):
        assert message.state == State.CONSUMED
        assert message.result is None
    assert Message.objects.filter(result__isnull=True).count() == 2


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
        ("\x00", "the result holds a NUL character"),
        (float("nan"), "the result is not JSON: Out of range float values are not JSON compliant"),
        (2**63, "the result holds an integer of more than 64 bits"),
        ("x" * 2_000_000, "the result has 2000002 bytes of JSON, more than DELAYQ['PAYLOAD_MAX_BYTES']"),
    ],
    ids=["object", "set", "nul", "nan", "long", "large"],
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


def test_moves_without_an_exception_name_none(recorder: Recorder) -> None:
    recorded(recorder, returns(1))
    assert set(Transition.objects.values_list("exception", flat=True)) == {""}
